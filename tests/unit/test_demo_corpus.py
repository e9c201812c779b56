"""The demo model's corpus: known docstrings give known questions; held-out modules stay out."""

import pytest

from jobs.demo.corpus import (
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


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    return stdlib_entries()


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
