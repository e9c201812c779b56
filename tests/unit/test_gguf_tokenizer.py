"""Tokenizers of GGUF files, and of models without tokenizer.json."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from hotcold.model.errors import ConfigError
from hotcold.model.text import gguf_tokenizer as module
from hotcold.model.text.tokenizer import Tokenizer
from tests.gguf_files import Draft, small_llama
from tests.unit.test_tokenizer import byte_level

LINES = [
    "Hello world, it's 12345 o'clock; DON'T go!",
    "  two spaces\n\n\nthree lines\tand\t\ttabs   ",
    "naïve café — 東京で会いましょう 🙂🙃 привет мир",
    "def f(x):\n    return x**2  # comment\r\n",
    "<|user|>hello</s> world<s>",
    "a" * 70 + " 3.14159 1,000,000 $5 100%",
    "",
]
PLAIN_LINES = [line for line in LINES if line and "<" not in line]


def draft(kind: str, tokens: list[str], kinds: list[int], **keys: Any) -> Draft:
    """A model's file with this vocabulary."""
    made = small_llama(len(tokens))
    for name in ("model", "tokens", "token_type", "scores", "bos_token_id", "eos_token_id"):
        made = made.without_key(f"tokenizer.ggml.{name}")
    keys = {"model": kind, "tokens": tokens, "token_type": list(map(int, kinds))} | keys
    return made.with_keys(**{f"tokenizer__ggml__{name}": value for name, value in keys.items()})


@functools.cache
def vocabulary() -> dict[str, Any]:
    """Of `byte_level`."""
    found: dict[str, Any] = json.loads(byte_level().to_str())["model"]
    return found


def byte_level_draft(more: tuple[str, ...] = (), **keys: Any) -> Draft:
    """With the vocabulary of `byte_level`, and control tokens behind it."""
    model = vocabulary()
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), *more]
    kinds = [3 if token[0] == "<" and len(token) > 2 else 1 for token in tokens]
    return draft("gpt2", tokens, kinds, merges=[" ".join(pair) for pair in model["merges"]], **keys)


def written(made: Draft, path: Path) -> Path:
    path.write_bytes(made.content())
    return path


def whole(path: Path) -> Tokenizer:
    found = Tokenizer.from_model(path)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("keys", "first", "last"),
    [
        ({}, None, None),
        ({"add_bos_token": True, "add_eos_token": True}, 0, 1),
        ({"pre": "llama-bpe", "add_bos_token": False}, None, None),
    ],
)
def test_where_texts_begin_and_end(
    keys: dict[str, Any], first: int | None, last: int | None, tmp_path: Path
) -> None:
    made = byte_level_draft(bos_token_id=0, eos_token_id=1, **{"pre": "gpt-2", **keys})
    own = whole(written(made, tmp_path / "a.gguf"))
    plain, ids = own.encode("hello", add_special_tokens=False), own.encode("hello")
    assert ids == [*([] if first is None else [first]), *plain, *([] if last is None else [last])]


def pieces_of(lines: list[str]) -> tuple[list[str], list[int], list[float]]:
    """A vocabulary as SentencePiece trains one: pieces by their scores, bytes, control tokens."""
    counts: dict[str, int] = {}
    for line in lines:
        text = "▁" + line.replace(" ", "▁")
        for size in (1, 2, 3, 4):
            for at in range(len(text) - size + 1):
                counts[text[at : at + size]] = counts.get(text[at : at + size], 0) + size
    letters = [piece for piece in counts if len(piece) == 1 and piece not in "東京🙃"]
    longer = sorted((p for p in counts if len(p) > 1), key=lambda p: (-counts[p], p))[:400]
    tokens = ["<unk>", "<s>", "</s>", "<|user|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3, 4, *([6] * 256)]
    scores = [0.0] * len(tokens)
    for rank, piece in enumerate([*longer, *letters]):
        tokens.append(piece)
        kinds.append(1)
        scores.append(-float(rank))
    return tokens, kinds, scores


def test_special_tokens_are_found_whole_and_left_out(tmp_path: Path) -> None:
    tokens, kinds, scores = pieces_of(["hello world"])
    made = draft("llama", tokens, kinds, scores=scores, bos_token_id=1)
    own = whole(written(made, tmp_path / "a.gguf"))
    ids = own.encode("<|user|>hello</s>")
    assert (ids[0], ids[1], ids[-1]) == (1, 3, 2)
    assert own.decode(ids) == "<|user|> hello"  # control tokens are left out, user-defined are not


def sentencepiece_file(folder: Path, kind: int = 2, prefix: bool = True) -> Path:
    """Write a model by protobuf itself."""
    from transformers.utils import sentencepiece_model_pb2_new as proto

    model = proto.ModelProto()
    for text, own, score in zip(*pieces_of(PLAIN_LINES), strict=True):
        model.pieces.add(piece=text, type=own, score=score)
    model.trainer_spec.model_type = kind
    model.normalizer_spec.add_dummy_prefix = prefix
    model.normalizer_spec.precompiled_charsmap = b"\0\1\2"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    beside = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(beside))
    return folder


