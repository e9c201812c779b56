"""The model, the answers and the cluster that these tests share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.head import ROOT, Head, running_head
from tests.cluster.request_files import REQUESTS, texts, write_lines
from tests.conftest import TinyCheckpoint
from tests.e2e.word_model import add_chat_template, add_tokenizer


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def expected_texts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the command line answers to REQUESTS, without a cluster."""
    folder = tmp_path_factory.mktemp("local")
    requests = write_lines(folder / "in.jsonl", REQUESTS)
    command = [sys.executable, "-m", "hotcold.jobs.generate", "--requests", str(requests)]
    command += ["--out", str(folder / "out.jsonl"), "--model", str(model), "--cpu-actors", "2"]
    plain = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    subprocess.run(command, cwd=ROOT, env=plain, check=True, timeout=300)
    found = texts(folder / "out.jsonl")
    assert list(found) == [line["id"] for line in REQUESTS] and all(found.values())
    return found
