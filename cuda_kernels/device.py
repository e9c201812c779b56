"""Which GPUs this process can use."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Marks errors after which the service's process has to be replaced: it cannot use the GPU again.
GPU_FAILED = "the GPU failed"
_MIN_CAPABILITY = 7, 5
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


class DeviceMemoryError(MemoryError):
    """A GPU is out of memory, or the process has reached its limit."""


class DeviceFailure(RuntimeError):
    """A GPU reported an error that every later call of the process would get too."""


@dataclass(frozen=True)
class Gpu:
    """One GPU: CUDA's device number, name, memory in bytes, compute capability as (9, 0)."""

    device_id: int
    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int]


def list_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs, and where there are none one line that says why. Raises nothing."""
    has_driver = _DRIVER_FILE.exists()
    try:
        from cupy.cuda import runtime
    except Exception as problem:  # a CuPy for another CUDA fails in many ways
        if not has_driver:
            return (), "no NVIDIA driver on this machine"
        if isinstance(problem, ModuleNotFoundError):
            return (), "an NVIDIA driver is here but CuPy is not: pip install 'hotcold[cuda]'"
        return (), f"CuPy cannot be imported: {_first_line(problem)}"
    try:
        gpus = tuple(_describe(runtime, i) for i in range(runtime.getDeviceCount()))
    except Exception as problem:
        return (), f"CUDA finds no usable GPU: {_first_line(problem)}"
    return gpus, "" if gpus else "CUDA finds no GPU"


def first_gpu() -> tuple[str, int] | str:
    """The name and bytes of the first GPU, or one line that says why there is none.

    Allocates no memory on the GPU, which querying its free memory would. Raises nothing.
    """
    try:
        from cupy.cuda import runtime

        if runtime.getDeviceCount() > 0:
            properties = runtime.getDeviceProperties(0)
            major, minor = properties["major"], properties["minor"]
            if (major, minor) < _MIN_CAPABILITY:
                return f"{properties['name'].decode()} has compute capability {major}.{minor}, " + (
                    "and kernels need 7.5"
                )
            return properties["name"].decode(), int(properties["totalGlobalMem"])
    except Exception:  # of many kinds, which `list_gpus` explains
        pass
    return list_gpus()[1] or "CUDA finds no usable GPU"


def _describe(runtime: Any, device_id: int) -> Gpu:
    from cupy.cuda import Device

    properties = runtime.getDeviceProperties(device_id)
    with Device(device_id):
        free_bytes, total_bytes = runtime.memGetInfo()
    return Gpu(
        device_id=device_id,
        name=properties["name"].decode(),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        compute_capability=(properties["major"], properties["minor"]),
    )


def _first_line(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return lines[0] if lines else type(problem).__name__


def _main() -> int:
    """Print the GPUs as JSON; status 1 and the reason on standard error where there is none."""
    found, reason = list_gpus()
    print(json.dumps([asdict(gpu) for gpu in found]))
    if not found:
        print(reason, file=sys.stderr)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(_main())
