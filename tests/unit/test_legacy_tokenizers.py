"""tokenizer.model and vocab.json with merges.txt, where there is no tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hotcold.model.errors import ConfigError
from hotcold.model.text.legacy_tokenizers import read_sentencepiece
from hotcold.model.text.tokenizer import Tokenizer
from tests.unit.test_gguf_tokenizer import LINES, pieces_of, slow_ids
from tests.unit.test_tokenizer import byte_level


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