@pytest.mark.parametrize("is_gguf", [True, False])
def test_texts_begin_with_a_space_where_the_model_says_so(is_gguf: bool, tmp_path: Path) -> None:
    """All other ids are compared with SentencePiece's own in test_ten_thousand_lines.py."""
    tokens, kinds, scores = pieces_of(PLAIN_LINES)

    def read(prefix: bool) -> Tokenizer:
        path = tmp_path / f"{prefix}"
        if is_gguf:
            keys = {"scores": scores, "bos_token_id": 1, "add_space_prefix": prefix}
            written(draft("llama", tokens, kinds, **keys), path)
        else:
            sentencepiece_file(path, prefix=prefix)
        return whole(path)

    own, without = read(True), read(False)
    for line in PLAIN_LINES:
        found = own.encode(line)
        assert found == without.encode(f" {line}") != without.encode(line)
        assert own.decode(found) == line
    assert own.encode("</s>")[-1] == 2


def test_damaged_models_are_refused(tmp_path: Path) -> None:
    sentencepiece_file(tmp_path, kind=1)
    with pytest.raises(ConfigError, match="of kind 1, only BPE"):
        Tokenizer.from_model(tmp_path)
    sentencepiece_file(tmp_path)
    file = tmp_path / "tokenizer.model"
    content = file.read_bytes()
    for damaged in (b"", b"\xff" * 20, content[:100], b"\x0a\xff\xff\xff\xff\x0f", b"\x0b\x01"):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"tokenizer\.model"):
            Tokenizer.from_model(tmp_path)


def test_merges_in_a_file_of_their_own(tmp_path: Path) -> None:
    """Their ids are compared with tokenizer.json's in test_ten_thousand_lines.py."""
    model = vocabulary()
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    beside = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside))
    own = whole(tmp_path)
    assert own.encode("hello") == [0, *own.encode("hello", add_special_tokens=False)]
    (tmp_path / "merges.txt").write_text("a b c\n")
    with pytest.raises(ConfigError, match="no pair"):
        Tokenizer.from_model(tmp_path)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_LARGE", 10)
    tokens, kinds, scores = pieces_of(["hello world", "one two three"])
    return written(draft("llama", tokens, kinds, scores=scores, bos_token_id=1), tmp_path / "m")


def ids(file: Path) -> list[list[int]]:
    own = whole(file)
    return [own.encode(line) for line in LINES]


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache/hotcold/tokenizers").glob("*.json"))


def test_it_is_built_once(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ids(file)
    (there,) = kept(tmp_path)
    assert there.stat().st_mode & 0o077 == 0 or there.parent.stat().st_mode & 0o077 == 0

    def never(*_: object) -> None:
        raise AssertionError("built again")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_sentencepiece", never)
        assert ids(file) == first
    whole = there.read_bytes()
    swapped = whole.replace(b'"h":', b'"?":').replace(b'"w":', b'"h":').replace(b'"?":', b'"w":')
    for damaged in (whole[:100], swapped):
        assert damaged != whole
        there.write_bytes(damaged)
        assert ids(file) == first  # and mended
        assert there.read_bytes() == whole


def test_a_folder_of_others_is_not_used(file: Path, tmp_path: Path) -> None:
    first = ids(file)
    (there,) = kept(tmp_path)
    there.write_bytes(b"{}")
    (tmp_path / "cache/hotcold/tokenizers").chmod(0o777)
    assert ids(file) == first
    assert there.read_bytes() == b"{}"


def test_phi3_leaves_out_white_space_after_its_tokens(tmp_path: Path) -> None:
    """As its tokenizer.json says, and GGUF cannot: not after <s> and <|endoftext|>."""
    texts = ["<unk>", "<s>", "<|endoftext|>", "<|end|>", "<|user|>", "▁", "a", "\n"]
    made = draft("llama", texts, [2, 3, 3, 3, 3, 1, 1, 1], add_bos_token=False)
    found = {}
    for architecture in ("llama", "phi3"):
        named = made.without_key("general.architecture")
        named = named.with_keys(general__architecture=architecture)
        own = whole(written(named, tmp_path / f"{architecture}.gguf"))
        found[architecture] = own.encode("<|user|>\n\na<|end|>\n<s>\na")
    assert found["phi3"] == [4, 5, 6, 3, 1, 5, 7, 6]
    assert found["llama"] == [4, 5, 7, 7, 6, 3, 5, 7, 1, 5, 7, 6]
