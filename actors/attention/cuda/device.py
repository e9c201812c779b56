"""The interface of a device: memory, copies, graphs, events, matmul of prompts.

`cuda_kernels.cupy_device` implements it for a GPU. Work is queued on one stream and done in order;
host arrays that take part must not change until an event after it has been waited for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from hotcold.cuda_kernels.kernels import CudaKernels
from hotcold.numba_kernels.decode.activations import Activation


class Device(Protocol):
    """One GPU, used by one thread of the service."""

    name: str
    kernels: CudaKernels
    xp: Any  # NumPy's functions for arrays on the device

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array on the device. Errors: DeviceMemoryError."""

    def upload(self, target: Any, source: np.ndarray) -> None:
        """Copy from the host's memory; returns when it is done. Same shape and dtype.

        `target` may be the first columns of a matrix.
        """

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A new array of the host that copies may read and write on their own."""

    def register(self, address: int, num_bytes: int) -> str:
        """Register existing host memory for copies; "" or the reason why that is refused."""

    def mapped(self, array: np.ndarray) -> Any:
        """An array of registered memory as kernels see it: they read and write the host's."""

    def unregister(self, address: int) -> None:
        """Undo `register`."""

    def copy_in(self, target: Any, source: np.ndarray) -> None:
        """Put a copy from pinned or registered memory on the stream; both contiguous."""

    def copy_out(self, target: np.ndarray, source: Any) -> None:
        """Put a copy to pinned or registered memory on the stream.

        Shapes:  both (n,) contiguous, or (m, n) with contiguous rows
        """

    def stream(self) -> AbstractContextManager[Any]:
        """A context whose kernels and functions of `xp` go on the stream."""

    def capture(self, work: Callable[[], None]) -> Any:
        """A graph of the kernels that `work` launches, without running; each has run before."""

    def launch(self, graph: Any) -> None:
        """Put a graph on the stream."""

    def record(self, *, spin: bool) -> Any:
        """An event after all work on the stream; `spin` for short waits: it occupies a core."""

    def wait(self, event: Any) -> None:
        """Wait for an event, without the GIL."""

    def record_copies(self) -> Any:
        """As `record`, for copies of `copy_ahead`."""

    def copy_ahead(self, target: Any, source: np.ndarray) -> None:
        """As `copy_in`, on a second stream, concurrently with kernels of the first."""

    def follow_copies(self) -> None:
        """Later work on the stream waits for all copies of `copy_ahead` so far."""

    def hold_copies(self, event: Any) -> None:
        """Later copies of `copy_ahead` wait for an event of `record`."""

    def multiply(self, a: Any, b: Any, out: Any, *, b_has_rows: bool, add: bool) -> None:
        """out = a . b^T, or a . b without `b_has_rows`; added to `out` with `add`.

        Shapes:  a (T, k), b (n, k) or (k, n), out (T, n), whose rows may be parts of longer ones;
                 or several of each: (S, T, k), ...
        Dtypes:  a and b alike: float32, uint16 (float16 bits) or int16 (bfloat16 bits); out float32
        """

    def narrow(self, x: Any, dtype: Any) -> Any:
        """float32 x rounded to a new array of `dtype`; infinite where beyond float16."""

    def activate(self, function: Activation, gates: Any, factors: Any | None) -> None:
        """gates = fn(gates) [* factors, which drelu and clamped_silu change]; a NaN stays NaN."""

    def mark(self) -> Any:
        """An event of the stream with a timestamp."""

    def elapsed_ms(self, first: Any, last: Any) -> float:
        """Milliseconds between two past events of `mark`."""

    def used_bytes(self) -> int:
        """Device memory of the CUDA context and of arrays; not of graphs, code and libraries."""

    def free_bytes(self) -> int:
        """Device memory that is free now."""

    def limit(self, num_bytes: int) -> None:
        """Limit the total memory of `empty` and functions of `xp`."""

    def release(self) -> None:
        """Return the memory of freed arrays to the device."""

    def explain(self, error: BaseException) -> str:
        """One line for a fatal error of the device; "" for other errors."""


# A graph of ten kernels needs some tens of KiB of device memory.
MAX_GRAPHS = 1024
GRAPH_BYTES = 64 << 10


class GraphCache:
    """Runs work as a CUDA graph from the second time on; keeps the most recently used graphs.

    The first time kernels are launched one by one: they may have to be compiled, which is not
    possible during graph capture.
    """

    def __init__(self, device: Device, most_graphs: int = MAX_GRAPHS) -> None:
        """Keep at most `most_graphs` of about ten kernels each."""
        self._device = device
        self._left = most_graphs
        self._graphs: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()  # None: run once

    def clear(self) -> None:
        """Forget all graphs: addresses within them are no longer those of anything."""
        while self._graphs:
            self._left += self._graphs.popitem()[1][1]

    def run(self, key: Hashable, work: Callable[[], None], size: int = 1) -> None:
        """Put `work` on the stream, some ten kernels times `size`; equal keys must mean equal
        launches.

        Graphs that were unused longest go first; the last one stays however large it is.
        """

        def alone() -> None:
            self._device.kernels.begin()
            work()

        if key not in self._graphs:
            with self._device.stream():
                alone()
            self._keep(key, None, 1)
            return
        graph = self._graphs[key][0]
        if graph is None:
            graph = self._device.capture(alone)
            self._keep(key, graph, size)
        self._graphs.move_to_end(key)
        self._device.launch(graph)

    def _keep(self, key: Hashable, graph: Any, size: int) -> None:
        self._left += self._graphs.pop(key, (None, 0))[1] - size
        self._graphs[key] = graph, size
        while self._left < 0 and len(self._graphs) > 1:
            self._left += self._graphs.popitem(last=False)[1][1]


class DeviceTimes:
    """Times the parts of requests on the GPU by events, while `measures` is set."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.measures = False
        self._marks: list[tuple[str, Any]] = []
        self._ms: dict[str, float] = {}

    def mark(self, part: str) -> None:
        """Work on the stream since the last mark is `part`; "" does not count."""
        if self.measures:
            self._marks.append((part, self._device.mark()))

    def collect(self) -> None:
        """Add up the marked parts; their events must be past."""
        for (_, start), (part, end) in zip(self._marks, self._marks[1:], strict=False):
            if part:
                ms = self._device.elapsed_ms(start, end)
                self._ms[part] = self._ms.get(part, 0.0) + ms
        self._marks.clear()

    def take(self) -> dict[str, float]:
        """Milliseconds of each part since the last call."""
        found, self._ms = self._ms, {}
        return found
