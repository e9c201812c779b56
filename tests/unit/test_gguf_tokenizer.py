"""Tokenizers of GGUF files, and of models without tokenizer.json: ids beside transformers' own."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from hotcold.model.errors import ConfigError
from hotcold.model.text import gguf_tokenizer as module
from hotcold.model.text.legacy_tokenizers import read_sentencepiece
from hotcold.model.text.splittings import SPLITTINGS
from hotcold.model.text.tokenizer import Tokenizer
from tests.gguf_files import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, Draft, array, small_llama
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


def draft(kind: str, tokens: list[str], kinds: list[int], **keys: Any) -> Draft:
    """A model's file with this vocabulary."""
    made = small_llama()
    for name in ("model", "tokens", "token_type", "scores", "bos_token_id", "eos_token_id"):
        made = made.without_key(f"tokenizer.ggml.{name}")
    made = made.with_key("tokenizer.ggml.model", STRING, kind)
    made = made.with_key("tokenizer.ggml.tokens", ARRAY, array(STRING, tokens))
    made = made.with_key("tokenizer.ggml.token_type", ARRAY, array(INT32, kinds))
    for name, value in keys.items():
        if isinstance(value, bool):
            made = made.with_key(f"tokenizer.ggml.{name}", BOOL, value)
        elif isinstance(value, int):
            made = made.with_key(f"tokenizer.ggml.{name}", UINT32, value)
        elif isinstance(value, str):
            made = made.with_key(f"tokenizer.ggml.{name}", STRING, value)
        else:
            items = array(FLOAT32 if isinstance(value[0], float) else STRING, value)
            made = made.with_key(f"tokenizer.ggml.{name}", ARRAY, items)
    return made


def written(made: Draft, path: Path) -> Path:
    path.write_bytes(made.content())
    return path


def theirs(path: Path) -> Any:
    """transformers' tokenizer of the file."""
    read = pytest.importorskip(
        "transformers.integrations.gguf.gguf_tokenizer_mapping", reason="transformers < 5.17"
    )
    architecture, vocabulary, _ = read.get_gguf_tokenizer(str(path))
    return read.convert_gguf_tokenizer(architecture, vocabulary)[0]


def byte_level_file(path: Path, pre: str, **keys: Any) -> Path:
    import json

    model = json.loads(byte_level().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(pair) for pair in model["merges"]]
    kinds = [3 if i < 3 else 1 for i in range(len(tokens))]
    return written(draft("gpt2", tokens, kinds, merges=merges, pre=pre, **keys), path)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "glm4"])
def test_byte_level_ids_are_transformers(pre: str, tmp_path: Path) -> None:
    path = byte_level_file(tmp_path / "a.gguf", pre, bos_token_id=0, add_bos_token=False)
    own, other = Tokenizer.from_model(path), theirs(path)
    assert own is not None
    for line in LINES:
        ids = other.encode(line, add_special_tokens=False).ids
        if not SPLITTINGS[pre].whole_words:  # which transformers leaves out
            assert own.encode(line) == ids, line
        assert own.decode(own.encode(line), skip_special_tokens=False) == line


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
    pre = keys.get("pre", "gpt-2")
    rest = {name: value for name, value in keys.items() if name != "pre"}
    path = byte_level_file(tmp_path / "a.gguf", pre, bos_token_id=0, eos_token_id=1, **rest)
    own = Tokenizer.from_model(path)
    assert own is not None
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


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_merges_are_the_best_pair_first(prefix: bool, tmp_path: Path) -> None:
    """Against SentencePiece's own rule, spelled out: join the best pair until none is a piece."""
    tokens, kinds, scores = pieces_of([line for line in LINES if "<" not in line])
    made = draft("llama", tokens, kinds, scores=scores, bos_token_id=1, add_space_prefix=prefix)
    own = Tokenizer.from_model(written(made, tmp_path / "a.gguf"))
    assert own is not None
    ids = {token: number for number, token in enumerate(tokens)}
    score = {t: s for t, s, kind in zip(tokens, scores, kinds, strict=True) if kind == 1}
    generator = random.Random(3)
    words = " ".join(LINES).replace("<|user|>", "").replace("<s>", "").replace("</s>", "")
    for _ in range(60):
        start = generator.randrange(len(words) - 30)
        text = words[start : start + generator.randrange(1, 30)]
        expected = [1, *slow_ids(("▁" if prefix else "") + text.replace(" ", "▁"), score, ids)]
        assert own.encode(text) == expected, text
        assert own.decode(expected) == text or not prefix


