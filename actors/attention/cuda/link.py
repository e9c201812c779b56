"""Copies between the arena and a GPU, without a stop between: straight from and to the arena where
it can be registered, else through pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hotcold.actors.attention.cuda.device import Device


class Link:
    """The arena as one service's copies see it.

    What is brought must stay as it is, and what is taken is not there, until the caller has waited
    for the device, and called what `download` returned.
    """

    def __init__(self, device: Device, arena: np.ndarray) -> None:
        """Register `arena`; `refusal` says in one line why it could not be."""
        self._device = device
        self._address = arena.ctypes.data
        self.refusal = device.register(self._address, arena.nbytes)
        self._staging: dict[str, np.ndarray] = {}

    def close(self) -> None:
        """Let go of the arena."""
        if not self.refusal:
            self._device.unregister(self._address)
        self._staging.clear()

    def upload(self, name: str, target: Any, source: np.ndarray, num_rows: int) -> None:
        """Put a copy of `source` (T, n) on the stream, to `num_rows` >= T rows of `target`.

        Rows beyond T become copies of the last one. `name` tells copies apart that may be under way
        at the same time.
        """
        num_tokens = source.shape[0]
        if self.refusal or num_rows > num_tokens:
            staged = self._staged(name, num_rows, source.shape[1], source.dtype)
            staged[:num_tokens] = source
            staged[num_tokens:] = source[-1]
            source = staged
        self._device.copy_in(target[:num_rows], source)

    def readable(self, name: str, source: np.ndarray) -> np.ndarray:
        """Bytes (n,) of the arena, where copies may read them; `name` as in `upload`."""
        if not self.refusal:
            return source
        staged = self._staged(name, 1, source.size, source.dtype)[0]
        staged[:] = source
        return staged

    def download(self, name: str, targets: Sequence[np.ndarray], source: Any) -> Callable[[], None]:
        """Put a copy of `source`, one row (n,) or two (2, n), on the stream, to as many arrays (n,)
        of the arena. Call what is returned once the device has been waited for.
        """
        if not self.refusal:
            self._device.copy_out(targets[0] if len(targets) == 1 else rows_of(*targets), source)
            return _do_nothing
        staged = self._staged(name, len(targets), targets[0].size, targets[0].dtype)
        self._device.copy_out(staged[0] if len(targets) == 1 else staged, source)

        def land() -> None:
            for target, row in zip(targets, staged, strict=True):
                target[:] = row

        return land

    def _staged(self, name: str, num_rows: int, size: int, dtype: Any) -> np.ndarray:
        """Pinned memory of that name, at least so large."""
        found = self._staging.get(name)
        if found is None or found.size < num_rows * size:
            found = self._staging[name] = self._device.pinned((num_rows * size,), dtype)
        return found[: num_rows * size].reshape(num_rows, size)


def _do_nothing() -> None:
    """It has landed where it belongs."""


def rows_of(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Two arrays (n,) of one memory, the second behind the first, as the rows of one: (2, n)."""
    apart = second.ctypes.data - first.ctypes.data
    return np.lib.stride_tricks.as_strided(first, (2, first.size), (apart, first.itemsize))
