"""The demo model's corpus: held-out modules stay out of what is trained on."""

import shutil
import sysconfig
from pathlib import Path

import pytest

from examples.train_demo.corpus import (
    HELD_OUT_MODULES,
    held_out_text,
    questions,
    running_text,
    stdlib_entries,
)


def test_held_out_modules_are_absent_from_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a library of a few modules."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("tarfile.py", "filecmp.py", "textwrap.py", "shutil.py"):
        shutil.copy(library / name, tmp_path)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    entries = stdlib_entries()
    asked = {question.name.split(".")[0] for question in questions(entries)}
    assert {"textwrap", "shutil"} <= asked and not asked & HELD_OUT_MODULES
    held_out = "Read from and write to tar format archives."
    assert held_out in held_out_text(entries)
    assert not any(held_out in document for document in running_text(entries))
