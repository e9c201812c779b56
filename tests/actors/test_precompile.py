"""With a memory budget, short-lived processes compile kernels before services take memory."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hotcold.actors.processes import precompile
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.setup.preflight import read_model
from hotcold.actors.setup.storage import pack_model
from tests.tiny_checkpoint import Tiny

ROOT = Path(__file__).parents[2]
_NUM_RESTS = 100  # fewer neurons than the model has
_POLL_S = 0.25
_KEPT = 1.03  # of what was promised


@pytest.mark.thorough
def test_a_start_that_compiles_keeps_the_promise(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("llama-relu").path
    pack_model(model, read_model(model))
    command = [sys.executable, "-m", "tests.actors.promise_script", str(model), str(_NUM_RESTS)]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE) as running:
        most = 0
        while running.poll() is None:
            most = max(most, memory_of(running.pid))
            time.sleep(_POLL_S)
        assert running.stdout is not None
        told = json.load(running.stdout)
    (note,) = tmp_path.glob("hotcold/numba/precompiled-*/*")
    end = note.stat().st_mtime_ns
    kernels = list(tmp_path.glob("hotcold/numba/*/*.nbc"))
    assert len(kernels) > 100
    assert [kernel.name for kernel in kernels if kernel.stat().st_mtime_ns > end] == []
    assert 0 < most <= _KEPT * told["promised_bytes"]


def memory_of(pid: int) -> int:
    """Bytes of a process and all below it; a page that several have counts once."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(OSError):
                lines = Path(f"/proc/{each.pid}/smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) << 10 for line in lines if line[:4] == "Pss:")
    return total


def test_a_full_disk_ends_no_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the marker a later start compiles again; what is under way here goes on."""

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def part(system: SystemConfig) -> Callable[[], object]:
        def rest() -> None:
            time.sleep(0.2)
            (tmp_path / str(os.getpid())).touch()

        return rest

    monkeypatch.setattr(precompile, "write_atomic", full)
    for name in ("_compile_cpu_service", "_compile_attention", "_compile_driver"):
        monkeypatch.setattr(precompile, name, part)
    precompile._compile_parts(SystemConfig("m"), tmp_path / "marker")
    assert len(list(tmp_path.iterdir())) == 3
