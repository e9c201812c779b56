"""The matmul of a service, made once a long prompt needs it or somebody prepares for one.

It takes kernels of its own, which may have to be compiled; steps of few tokens do without them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hotcold.actors.cpu.matmul import Matmul


class LazyMatmul:
    """Makes a service's `Matmul` at the first call of `get`, in any thread."""

    def __init__(
        self,
        num_threads: int,
        dtypes: Iterable[np.dtype],
        thread_cores: Sequence[Sequence[int]] = (),
    ) -> None:
        """As of `Matmul`."""
        self._arguments = num_threads, tuple(dict.fromkeys(dtypes)), thread_cores
        self._made: Matmul | None = None
        self._is_closed = False
        self._making = threading.Lock()

    def get(self) -> Matmul:
        """The matmul; waits where another thread makes it."""
        with self._making:
            if self._made is None:
                from hotcold.actors.cpu.matmul import Matmul

                self._made = Matmul(*self._arguments)
            made = self._made
        if self._is_closed:
            made.close()
        return made

    def close(self) -> None:
        """End the threads; those that are being made end once they are."""
        self._is_closed = True
        if self._making.acquire(blocking=False):
            try:
                if self._made is not None:
                    self._made.close()
            finally:
                self._making.release()
