"""The demo model's corpus: known docstrings give known questions; held-out modules stay out.

The text to profile it on is fair.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.train_demo.corpus import (
    HELD_OUT_MODULES,
    Entry,
    held_out_text,
    questions,
    running_text,
    stdlib_entries,
)
from examples.train_demo.text import write_demo_text
from hotcold.actors.driver.prompts import Prompts
from hotcold.jobs.support.text_file import read_text_ids
from hotcold.model.config.build import read_config
from hotcold.model.files.locate import DEMO_DIRECTORY

NUM_TOKENS = 12_000


@pytest.fixture(scope="module")
def entries() -> Iterator[list[Entry]]:
    """Read once: it is the whole standard library."""
    found = stdlib_entries()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("examples.train_demo.text.stdlib_entries", lambda: found)
        yield found


def test_held_out_modules_are_absent_from_training(entries: list[Entry]) -> None:
    assert not {q.name.split(".")[0] for q in questions(entries)} & HELD_OUT_MODULES
    held_out = "Read from and write to tar format archives."
    assert held_out in held_out_text(entries)
    assert not any(held_out in document for document in running_text(entries))


@pytest.fixture(scope="module")
def documents(entries: list[Entry], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of the demo's text; that it has the tokens asked for is checked on the way."""
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    num_documents, num_tokens = write_demo_text(file, NUM_TOKENS)
    found = _ids(file)
    assert found.num_documents == num_documents
    assert abs(found.ids.size - num_tokens) <= 1  # the last text is followed by no eos
    assert NUM_TOKENS <= num_tokens < NUM_TOKENS * 1.1
    return file.read_text().splitlines()


def _ids(file: Path) -> Any:
    return read_text_ids(file, Prompts(DEMO_DIRECTORY, read_config(DEMO_DIRECTORY),
                                       512))  # fmt: skip


def test_held_out_modules_are_in_no_document(entries: list[Entry], documents: list[str]) -> None:
    held_out = {entry.name for entry in entries if entry.module in HELD_OUT_MODULES}
    read = [json.loads(line) for line in documents]
    lines = {line for each in read for line in each.get("text", "").splitlines()}
    asked = {
        word.strip("?.")
        for each in read
        for word in (each["messages"][0]["content"].split() if "messages" in each else [])
    }
    assert {"tarfile.open", "fractions.Fraction"} & held_out
    assert not {name for name in held_out if "." in name} & (lines | asked)