def slow_ids(text: str, score: dict[str, float], ids: dict[str, int]) -> list[int]:
    parts = list(text)
    while True:
        pairs = [
            (-score[a + b], at)
            for at, (a, b) in enumerate(itertools.pairwise(parts))
            if a in score and b in score and a + b in score
        ]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found = []
    for part in parts:
        if part in ids:
            found.append(ids[part])
        else:
            found += [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


def test_special_tokens_are_found_whole_and_left_out(tmp_path: Path) -> None:
    tokens, kinds, scores = pieces_of(["hello world"])
    made = draft("llama", tokens, kinds, scores=scores, bos_token_id=1)
    own = Tokenizer.from_model(written(made, tmp_path / "a.gguf"))
    assert own is not None
    ids = own.encode("<|user|>hello</s>")
    assert (ids[0], ids[1], ids[-1]) == (1, 3, 2)
    assert own.decode(ids) == "<|user|> hello"  # control tokens are left out, user-defined are not


def sentencepiece_file(folder: Path, kind: int = 2, prefix: bool = True) -> tuple[list[str], dict]:
    """Write a model by protobuf itself; returns its tokens, and scores of those that merge."""
    from transformers.utils import sentencepiece_model_pb2_new as proto

    tokens, kinds, scores = pieces_of([line for line in LINES if "<" not in line])
    model = proto.ModelProto()
    for text, own, score in zip(tokens, kinds, scores, strict=True):
        model.pieces.add(piece=text, type=own, score=score)
    model.trainer_spec.model_type = kind
    model.normalizer_spec.add_dummy_prefix = prefix
    model.normalizer_spec.precompiled_charsmap = b"\0\1\2"
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    beside = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(beside))
    entries = zip(tokens, scores, kinds, strict=True)
    return tokens, {text: score for text, score, own in entries if own == 1}


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool, tmp_path: Path) -> None:
    tokens, score = sentencepiece_file(tmp_path, prefix=prefix)
    pieces, kind, has_prefix = read_sentencepiece(tmp_path / "tokenizer.model")
    assert (list(pieces.texts), kind, has_prefix) == (tokens, 2, prefix)
    own = Tokenizer.from_model(tmp_path)
    assert own is not None
    ids = {token: number for number, token in enumerate(tokens)}
    for line in LINES:
        if "<" not in line and line:
            text = ("▁" if prefix else "") + line.replace(" ", "▁")
            assert own.encode(line) == [1, *slow_ids(text, score, ids)]
            assert own.decode(own.encode(line)) == line
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


def test_merges_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    model = json.loads(byte_level().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    beside = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside))
    own, other = Tokenizer.from_model(tmp_path), GPT2Tokenizer.from_pretrained(tmp_path)
    assert own is not None
    for line in LINES:
        expected = other(line, add_special_tokens=False)["input_ids"]
        assert own.encode(line) == [0, *expected]
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
    own = Tokenizer.from_model(file)
    assert own is not None
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
        named = named.with_key("general.architecture", STRING, architecture)
        own = Tokenizer.from_model(written(named, tmp_path / f"{architecture}.gguf"))
        assert own is not None
        found[architecture] = own.encode("<|user|>\n\na<|end|>\n<s>\na")
    assert found["phi3"] == [4, 5, 6, 3, 1, 5, 7, 6]
    assert found["llama"] == [4, 5, 7, 7, 6, 3, 5, 7, 1, 5, 7, 6]
