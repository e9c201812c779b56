"""A large vocabulary's tokenizer is kept, in a folder of this user's alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotcold.model.text import gguf_tokenizer as module
from hotcold.model.text.tokenizer import Tokenizer
from tests.unit.test_gguf_tokenizer import LINES, draft, pieces_of, written


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
