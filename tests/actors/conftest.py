"""What tests of several files share on one Ray."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actors.kept_system import KeptSystem
from tests.e2e.word_model import add_tokenizer
from tests.tiny_checkpoint import Tiny, TinyCheckpoint


@pytest.fixture(scope="session")
def words(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """A copy with a tokenizer: other tests use the checkpoint without one."""
    path = tmp_path_factory.mktemp("words") / "model"
    shutil.copytree(tiny("llama-gqa", "float16").path, path)
    add_tokenizer(path)
    return TinyCheckpoint(path)


@pytest.fixture(scope="session")
def kept(local_ray: None, words: TinyCheckpoint) -> Iterator[KeptSystem]:
    """The system that tests share."""
    found = KeptSystem(words)
    yield found
    found.end()


@pytest.fixture
def copied(tiny: Tiny, tmp_path: Path) -> TinyCheckpoint:
    """A copy of a checkpoint, which a test may put files beside."""
    return TinyCheckpoint(Path(shutil.copytree(tiny("llama-relu").path, tmp_path / "model")))
