"""What a host needs once before services load there: the bundle file, and compiled kernels.

Short-lived processes make both, so that their memory is free again before services take theirs.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from hotcold.actors.processes.child_process import begin_process, end_with_parent
from hotcold.actors.processes.precompile import precompile_once
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.setup.shards import served_config
from hotcold.actors.setup.storage import has_bundles, pack_model
from hotcold.model.config.build import read_config
from hotcold.model.errors import ArtifactError, HotcoldError

_NOT_MADE = "the file of neurons was not made"


class HostSetup:
    """Setup of this process's host, and its progress.

    written_bytes, file_bytes: of the bundle file; 0 while none is written
    """

    def __init__(self) -> None:
        self.written_bytes = self.file_bytes = 0
        self.is_compiling = False

    def run(self, system: SystemConfig, is_home: bool) -> str:
        """Make what is missing; returns a note where this host lacks the predictors, else "".

        `is_home`: this is the driver's host.
        Errors:  ArtifactError where the file is another model's, or cannot be written
        """
        if system.storage is None:
            return ""
        path = Path(system.model_path)
        config = served_config(system, read_config(path))
        if not has_bundles(path, config):
            self._make_bundles(system)
            has_bundles(path, config)
        self.is_compiling = True
        precompile_once(_part_of(system, is_home))
        self.is_compiling = False
        ahead = system.storage.predictors
        if not ahead or Path(ahead).exists():
            return ""
        return f"{socket.gethostname()} has no {ahead}: nothing is read ahead there; copy it"

    def _make_bundles(self, system: SystemConfig) -> None:
        """Errors: ArtifactError."""
        reason = "the process that makes it was ended"
        told = system.as_json().decode()
        try:
            process = begin_process(
                __name__, told, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            )
        except OSError as problem:
            reason = f"no process can be started here ({problem.strerror})"
            raise ArtifactError(f"{_NOT_MADE}: {reason}") from None
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                facts = json.loads(line)
                if "error" in facts:
                    reason = facts["error"]
                else:
                    self.written_bytes, self.file_bytes = facts["written"], facts["of"]
        self.written_bytes = self.file_bytes = 0
        if process.returncode:
            raise ArtifactError(f"{_NOT_MADE}: {reason}")


def _part_of(system: SystemConfig, is_home: bool) -> SystemConfig:
    """One host's part of `system`. Only the driver's host reads predictors and thresholds."""
    part = replace(system, hosts=(), num_cpu_actors=system.num_cpu_actors // system.num_hosts)
    if is_home or part.storage is None:
        return part
    storage = replace(part.storage, predictors="", predictor_words=0)
    return replace(part, mode="exact", predictors_path="", thresholds_path="", storage=storage)


def _main(system: SystemConfig) -> None:
    """Write the bundle file; print progress and errors as lines of JSON."""
    end_with_parent()

    def report(**facts: object) -> None:
        print(json.dumps(facts), flush=True)

    try:
        path = Path(system.model_path)
        pack_model(
            path,
            served_config(system, read_config(path)),
            system.weight_dtype,
            lambda written, total: report(written=written, of=total),
            accept_existing=True,
        )
    except HotcoldError as error:
        report(error=str(error))
        sys.exit(1)


if __name__ == "__main__":
    _main(SystemConfig.from_json(sys.argv[1].encode()))
