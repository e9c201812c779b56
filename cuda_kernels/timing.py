"""How long work takes on a GPU, without what it costs to launch it from Python."""

from __future__ import annotations

import statistics
from collections.abc import Callable


def graph_seconds(work: Callable[[], None], num_replays: int = 20) -> float:
    """The median time of one run of `work`, replayed as a CUDA graph.

    `work` only launches kernels. It runs once before it is captured, so that all are compiled.
    Units:   seconds
    """
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        work()
        stream.synchronize()
        stream.begin_capture()
        work()
        graph = stream.end_capture()
    seconds = []
    for _ in range(num_replays + 1):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        seconds.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
    return statistics.median(seconds[1:])  # the first one wakes the device up
