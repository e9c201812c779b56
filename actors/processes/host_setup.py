"""What a host needs once before services load there: the file of neurons, and compiled kernels.

Both are made by processes that end, so that what they take is free again before memory is taken
that was promised.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from hotcold.actors.processes.rehearsal import begin_process, end_with_parent, rehearse_once
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.setup.storage import has_bundles, pack_model
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError, HotcoldError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.check import stored_config

_NOT_MADE = "the file of neurons was not made"


class HostSetup:
    """Of the host of this process; says how far it is.

    written_bytes, file_bytes: of the file of neurons, 0 while none is made
    """

    def __init__(self) -> None:
        """Nothing is done yet."""
        self.written_bytes = self.file_bytes = 0
        self.is_compiling = False

    def run(self, system: SystemConfig, is_home: bool) -> str:
        """Make what is missing; a line of what is otherwise here than on the driver's host, or "".

        `is_home`: this is the driver's host.
        Errors:  ArtifactError where the file is another model's, or cannot be made
        """
        if system.storage is None:
            return ""
        path = Path(system.model_path)
        config = _stored_config(path, system.weight_dtype)
        if not has_bundles(path, config):
            self._make_bundles(path, system.weight_dtype)
            has_bundles(path, config)
        self.is_compiling = True
        rehearse_once(_part_of(system, is_home))
        self.is_compiling = False
        ahead = system.storage.predictors
        if not ahead or Path(ahead).exists():
            return ""
        return f"{socket.gethostname()} has no {ahead}: nothing is read ahead there; copy it"

    def _make_bundles(self, path: Path, weight_dtype: str) -> None:
        """Errors: ArtifactError."""
        told, arguments = "the process that makes it was ended", (str(path), weight_dtype)
        try:
            process = begin_process(
                __name__, *arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            )
        except OSError as problem:
            told = f"no process can be started here ({problem.strerror})"
            raise ArtifactError(f"{_NOT_MADE}: {told}") from None
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                answer = json.loads(line)
                if "error" in answer:
                    told = answer["error"]
                else:
                    self.written_bytes, self.file_bytes = answer["written"], answer["of"]
        self.written_bytes = self.file_bytes = 0
        if process.returncode:
            raise ArtifactError(f"{_NOT_MADE}: {told}")


def _stored_config(path: Path, weight_dtype: str) -> ModelConfig:
    return stored_config(Checkpoint(path), read_config(path), weight_dtype)


def _part_of(system: SystemConfig, is_home: bool) -> SystemConfig:
    """What a host has of it. Predictors' and thresholds' files are the driver's host's alone."""
    num_hosts = max(1, len(system.hosts))
    part = replace(system, hosts=(), num_cpu_actors=system.num_cpu_actors // num_hosts)
    if is_home or part.storage is None:
        return part
    storage = replace(part.storage, predictors="", predictor_words=0)
    return replace(part, mode="exact", predictors_path="", thresholds_path="", storage=storage)


def _main(path: Path, weight_dtype: str) -> None:
    """Write the file, and lines that say how far that is, or why it cannot be done."""
    end_with_parent()

    def tell(**facts: object) -> None:
        print(json.dumps(facts), flush=True)

    try:
        config = _stored_config(path, weight_dtype)
        pack_model(
            path,
            config,
            weight_dtype,
            lambda written, total: tell(written=written, of=total),
            takes_others=True,
        )
    except HotcoldError as error:
        tell(error=str(error))
        sys.exit(1)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2])
