"""The file of a job's answers: one JSON object a line, whole at any time the job is stopped."""

import json
import os
from pathlib import Path
from typing import Any

from hotcold.model.errors import UsageError
from hotcold.model.files.atomic_write import sync_folder


class AnswerFile:
    """A file that lines are added to, each on disk as soon as it is complete."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        """Open `path`; nothing of it is lost until `begin`.

        `resume` keeps its answers and notes their ids; a last line that was cut off is dropped.
        Errors:  OSError; UsageError where `path` holds something else than answers
        """
        self.path = path.absolute()
        self._file = path.open("a+b")
        self._keep_bytes = 0
        self._held: set[Any] = set()
        if resume:
            self._read()

    def _read(self) -> None:
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                self._held.add(_key(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise UsageError(
                    f"{self.path}, line {number}, is no answer of this job; name another file"
                ) from None
            self._keep_bytes += len(line)

    def holds(self, answer: dict[str, Any]) -> bool:
        """Whether an answer with that id, or that error of a line without an id, was kept."""
        return _key(answer) in self._held

    def begin(self) -> None:
        """Drop what is not kept. Errors: OSError."""
        self._file.truncate(self._keep_bytes)
        os.fsync(self._file.fileno())
        sync_folder(self.path.parent)

    def write(self, answer: dict[str, Any]) -> None:
        """Add one line, which a power loss leaves there. Errors: OSError."""
        self._file.write(json.dumps(answer, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _key(answer: dict[str, Any]) -> Any:
    return answer["id"] if answer["id"] is not None else ("", answer.get("error"))
