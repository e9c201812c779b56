"""The demo model's corpus: held-out modules stay out of what is trained on."""

from examples.train_demo.corpus import (
    HELD_OUT_MODULES,
    held_out_text,
    questions,
    running_text,
    stdlib_entries,
)


def test_held_out_modules_are_absent_from_training() -> None:
    entries = stdlib_entries()
    assert not {q.name.split(".")[0] for q in questions(entries)} & HELD_OUT_MODULES
    held_out = "Read from and write to tar format archives."
    assert held_out in held_out_text(entries)
    assert not any(held_out in document for document in running_text(entries))
