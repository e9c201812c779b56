"""The progress of a profiling run on disk, from which a stopped run continues.

Two files beside the output: `<out>.part` has the counts and their number of tokens, replaced as a
whole; `<out>.part.inputs` has the recorded inputs, appended, of which only those of these tokens
count.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hotcold.jobs.profile.answers import NO_ANSWERS, Answers
from hotcold.model.config import neurons
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError
from hotcold.model.files.artifact import ModelIdentity, read_artifact, write_artifact

_KIND = "profile"


@dataclass(frozen=True)
class ProfileTask:
    """What is read and recorded. A state belongs to one task."""

    text_digest: str
    num_tokens: int  # of the text
    window_ids: int  # ids of a window, without its bos
    num_inputs: int  # tokens whose FFN inputs are recorded
    answers: Answers = NO_ANSWERS  # of a mixture, after the text

    @property
    def num_counted(self) -> int:
        """Tokens of the text, and of answers and their prompts."""
        return self.num_tokens + self.answers.count * self.answers.window_ids

    def recorded_before(self, token: int) -> int:
        """How many of the first `token` tokens are recorded: they are spread evenly."""
        return min(token, self.num_tokens) * self.num_inputs // self.num_tokens

    def recorded(self, first: int, last: int) -> list[int]:
        """Those of the tokens first..last-1 that are recorded, counted from `first`."""
        bounds = [self.recorded_before(token) for token in range(first, last + 1)]
        return [i for i in range(last - first) if bounds[i + 1] > bounds[i]]


class Counts(NamedTuple):
    """As in `ActivationProfile`, of a model with experts or without."""

    counts: np.ndarray
    chosen: np.ndarray
    distances: np.ndarray

    def plus(self, more: Counts) -> Counts:
        """Those of both."""
        return Counts(*(own + other for own, other in zip(self, more, strict=True)))


class ProfileState:
    """What was counted, and recorded inputs, of the first `num_done` tokens."""

    def __init__(
        self, out: Path, identity: ModelIdentity, config: ModelConfig, task: ProfileTask
    ) -> None:
        """The state of the run that will write `out`; starts with nothing done."""
        self.task = task
        self.found = Counts(
            np.zeros(neurons.shape(config), np.int64),
            np.zeros((config.num_layers, neurons.most_blocks(config)), np.int64),
            np.zeros(config.num_experts, np.int64),
        )
        self.num_done = 0
        self.identity = identity
        self._row_shape = (config.num_layers, config.hidden_size)
        self._path = out.with_name(f"{out.name}.part")
        self._inputs_path = out.with_name(f"{out.name}.part.inputs")

    def resume(self) -> None:
        """Take over what an earlier run of the same task has saved, if there is any."""
        try:
            artifact = read_artifact(self._path, _KIND, self.identity)
            shapes = {name: array.shape for name, array in self.found._asdict().items()}
            found = Counts(*(artifact.tensor(name, np.int64, shapes[name]) for name in shapes))
            num_done = artifact.fact("num_done", int)
        except ArtifactError:
            return
        num_bytes = self._inputs_path.stat().st_size if self._inputs_path.is_file() else 0
        wanted = self.task.recorded_before(num_done) * self._row_bytes
        if artifact.facts.get("task") == asdict(self.task) and num_bytes >= wanted:
            self.found, self.num_done = found, num_done

    def start(self) -> None:
        """Create the files. Errors: ArtifactError."""
        if self.num_done == 0:
            with suppress(OSError):
                self.remove()
            self.save(self.found, 0)
        if self.task.num_inputs:
            try:
                self._inputs_path.touch()
            except OSError as problem:
                raise self._unwritable(problem) from None

    def add_inputs(self, first: int, inputs: np.ndarray) -> None:
        """Keep the inputs (L, R, d) of the window that starts at token `first`.

        They count once `save` says that this window is done.
        Errors:  ArtifactError
        """
        if inputs.shape[1] == 0:
            return
        try:
            with self._inputs_path.open("r+b") as file:
                file.seek(self.task.recorded_before(first) * self._row_bytes)
                file.write(np.ascontiguousarray(inputs.transpose(1, 0, 2)).data)
                file.flush()
                os.fsync(file.fileno())  # before `save` says that they are there
        except OSError as problem:
            raise self._unwritable(problem) from None

    def save(self, found: Counts, num_done: int) -> None:
        """The first `num_done` tokens are done. Errors: ArtifactError."""
        self.found, self.num_done = found, num_done
        facts = {"task": asdict(self.task), "num_done": num_done}
        write_artifact(self._path, _KIND, self.identity, found._asdict(), facts)

    def _unwritable(self, problem: OSError) -> ArtifactError:
        return ArtifactError(
            f"{self._inputs_path}: cannot be written ({problem.strerror}); give another place with "
            "--out"
        )

    def inputs(self) -> np.ndarray:
        """All recorded inputs (L, R, d), read from disk as they are used."""
        shape = (self.task.num_inputs, *self._row_shape)
        return np.memmap(self._inputs_path, np.uint16, "r", shape=shape).transpose(1, 0, 2)

    def remove(self) -> None:
        """Remove the files, and what a run that was killed while it saved has left of them."""
        for path in self._path.parent.glob(f"{self._path.name}.*.part"):
            path.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)
        self._inputs_path.unlink(missing_ok=True)

    @property
    def _row_bytes(self) -> int:
        return self._row_shape[0] * self._row_shape[1] * 2
