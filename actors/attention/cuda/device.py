"""What the GPU service asks of a device: memory, copies, graphs, events, products of prompts.

`cuda_kernels.cupy_device` is it on a GPU. Work is put on one stream and done later, in order;
arrays of the host that take part must stay as they are until an event after it has been waited for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from hotcold.cuda_kernels.protocol import DeviceKernels
from hotcold.numba_kernels.decode.activations import Activation


class Device(Protocol):
    """One GPU, as one thread of the service uses it."""

    name: str
    kernels: DeviceKernels
    xp: Any  # NumPy's functions for arrays on the device

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array on the device. Errors: DeviceMemoryError."""

    def upload(self, target: Any, source: np.ndarray) -> None:
        """Copy from the host's memory; returns when it is done. Same shape and dtype."""

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A new array of the host that copies may read and write on their own."""

    def register(self, address: int, num_bytes: int) -> str:
        """Let copies use memory of the host that exists; "" or, where refused, the reason."""

    def unregister(self, address: int) -> None:
        """End what `register` began."""

    def copy_in(self, target: Any, source: np.ndarray) -> None:
        """Put a copy from pinned or registered memory on the stream; both contiguous."""

    def copy_out(self, target: np.ndarray, source: Any) -> None:
        """Put a copy to pinned or registered memory on the stream.

        Shapes:  both (n,) contiguous, or (2, n) with contiguous rows
        """

    def stream(self) -> AbstractContextManager[Any]:
        """Kernels and functions of `xp` within it are put on the stream."""

    def capture(self, work: Callable[[], None]) -> Any:
        """A graph of the kernels that `work` launches, which do not run; each has run before."""

    def launch(self, graph: Any) -> None:
        """Put a graph on the stream."""

    def record(self, *, spin: bool) -> Any:
        """An event after all that is on the stream; `spin` is for short waits: it holds a core."""

    def wait(self, event: Any) -> None:
        """Return when the event has come; other threads of the process run meanwhile."""

    def record_copies(self) -> Any:
        """As `record`, for copies of `copy_ahead`."""

    def copy_ahead(self, target: Any, source: np.ndarray) -> None:
        """As `copy_in`, on a second stream: at the same time as kernels of the first."""

    def follow_copies(self) -> None:
        """What is put on the stream from now on comes after all copies of `copy_ahead` so far."""

    def hold_copies(self, event: Any) -> None:
        """Copies of `copy_ahead` from now on come after an event of `record`."""

    def multiply(self, a: Any, b: Any, out: Any, *, b_has_rows: bool, add: bool) -> None:
        """out = a . b^T, or a . b without `b_has_rows`; added to `out` with `add`.

        Shapes:  a (T, k), b (n, k) or (k, n), out (T, n), whose rows may be parts of longer ones
        Dtypes:  a and b alike: float32, uint16 (float16 bits) or int16 (bfloat16 bits); out float32
        """

    def narrow(self, x: Any, dtype: Any) -> Any:
        """float32 x as a new array of `dtype`, the nearest; float16's largest where beyond it."""

    def activate(self, function: Activation, gates: Any, factors: Any | None) -> None:
        """gates = fn(gates) [* factors, or relu of them with drelu]; a NaN stays NaN."""

    def mark(self) -> Any:
        """An event of the stream whose time is kept."""

    def elapsed_ms(self, first: Any, last: Any) -> float:
        """Milliseconds between two events of `mark` that have come."""

    def used_bytes(self) -> int:
        """What this process has taken of the device's memory, the driver's own part included."""

    def free_bytes(self) -> int:
        """What is free of it now."""

    def limit(self, num_bytes: int) -> None:
        """Let `empty` and functions of `xp` take no more than so much in all."""

    def release(self) -> None:
        """Give memory of arrays that are no longer held back to the device."""

    def explain(self, error: BaseException) -> str:
        """One line for an error of the device's own, after which it is of no use; "" for others."""


# A graph of ten kernels takes some tens of KiB of the device's memory.
MAX_GRAPHS = 1024
GRAPH_BYTES = 64 << 10


class GraphCache:
    """Runs work by a graph of its own, from the second time on.

    The first time its kernels are launched one by one: they may have to be compiled, which cannot
    be done while a graph is made.
    """

    def __init__(self, device: Device, most_graphs: int = MAX_GRAPHS) -> None:
        """Keep `most_graphs`; the one that was used longest ago makes room for another."""
        self._device = device
        self._most = most_graphs
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()  # None: run once

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Put `work` on the stream; the same key is always the same launches."""
        if key not in self._graphs:
            with self._device.stream():
                work()
            self._keep(key, None)
            return
        if self._graphs[key] is None:
            self._graphs[key] = self._device.capture(work)
        self._graphs.move_to_end(key)
        self._device.launch(self._graphs[key])

    def _keep(self, key: Hashable, graph: Any) -> None:
        self._graphs[key] = graph
        if len(self._graphs) > self._most:
            self._graphs.popitem(last=False)

    def clear(self) -> None:
        """Forget all: the arrays that they work on are given up."""
        self._graphs.clear()


class DeviceTimes:
    """Events between the parts of requests; none are recorded unless `measures` is set."""

    def __init__(self, device: Device) -> None:
        """Measures nothing yet."""
        self._device = device
        self.measures = False
        self._marks: list[tuple[str, Any]] = []
        self._ms: dict[str, float] = {}

    def mark(self, part: str) -> None:
        """What was put on the stream since the last mark is `part`; "" for what does not count."""
        if self.measures:
            self._marks.append((part, self._device.mark()))

    def collect(self) -> None:
        """Add up, where all that was marked has come."""
        for (_, start), (part, end) in zip(self._marks, self._marks[1:], strict=False):
            if part:
                ms = self._device.elapsed_ms(start, end)
                self._ms[part] = self._ms.get(part, 0.0) + ms
        self._marks.clear()

    def take(self) -> dict[str, float]:
        """Milliseconds of each part since the last call."""
        found, self._ms = self._ms, {}
        return found
