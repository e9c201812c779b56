"""What `hotcold doctor MODEL` says of a model's files, and its exit status."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hotcold.jobs.cli import main
from hotcold.jobs.support.model_checks import check_files
from hotcold.model.text.tokenizer import Tokenizer
from tests.chain_model import END, write_chain
from tests.gguf_files import Draft
from tests.unit.test_gguf_tokenizer import byte_level_draft

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
)


Told = dict[str, list[tuple[str, str]]]


def checked(path: Path) -> Told:
    """What is said by subjects: levels and texts."""
    found: Told = {}
    for one in check_files(path):
        found.setdefault(one.subject, []).append((one.level, one.text))
    return found


def said(found: Told, subject: str) -> str:
    return " / ".join(text for _, text in found[subject])


def whole(template: str = TEMPLATE, pre: str = "qwen2", **keys: str) -> Draft:
    """A GGUF file that chats: byte-level, with the tokens of the template."""
    of_tokens = {"pre": pre, "bos_token_id": 0, "eos_token_id": 1, "add_bos_token": True}
    made = byte_level_draft(("<|im_start|>", "<|im_end|>"), **of_tokens)
    made = made.with_keys(tokenizer__chat_template=template)
    for name in keys:
        made = made.without_key(name.replace("__", "."))
    return made.with_keys(**keys)


def written(made: Draft, folder: Path) -> Path:
    path = folder / "a.gguf"
    path.write_bytes(made.content())
    return path


def test_a_file_that_chats(tmp_path: Path) -> None:
    made = whole().with_keys(
        llama__vocab_size=300, llama__attention__sinks=0.5, general__sampling__temp=0.6
    )
    found = checked(written(made, tmp_path))
    assert "llama, which the file calls 'llama': 1 layers of d 32" in said(found, "family")
    assert said(found, "formats") == "11 tensors of F32"
    assert "gpt2, cut into words as qwen2" in said(found, "tokenizer")
    assert "texts begin with <s>" in said(found, "tokenizer")
    assert said(found, "end tokens") == "</s>, <|im_end|>"
    assert {"thinking", "tools", "chat template"} <= found.keys()
    assert all(level == "note" for level, _ in found["left out"])
    assert "keys that change nothing: llama.vocab_size" in said(found, "left out")
    assert "not read: llama.attention.sinks (0.5); answers differ" in said(found, "left out")
    assert said(found, "sampling") == "temperature 0.6"
    assert "BOS" not in found and "special tokens" not in found


@pytest.mark.parametrize(
    ("made", "status", "line"),
    [
        (whole(), 0, "end tokens ok </s>, <|im_end|>"),
        (whole(general__type="mmproj"), 1, "refused problem"),
        (whole("{% if %}"), 1, "chat template problem"),
    ],
)
def test_the_command(
    made: Draft, status: int, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(made, tmp_path)
    assert main(["doctor", str(path), "--no-measure", "--json"]) == status
    *lines, report = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "the model's files"
    assert any(" ".join(one.split()).startswith(line) for one in lines)
    assert json.loads(report)["files"] == [asdict(one) for one in check_files(path)]


def of_i8() -> Draft:
    """A matrix of a type that is not read: one byte a weight, where four are."""
    made = whole()
    tensors = [
        replace(one, type=24 if one.name.endswith("ffn_down.weight") else 0) for one in made.tensors
    ]
    return replace(made, tensors=tuple(tensors))


@pytest.mark.parametrize(
    ("made", "level", "subject", "told"),
    [
        (
            whole(tokenizer__ggml__pre="of-next-year"),
            "problem", "refused", "'of-next-year'.*take the model's own",
        ),
        (
            whole(general__architecture="of-next-year"),
            "problem", "refused", "general.architecture is 'of-next",
        ),
        (whole(general__type="mmproj"), "problem", "refused", "give the model's own file"),
        (whole("{% if %}"), "problem", "chat template", "bad chat template"),
        (
            whole().without_key("tokenizer.chat_template"),
            "problem", "chat template", "trained for conversations",
        ),
        (of_i8(), "problem", "refused", r"of types that are not read: I8 \(1\); take"),
        (
            whole(TEMPLATE.replace("im_start", "turn_start")),
            "note", "special tokens", r"<\|turn_start\|> \(",
        ),
        (
            whole(TEMPLATE.replace("{{ bos_token }}", "<s><s>")),
            "note", "BOS", "writes <s> twice",
        ),
        (
            whole(TEMPLATE.replace("<|im_end|>", "<|im_start|>")),
            "note", "end tokens", r"turn with <\|im_start\|>",
        ),
        (
            whole().without_key("tokenizer.ggml.pre"),
            "note", "tokenizer", "as GPT-2's; take a newer file",
        ),
    ],
)  # fmt: skip
def test_what_is_refused_or_may_change_an_answer(
    made: Draft, level: str, subject: str, told: str, tmp_path: Path
) -> None:
    found = checked(written(made, tmp_path))
    texts = [text for one, text in found[subject] if one == level]
    assert re.search(told, " / ".join(texts)) and not any("\n" in text for text in texts)
    assert said(found, "formats").startswith("10 tensors of F32, 1" if "I8" in told else "11 ")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\xff\xff\xff\xff" * 9, b"no model at all"])
def test_a_damaged_file_is_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    assert main(["doctor", str(tmp_path / "a.gguf"), "--no-measure"]) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("hotcold: error: ")
    assert told.err.count("\n") == 1


def test_a_folder(tmp_path: Path) -> None:
    """With what a vision tower and the prediction of more tokens leave behind."""
    path = write_chain(tmp_path, TEMPLATE, ["<|im_start|>", "<|im_end|>", "a"])
    weights = load_file(path / "model.safetensors")
    more: dict[str, Any] = {
        "visual.blocks.0.weight": np.zeros((2, 2), np.float32),
        "model.layers.2.eh_proj.weight": np.zeros((2, 2), np.float32),
        "model.layers.0.mystery.weight": np.zeros((2, 2), np.float32),
    }
    save_file(weights | more, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config |= {"logits_multiplier": 3.0, "use_cache": True}
    (path / "config.json").write_text(json.dumps(config))
    found = checked(path)
    left = said(found, "left out")
    for told in ("the part that sees", "(MTP)", "mystery.weight; answers differ",
                 "not read: logits_multiplier (3.0)"):  # fmt: skip
        assert told in left
    assert "use_cache" not in left
    assert said(found, "end tokens") == f"{END}, <|im_end|>"
    assert "from tokenizer.json" in said(found, "tokenizer")


def test_a_model_of_the_hub_is_not_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert main(["doctor", "org/repo:Q4_K_M", "--no-measure"]) == 1
    assert "`hotcold pull org/repo:Q4_K_M` fetches it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("says", "has_bos", "begins"),
    [(True, True, "<s>"), (True, False, "<s>"), (False, True, "<s>"), (False, False, "")],
)
def test_chats_of_gguf_files_begin_with_bos_once(
    says: bool, has_bos: bool, begins: str, tmp_path: Path
) -> None:
    """Some files say that texts begin with it, and leave it out of their template."""
    template = TEMPLATE if has_bos else TEMPLATE.replace("{{ bos_token }}", "")
    made = whole(template, "llama-bpe")
    own = Tokenizer.from_model(
        written(made if says else made.without_key("tokenizer.ggml.add_bos_token"), tmp_path)
    )
    assert own is not None and own.bos == "<s>"
    assert own.render_chat([{"role": "user", "content": "a"}]) == (
        f"{begins}<|im_start|>user\na<|im_end|>\n"
    )
