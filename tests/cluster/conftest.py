"""The model and the cluster that these tests share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.head import Head, running_head
from tests.conftest import TinyCheckpoint
from tests.e2e.word_model import add_chat_template, add_tokenizer


@pytest.fixture(scope="package")
def head() -> Iterator[Head]:
    with running_head(num_cpus=2) as running:
        yield running


@pytest.fixture(scope="session")
def checkpoint(tiny: Callable[..., TinyCheckpoint]) -> TinyCheckpoint:
    return tiny("llama-relu")


@pytest.fixture(scope="session")
def model(checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with a tokenizer of words and a chat template."""
    path = tmp_path_factory.mktemp("cluster") / "model"
    shutil.copytree(checkpoint.path, path)
    add_tokenizer(path)
    add_chat_template(path)
    return path
