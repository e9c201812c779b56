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
    Question,
    first_sentence,
    held_out_text,
    parse_entries,
    questions,
    running_text,
    stdlib_entries,
)
from examples.train_demo.text import mixed, write_demo_text
from hotcold.actors.driver.prompts import Prompts
from hotcold.jobs.support.text_file import read_text_ids
from hotcold.model.config.build import read_config
from hotcold.model.errors import UsageError
from hotcold.model.files.locate import DEMO_DIRECTORY

NUM_TOKENS = 12_000


@pytest.fixture(scope="module")
def entries() -> Iterator[list[Entry]]:
    """Read once: it is the whole standard library."""
    found = stdlib_entries()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("examples.train_demo.text.stdlib_entries", lambda: found)
        yield found


def test_known_function_gives_known_question(entries: list[Entry]) -> None:
    wanted = Question(
        "textwrap.dedent", "Remove any common leading whitespace from every line in `text`."
    )
    assert wanted in questions(entries)
    assert wanted.canonical == "What does textwrap.dedent do?"


def test_built_in_functions_are_asked_about(entries: list[Entry]) -> None:
    answers = {question.name: question.answer for question in questions(entries)}
    assert answers["len"] == "Return the number of items in a container."
    assert answers["math.sqrt"] == "Return the square root of x."


def test_there_are_enough_questions_and_each_has_its_own_answer(entries: list[Entry]) -> None:
    asked = questions(entries)
    assert 2000 < len(asked) < 5000
    assert len({question.name for question in asked}) == len(asked)
    assert len({question.answer for question in asked}) == len(asked)


def test_held_out_modules_are_absent_from_training(entries: list[Entry]) -> None:
    assert not {q.name.split(".")[0] for q in questions(entries)} & HELD_OUT_MODULES
    held_out = "Read from and write to tar format archives."
    assert held_out in held_out_text(entries)
    assert not any(held_out in document for document in running_text(entries))


def test_held_out_text_is_small_and_long_enough(entries: list[Entry]) -> None:
    assert 50_000 < len(held_out_text(entries).encode()) <= 200_000


def test_private_names_and_nested_functions_are_left_out() -> None:
    source = '''
"""A module."""
def public():
    """Public one."""
    def inner():
        """Never seen."""
def _private():
    """Private."""
class Thing:
    """A thing."""
    def method(self):
        """A method."""
'''
    names = [entry.name for entry in parse_entries("some.module", source)]
    assert names == [
        "some.module",
        "some.module.public",
        "some.module.Thing",
        "some.module.Thing.method",
    ]


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("Return a\n    wrapped line. And more.", "Return a wrapped line."),
        ("Works for e.g. small files.\n\nDetails.", "Works for e.g. small files."),
        ("f(x) -> y\n\nReturn twice the argument.", "Return twice the argument."),
        ("Short.", None),
        (">>> 1 + 1", None),
        ("Word " * 60, None),
    ],
)
def test_first_sentence(docstring: str, sentence: str | None) -> None:
    assert first_sentence(docstring) == sentence


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


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_every_beginning_is_half_questions(
    documents: list[str], share: float, tmp_path: Path
) -> None:
    first = documents[: int(len(documents) * share)]
    sizes = []
    for key in ("text", "messages"):
        file = tmp_path / f"{key}.jsonl"
        file.write_text("\n".join(line for line in first if key in json.loads(line)))
        sizes.append(_ids(file).ids.size)
    assert 0.4 < sizes[1] / sum(sizes) < 0.6


def test_a_shorter_text_is_the_beginning_of_a_longer_one(
    documents: list[str], tmp_path: Path
) -> None:
    write_demo_text(tmp_path / "text.jsonl", NUM_TOKENS // 4)
    shorter = (tmp_path / "text.jsonl").read_text().splitlines()
    assert 10 < len(shorter) < len(documents)
    assert shorter == documents[: len(shorter)]


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


def test_more_tokens_than_there_are_are_refused() -> None:
    kinds: list[list[Any]] = [[({"text": "a"}, 3)] * 4, [({"text": "b"}, 2)] * 2]
    assert [size for _, size in mixed(kinds, 8)] == [3, 2, 2, 3]
    with pytest.raises(UsageError, match="--tokens is 20"):
        mixed(kinds, 20)
