"""What the GPU service asks of a device: memory, copies, graphs, events, products of prompts.

`cuda_kernels.cupy_device` is it on a GPU. Work is put on one stream and done later, in order;
arrays of the host that take part must stay as they are until an event after it has been waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from hotcold.cuda_kernels.kernels import CudaKernels
from hotcold.numba_kernels.decode.activations import Activation


class Device(Protocol):
    """One GPU, as one thread of the service uses it."""

    name: str
    kernels: CudaKernels
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
