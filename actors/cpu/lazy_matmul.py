"""Matrix products that a service has only once a long prompt needs them, or somebody prepares them.

They take torch, which takes a second to import, and kernels of their own; steps of few tokens need
neither.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hotcold.actors.protocol.step_sizes import MatmulChoice

if TYPE_CHECKING:
    from hotcold.actors.cpu.matmul import Matmul


class LazyMatmul:
    """Makes a service's `Matmul` at the first call of `get`, in any thread."""

    def __init__(
        self,
        num_threads: int,
        dtypes: Iterable[np.dtype],
        thread_cores: Sequence[Sequence[int]] = (),
        choice: MatmulChoice | None = None,
    ) -> None:
        """As of `Matmul`."""
        self._num_threads, self._thread_cores = num_threads, thread_cores
        self._dtypes = tuple(dict.fromkeys(dtypes))
        self._choice = choice
        self._made: Matmul | None = None
        self._is_closed = False
        self._making = threading.Lock()

    def get(self) -> Matmul:
        """The products; waits where another thread makes them. Errors: of importing torch."""
        with self._making:
            if self._made is None:
                from hotcold.actors.cpu.matmul import Matmul

                self._made = Matmul(
                    self._num_threads, self._dtypes, self._thread_cores, self._choice
                )
            made = self._made
        if self._is_closed:
            made.close()
        return made

    def choose(self, choice: MatmulChoice) -> None:
        """Multiply as `choice` says from now on; returns once all is made for it."""
        with self._making:
            self._choice = choice
        self.get().choose(choice)

    def close(self) -> None:
        """End the threads; those that are being made end once they are."""
        self._is_closed = True
        if self._making.acquire(blocking=False):
            try:
                if self._made is not None:
                    self._made.close()
            finally:
                self._making.release()
