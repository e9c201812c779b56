"""Copies tensors out of a checkpoint in parallel, checking shape and finiteness on the way."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import numpy as np

from model.checkpoint import Checkpoint
from model.errors import CheckpointError, shown
from model.memory import aligned_empty
from numba_kernels import loading

OnBytes = Callable[[int], None]
BLOCK_BYTES = 16 << 20


class TensorReader:
    """A checkpoint with a pool of threads, one for each CPU that this process may use.

    `on_bytes(n)` is called in the thread of the caller, after every n bytes of weights read.
    Errors:  CheckpointError naming the tensor for a wrong shape, and for NaN or infinite values
    """

    def __init__(self, checkpoint: Checkpoint, on_bytes: OnBytes | None = None):
        self.checkpoint = checkpoint
        self._on_bytes = on_bytes or (lambda num_bytes: None)
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "load")

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of the tensor's bits."""
        return self.checkpoint.dtype(name)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return a new array for `rows` and `columns` to fill."""
        return aligned_empty(shape, dtype)

    def refuse(self, name: str) -> None:
        """Raise where the checkpoint has a tensor that config.json leaves no place for."""
        if self.checkpoint.has(name):
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {shown(name)} is not part of the model that "
                "config.json describes; they belong to different models"
            )

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise unless the tensor is there, of a known dtype and of this shape."""
        self.dtype(name)
        found = self.checkpoint.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {shown(name)} has shape {shown(list(found))}, "
                f"config.json asks for {list(shape)}; they belong to different models"
            )

    def bits(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return the tensor as it lies in the file, its shape checked, its values not."""
        self.require(name, shape)
        return self.checkpoint.array(name)

    def vector(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a small tensor as float32."""
        values = loading.to_float32(self.bits(name, shape))
        self._require_finite(name, bool(np.isfinite(values).all()))
        self._on_bytes(self.checkpoint.num_bytes(name))
        return values

    def norm_weight(self, name: str, size: int, affine: bool) -> np.ndarray:
        """Return a norm's weights as float32; all ones where norms have none."""
        return self.vector(f"{name}.weight", (size,)) if affine else np.ones(size, np.float32)

    def mapped(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a matrix as it lies in the file, shape and values checked."""
        bits = self.bits(name, shape)
        self._run(name, lambda start, end: loading.all_finite(bits[start:end]), *_rows_of(bits))
        return bits

    def rows(
        self, name: str, num_rows: int, dst: np.ndarray, row_ids: np.ndarray | None = None
    ) -> None:
        """Copy all rows of a (num_rows, C) tensor, or `row_ids` of them, into `dst` (N, C)."""
        src = self._as_dtype(self.bits(name, (num_rows, dst.shape[1])), dst.dtype)

        def copy(start: int, end: int) -> bool:
            if row_ids is None:
                return loading.copy_rows(src[start:end], dst[start:end])
            return loading.gather_rows(src, row_ids[start:end], dst[start:end])

        self._run(name, copy, *_rows_of(dst))

    def columns(self, name: str, num_columns: int, dst: np.ndarray, column_ids: np.ndarray) -> None:
        """Copy `column_ids` of a (R, num_columns) tensor into the rows of `dst` (N, R)."""
        src = self._as_dtype(self.bits(name, (dst.shape[1], num_columns)), dst.dtype)

        def copy(start: int, end: int) -> bool:
            return loading.gather_columns(src, column_ids[start:end], dst[start:end])

        self._run(name, copy, *_rows_of(dst))

    def _as_dtype(self, bits: np.ndarray, dtype: np.dtype) -> np.ndarray:
        if bits.dtype == dtype:
            return bits
        return loading.from_float32(loading.to_float32(bits), dtype)

    def _run(
        self, name: str, copy: Callable[[int, int], bool], num_rows: int, row_bytes: int
    ) -> None:
        block = max(1, BLOCK_BYTES // max(1, row_bytes))
        spans = [(start, min(start + block, num_rows)) for start in range(0, num_rows, block)]
        futures = [self._pool.submit(copy, start, end) for start, end in spans]
        for future, (start, end) in zip(futures, spans, strict=True):
            self._require_finite(name, future.result())
            self._on_bytes((end - start) * row_bytes)

    def _require_finite(self, name: str, finite: bool) -> None:
        if not finite:
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {shown(name)} has NaN or infinite values; "
                "download it again or use another model"
            )


def _rows_of(matrix: np.ndarray) -> tuple[int, int]:
    """Return the number of rows and the bytes of one."""
    return matrix.shape[0], matrix.shape[1] * matrix.itemsize
