"""Launches: kernels are compiled on first use and put on CuPy's current stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from hotcold.cuda_kernels.compiled import compiled_code
from hotcold.cuda_kernels.source import Entry

Grid = tuple[int, int, int]
Argument = np.generic | np.ndarray
NULL = np.uint64(0)


def record(**members: np.generic) -> np.ndarray:
    """A struct of a kernel's source by value, with these members in this order: (1,)."""
    kind = _struct(tuple((name, value.dtype) for name, value in members.items()))
    return np.array([tuple(members.values())], kind)


@functools.cache
def _struct(members: tuple[tuple[str, np.dtype], ...]) -> np.dtype:
    return np.dtype(list(members), align=True)


class Launcher(Protocol):
    """Runs kernels over arrays of its own kind."""

    def empty_bytes(self, count: int) -> Any:
        """A new array of `count` uint8, aligned to 16 bytes."""

    def pointer(self, array: Any) -> np.uint64:
        """The address of an array, for the next launch."""

    def launch(
        self, entry: Entry, grid: Grid, num_threads: int, arguments: Sequence[Argument]
    ) -> None:
        """Run a kernel; arguments are uint64 (addresses), int32, int64, float32, and structures:
        arrays () or (1,) of a structured dtype, passed by value.
        """


class CupyLauncher:
    """Launches on the current device, over CuPy's arrays."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._kernels: dict[Entry, Any] = {}

    def empty_bytes(self, count: int) -> Any:
        return self._cupy.empty(count, np.uint8)

    def pointer(self, array: Any) -> np.uint64:
        return np.uint64(array.data.ptr)

    def launch(
        self, entry: Entry, grid: Grid, num_threads: int, arguments: Sequence[Argument]
    ) -> None:
        """`Launcher.launch`; the first launch of a kernel compiles and loads it."""
        kernel = self._kernels.get(entry)
        if kernel is None:
            kernel = self._kernels[entry] = self._compiled(entry)
        kernel(grid, (num_threads, 1, 1), tuple(arguments))

    def _compiled(self, entry: Entry) -> Any:
        module = self._cupy.cuda.Module()
        module.load(compiled_code(entry))
        return module.get_function(entry.name)


def cupy_copies() -> tuple[Callable[[np.ndarray], Any], Callable[[Any], np.ndarray]]:
    """Functions that copy an array from the host to the current device, and back."""
    import cupy

    return cupy.asarray, cupy.asnumpy
