"""Asynchronous copies between the arena and a GPU: directly if the arena can be registered, else
through pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hotcold.actors.attention.cuda.device import Device


class Link:
    """Copies of one service from and to the arena.

    Sources must not change, and targets are not valid, until the caller has waited for the device
    and called what `download` returned.
    """

    def __init__(self, device: Device, arena: np.ndarray) -> None:
        """Register `arena`; `refusal` says in one line why that was not possible."""
        self._device = device
        self._address = arena.ctypes.data
        self.refusal = device.register(self._address, arena.nbytes)
        self._staging: dict[str, np.ndarray] = {}

    def close(self) -> None:
        """Unregister the arena."""
        if not self.refusal:
            self._device.unregister(self._address)
        self._staging.clear()

    def upload(self, name: str, target: Any, source: np.ndarray, num_rows: int) -> None:
        """Put a copy of `source` (T, n) on the stream, to `num_rows` >= T rows of `target`.

        Rows beyond T become copies of the last one. Concurrent copies need different names.
        """
        num_tokens = source.shape[0]
        if self.refusal or num_rows > num_tokens:
            staged = self._staged(name, num_rows, source.shape[1], source.dtype)
            staged[:num_tokens] = source
            staged[num_tokens:] = source[-1]
            source = staged
        self._device.copy_in(target[:num_rows], source)

    def readable(self, name: str, source: np.ndarray) -> np.ndarray:
        """Bytes (n,) of the arena in memory that copies may read; `name` as in `upload`."""
        if not self.refusal:
            return source
        staged = self._staged(name, 1, source.size, source.dtype)[0]
        staged[:] = source
        return staged

    def download(self, name: str, targets: Sequence[np.ndarray], source: Any) -> Callable[[], None]:
        """Put a copy of `source`, (n,) or (2, n), on the stream, to one or two arrays (n,) of the
        arena. Call the returned function after waiting for the device.
        """
        if not self.refusal:
            self._device.copy_out(targets[0] if len(targets) == 1 else rows_of(*targets), source)
            return lambda: None
        staged = self._staged(name, len(targets), targets[0].size, targets[0].dtype)
        self._device.copy_out(staged[0] if len(targets) == 1 else staged, source)

        def land() -> None:
            for target, row in zip(targets, staged, strict=True):
                target[:] = row

        return land

    def _staged(self, name: str, num_rows: int, size: int, dtype: Any) -> np.ndarray:
        """Pinned memory of this name, (num_rows, size)."""
        found = self._staging.get(name)
        if found is None or found.size < num_rows * size:
            found = self._staging[name] = self._device.pinned((num_rows * size,), dtype)
        return found[: num_rows * size].reshape(num_rows, size)


def rows_of(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Two arrays (n,), the second behind the first in one buffer, as one (2, n)."""
    apart = second.ctypes.data - first.ctypes.data
    return np.lib.stride_tricks.as_strided(first, (2, first.size), (apart, first.itemsize))
