"""The devices that the suite runs over: CUDA's kernels on this CPU, and on a GPU."""

from __future__ import annotations

import fcntl
import functools
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from hotcold.cuda_kernels.device import list_gpus
from hotcold.cuda_kernels.kernels import CudaKernels
from hotcold.cuda_kernels.launch import cupy_copies
from tests.kernels.device_calls import DeviceCalls
from tests.kernels.emulation.build import all_entries, build_key, build_library
from tests.kernels.emulation.launcher import EmulatedLauncher, aligned


def emulated_library() -> Path:
    """All kernels, compiled for this CPU by the first process that asks, of whichever run.

    Errors:  FileNotFoundError without a compiler
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = base / "hotcold-tests" / "emulated-kernels"
    folder.mkdir(parents=True, exist_ok=True)
    entries = all_entries()
    library = folder / f"{build_key(entries)}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as own:
                build_library(Path(own), entries).rename(library)
    return library


def emulated_calls(library: Path, is_reversed: bool = False) -> DeviceCalls:
    """CUDA's kernels on the CPU."""
    kernels = CudaKernels(EmulatedLauncher(library, is_reversed))
    return DeviceCalls(kernels, aligned, np.array)


@functools.cache
def cuda_calls() -> DeviceCalls:
    """CUDA's kernels on the first GPU."""
    return DeviceCalls(CudaKernels(), *cupy_copies())


def calls(name: str, request: pytest.FixtureRequest) -> DeviceCalls:
    """Those of one of DEVICES."""
    if name == "cuda":
        return cuda_calls()
    return emulated_calls(request.getfixturevalue("emulated_library"))


DEVICES = ["emulated", *(["cuda"] if list_gpus()[0] else [])]
