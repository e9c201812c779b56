"""The file of a job's answers: one JSON object a line, whole at any time the job is stopped."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from hotcold.model.errors import UsageError
from hotcold.model.files.atomic_write import sync_folder


class AnswerFile:
    """A file that lines are added to, each on disk as soon as it is complete."""

    def __init__(self, path: Path, *, resume: bool, name: str = "id") -> None:
        """Open `path`; nothing of it is lost until `begin`.

        `resume` keeps its answers and notes their ids, of that `name`; a last line that was cut off
        is dropped.
        Errors:  OSError; UsageError where `path` holds something else than answers, or another
                 job writes to it
        """
        self.path = path.absolute()
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another job writes to {self.path}; wait for its end, or name another file"
            ) from None
        self._keep_bytes = 0
        self.held: set[Any] = set()  # ids
        self._name = name
        if resume:
            self._read()

    def _read(self) -> None:
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                self.held.add(self._key(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise UsageError(
                    f"{self.path}, line {number}, is no answer of this job; name another file"
                ) from None
            self._keep_bytes += len(line)

    def holds(self, answer: dict[str, Any]) -> bool:
        """Whether an answer with that id, or that error of a line without an id, was kept."""
        return self._key(answer) in self.held

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

    def _key(self, answer: dict[str, Any]) -> Any:
        found = answer[self._name]
        return found if found is not None else ("", answer.get("error"))
