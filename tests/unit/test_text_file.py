"""Text files as token ids: plain and JSON lines, in pieces as in one, and what is refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.driver.prompts import Prompts
from hotcold.jobs.support.text_file import TextIds, read_text_ids
from hotcold.model.config.build import read_config
from hotcold.model.errors import HotcoldError, UsageError
from hotcold.model.files.locate import DEMO_DIRECTORY
from tests.tiny_models import make_tiny

BOS, EOS = 1, 2  # the demo model's


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts(DEMO_DIRECTORY, read_config(DEMO_DIRECTORY), 512)


def read(prompts: Prompts, folder: Path, name: str, content: str | bytes) -> TextIds:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_text_ids(file, prompts)


def encoded(prompts: Prompts, text: str) -> list[int]:
    assert prompts.tokenizer is not None
    return prompts.tokenizer.encode(text, add_special_tokens=False)


def test_a_long_text_in_pieces_has_the_ids_of_the_whole(prompts: Prompts) -> None:
    file = DEMO_DIRECTORY / "heldout.txt"
    text = file.read_text("utf-8")
    shares: list[float] = []
    found = read_text_ids(file, prompts, shares.append)
    assert found.ids.dtype == np.int32
    assert found.ids.tolist() == encoded(prompts, text)
    assert BOS not in found.ids
    assert found.name == "heldout.txt"
    assert found.digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) > 2


def test_json_lines(prompts: Prompts, tmp_path: Path) -> None:
    question = {"role": "user", "content": "What is it?"}
    answer = {"role": "assistant", "content": "A test."}
    lines = [
        {"text": "First one.", "url": "ignored"},
        {"messages": [question]},
        {"text": ""},
        {"messages": [question, answer]},
        {"text": "<|bos|>Last é."},
    ]
    content = "\r\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    found = read(prompts, tmp_path, "some.JSONL", content)
    asked = encoded(prompts, "<|user|>What is it?<|eos|>")
    expected = [
        *encoded(prompts, "First one."), EOS,
        *asked, *encoded(prompts, "<|assistant|>"), EOS,
        *asked, *encoded(prompts, "<|assistant|>A test.<|eos|>"),  # ends with eos by itself
        *encoded(prompts, "Last é."),
    ]  # fmt: skip
    assert found.ids.tolist() == expected


def test_without_bos_and_eos_documents_follow_each_other(prompts: Prompts, tmp_path: Path) -> None:
    bare = Prompts(DEMO_DIRECTORY, replace(prompts.config, bos_token_id=None, eos_token_ids=()), 9)
    found = read(bare, tmp_path, "a.json", '{"text": "one"}\n{"text": "<|bos|>two"}\n')
    assert found.ids.tolist() == [*encoded(prompts, "one"), BOS, *encoded(prompts, "two")]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.txt", b" \n\n", "is empty"),
        ("a.txt", b"\xef\xbb\xbf", "holds no text"),
        ("a.txt", b"good \xff\xfe", "is not UTF-8 (byte 5)"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "\xff"}', "line 3: not JSON in UTF-8"),
        ("a.jsonl", b'{"text": "a"}\nnonsense', "line 2: not JSON in UTF-8"),
        ("a.jsonl", b"[1]", "line 1: [1] is no document"),
        ("a.jsonl", b'{"text": 1}', "is no document"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "is no document"),
        ("a.jsonl", b'{"text": "a", "messages": []}', "both"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1: the prompt is no valid Unicode"),
        ("a.jsonl", b"[" * 100_000, "line 1: not JSON"),
    ],
)
def test_what_is_refused(
    prompts: Prompts, tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    with pytest.raises(UsageError) as caught:
        read(prompts, tmp_path, name, content)
    text = str(caught.value)
    assert problem in text and name in text and "\n" not in text and len(text) < 400


def test_missing_files_tokenizers_and_foreign_ids(prompts: Prompts, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_text_ids(tmp_path / "none.txt", prompts)
    with pytest.raises(UsageError, match="cannot be read"):
        read_text_ids(tmp_path, prompts)
    model = make_tiny("llama-relu", tmp_path / "model")
    with pytest.raises(UsageError, match="needs a tokenizer"):
        read(Prompts(model, read_config(model), 64), tmp_path, "a.txt", "one")
    small = Prompts(DEMO_DIRECTORY, replace(prompts.config, vocab_size=10), 512)
    with pytest.raises(HotcoldError, match="the model knows 0"):
        read(small, tmp_path, "a.txt", "one two three")
