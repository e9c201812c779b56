"""The demo model's corpus: known docstrings give known questions; held-out modules stay out.

The text to profile it on is fair.
"""

from collections.abc import Iterator

import pytest

from examples.train_demo.corpus import (
    HELD_OUT_MODULES,
    Entry,
    held_out_text,
    questions,
    running_text,
    stdlib_entries,
)


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
