"""A GPU's memory and link bandwidth, and the time of work on it without launch overhead."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MAX_BYTES = 1 << 30  # far beyond every second-level cache
_REPEAT, _REPLAYS = 9, 20


@dataclass(frozen=True)
class GpuBandwidth:
    """In 1e9 bytes a second."""

    read_gb_per_s: float
    link_gb_per_s: float  # host to device


def measure_gpu_bandwidth(device_id: int) -> GpuBandwidth:
    """Time copies within a GPU's memory and from pinned host memory to it; medians of passes.

    read = bytes read and written by a copy within the device / its time
    link = bytes copied from the host / its time
    Units:   allocates up to 2 GiB of the GPU, at most a quarter of what is free, and half of that
             pinned on the host
    Errors:  RuntimeError where CuPy is missing, or the GPU cannot be used
    """
    try:
        import cupy
    except Exception as problem:  # a CuPy for another CUDA fails in many ways
        raise RuntimeError(f"CuPy cannot be imported: {type(problem).__name__}") from problem
    try:
        return _measure(cupy, device_id)
    except Exception as problem:  # CuPy's and CUDA's errors have no common base
        reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
        raise RuntimeError(f"GPU {device_id} cannot be measured: {reason}") from problem


def _measure(cupy: Any, device_id: int) -> GpuBandwidth:
    runtime = cupy.cuda.runtime
    with cupy.cuda.Device(device_id):
        free_bytes, _ = runtime.memGetInfo()
        num_bytes = max(1, min(_MAX_BYTES, free_bytes // 8))
        # Not from CuPy's pool, which would keep it.
        source, target = cupy.cuda.Memory(num_bytes), cupy.cuda.Memory(num_bytes)
        host = cupy.cuda.PinnedMemory(num_bytes)
        stream = cupy.cuda.Stream(non_blocking=True)

        def copy(start: Any, kind: int) -> Callable[[], None]:
            return lambda: runtime.memcpyAsync(target.ptr, start.ptr, num_bytes, kind, stream.ptr)

        inside = _median_s(cupy, stream, copy(source, runtime.memcpyDeviceToDevice))
        link = _median_s(cupy, stream, copy(host, runtime.memcpyHostToDevice))
    return GpuBandwidth(2 * num_bytes / inside / 1e9, num_bytes / link / 1e9)


def graph_seconds(work: Callable[[], None]) -> float:
    """The median time in seconds of `work`, replayed as a CUDA graph.

    `work` only launches kernels. It runs once before it is captured, so that all are compiled.
    """
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        work()
        stream.synchronize()
        stream.begin_capture()
        work()
        graph = stream.end_capture()
    return _median_s(cupy, stream, lambda: graph.launch(stream), _REPLAYS)


def _median_s(cupy: Any, stream: Any, work: Callable[[], None], repeat: int = _REPEAT) -> float:
    seconds = []
    for _ in range(repeat + 1):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        seconds.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
    return statistics.median(seconds[1:])  # the first run wakes the device up
