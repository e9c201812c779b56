"""Copies tensors out of a checkpoint in parallel, checking shape and values on the way.

Matrices are copied as they are stored, or cast or quantized on the way, block by block: only blocks
are ever held in both formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import numpy as np

from hotcold.model.config.weight_formats import dtype_name, option_name, require_whole_groups
from hotcold.model.errors import CheckpointError, UsageError, shown
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.limits import num_cpus
from hotcold.model.weights.memory import aligned_empty
from hotcold.model.weights.row_copies import (
    FAULTS,
    Copy,
    finite_status,
    float_columns,
    float_rows,
    quantized_columns,
    quantized_rows,
)
from hotcold.numba_kernels.formats import is_blocks, is_quantized, row_items, row_width
from hotcold.numba_kernels.load import loading, quantize
from hotcold.numba_kernels.load.blocks import COLUMNS_AT_ONCE, blocks_status
from hotcold.numba_kernels.load.convert import to_float32

OnBytes = Callable[[int], None]
# Takes new matrices (R, C) before anything is written to them; see `placement.machine.first_touch`.
Touch = Callable[[Sequence[np.ndarray]], None]
BLOCK_BYTES = 16 << 20
_RELEASED_BYTES = 64 << 20  # of a tensor at a time, where no pages are kept
_TURNED_BYTES = 2 << 20  # of columns that become rows before they are quantized, in each thread


class TensorReader:
    """A checkpoint with a pool of threads, one for each CPU that this process may use.

    `on_bytes(n)` is called in the thread of the caller, after every n bytes of weights loaded.
    `dtype` is another format that matrices become. `touch` is given every new matrix. At most
    `most_rows` of each are copied and checked, where only what that compiles is wanted.
    Errors:  CheckpointError naming the tensor for a wrong shape, and for NaN or infinite values;
             UsageError where `dtype` cannot be had
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        on_bytes: OnBytes | None = None,
        dtype: np.dtype | None = None,
        touch: Touch | None = None,
        most_rows: int | None = None,
    ):
        self.checkpoint = checkpoint
        self._dtype = dtype
        self._touch = touch
        self._most_rows = most_rows
        self._on_bytes = on_bytes or (lambda num_bytes: None)
        self._pool = ThreadPoolExecutor(num_cpus(), "load")

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self.checkpoint.drop_page_cache()

    def loaded_dtype(self, name: str) -> np.dtype:
        """Return the dtype that a matrix is loaded in.

        It is the reader's; else that of a quantized checkpoint, for a head tied to the embeddings
        is stored as they are; else what the checkpoint says of the tensor.
        """
        own = self.checkpoint.loaded_dtype(name)
        quantized = self.checkpoint.quantized_dtype
        wanted = quantized if self._dtype is None else self._dtype
        if wanted is None:
            return own
        if quantized not in (None, wanted):
            raise self._already_quantized(wanted, dtype_name(quantized))
        if not is_quantized(wanted) and is_blocks(self.checkpoint.dtype(name)):
            raise self._already_quantized(wanted, self.checkpoint.format_name(name))
        return wanted

    def own_dtype(self, name: str) -> np.dtype:
        """Return the dtype that a matrix would be loaded in if no other layer had such a one."""
        if self._dtype is not None or self.checkpoint.quantized_dtype is not None:
            return self.loaded_dtype(name)
        return self.checkpoint.own_dtype(name)

    def _already_quantized(self, wanted: np.dtype, stored: str) -> UsageError:
        return UsageError(
            f"--dtype {option_name(wanted)}: {self.checkpoint.path} is quantized to {stored} "
            "already; leave --dtype out, or name the original model"
        )

    def matrix(
        self,
        shape: tuple[int, ...],
        name: str,
        offsets: np.ndarray | None = None,
        dtype: np.dtype | None = None,
    ) -> np.ndarray:
        """Return a new array of `shape` weights for `rows` or `columns` of a tensor to fill.

        It holds shape[0] matrices, or one of two dimensions; or, with `offsets`, stacked ones of
        the rows offsets[i] to offsets[i + 1]. Its dtype is `dtype`, or `loaded_dtype`.
        """
        dtype = self.loaded_dtype(name) if dtype is None else dtype
        array = self.empty((*shape[:-1], self._row_items(dtype, shape[-1])), dtype)
        if self._touch is not None and array.size:
            stacked = [array] if offsets is None else np.split(array, offsets[1:-1])
            self._touch(list(array) if array.ndim == 3 else stacked)
        return array

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return a new array of `shape` items."""
        return aligned_empty(shape, dtype)

    def refuse(self, name: str) -> None:
        """Raise where the checkpoint has a tensor that config.json leaves no place for."""
        if self.checkpoint.has(name):
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {self.checkpoint.shown_name(name)} is not part of "
                "the model that config.json describes; they belong to different models"
            )

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise unless the tensor is there, of a known dtype and of this shape."""
        self.checkpoint.dtype(name)
        found = self.checkpoint.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {self.checkpoint.shown_name(name)} has shape "
                f"{shown(list(found))}, the model's configuration asks for {list(shape)}; they "
                "belong to different models"
            )

    def require_rows(self, name: str, num_rows: int, width: int) -> None:
        """Raise unless the tensor is a matrix of so many rows of `width` weights."""
        items = self._row_items(self.checkpoint.dtype(name), width)
        self.require(name, (num_rows, items))

    def require_columns(self, name: str, height: int, num_columns: int) -> None:
        """Raise unless the tensor has so many columns of `height` weights, or rows by neurons."""
        if self.checkpoint.is_by_neurons(name):
            self.require_rows(name, num_columns, height)
        else:
            self.require_rows(name, height, num_columns)

    def require_floats(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise unless the tensor is of this shape and not in quantized rows."""
        dtype = self.checkpoint.dtype(name)
        if is_blocks(dtype):
            shape = (*shape[:-1], self._row_items(dtype, shape[-1]))
        self.require(name, shape)
        if is_quantized(dtype):
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {shown(name)} is U8, and must not be quantized; "
                "make the model again with `hotcold quantize`"
            )

    def vector(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a small tensor as float32."""
        self.require_floats(name, shape)
        values = to_float32(self.checkpoint.array(name))
        self._require_good(name, finite_status(bool(np.isfinite(values).all())))
        self._on_bytes(self.checkpoint.num_bytes(name))
        self.checkpoint.release(name)
        return values

    def mapped(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a matrix as it is in the file, shape and values checked."""
        self.require_floats(name, shape)
        return self.checked(name)

    def checked(self, name: str) -> np.ndarray:
        """Return floats of any shape as they are in the file, their values checked."""
        bits = self.checkpoint.array(name)
        matrix = bits.reshape(-1, bits.shape[-1] if bits.ndim and bits.size else 1)

        def check(start: int, end: int) -> int:
            if is_blocks(matrix.dtype):
                return blocks_status(matrix[start:end])
            return finite_status(loading.all_finite(matrix[start:end]))

        self._run(name, check, *_rows_of(matrix))
        return bits

    def rows(
        self, name: str, num_rows: int, dst: np.ndarray, row_ids: np.ndarray | None = None
    ) -> None:
        """Copy all rows of a matrix, or `row_ids` of them, into `dst`.

        Shapes:  the tensor (num_rows, C) weights, dst (N, C) weights in its own format
        """
        self.require_rows(name, num_rows, row_width(dst.dtype, dst.shape[1]))
        src = self.checkpoint.array(name)
        if not is_quantized(dst.dtype):
            self._run(name, float_rows(src, dst, row_ids), *_rows_of(dst))
            return
        ids = np.arange(num_rows, dtype=np.int32) if row_ids is None else row_ids
        self._run(name, quantized_rows(src, dst, ids), *_rows_of(dst))

    def row_parts(self, name: str, width: int, dst: np.ndarray, first: int) -> None:
        """Copy a part of all rows of a matrix of blocks, from column `first` on.

        Shapes:  the tensor (N, width) weights, dst (N, C) weights in its own format; `first` at the
                 begin of a block
        """
        self.require_rows(name, len(dst), width)
        src = self.checkpoint.array(name)
        begin = row_items(src.dtype, first)
        end = begin + row_items(src.dtype, row_width(dst.dtype, dst.shape[1]))
        ids = np.arange(len(dst), dtype=np.int32)
        self._run(name, quantized_rows(src[:, begin:end], dst, ids), *_rows_of(dst))

    def columns(self, name: str, num_columns: int, dst: np.ndarray, column_ids: np.ndarray) -> None:
        """Copy columns of a matrix into the rows of `dst`; some tensors have rows for columns.

        Shapes:  the tensor (R, num_columns) weights, dst (N, R) weights in its own format
        """
        height = row_width(dst.dtype, dst.shape[1])
        self.require_columns(name, height, num_columns)
        src = self.checkpoint.array(name)
        if self.checkpoint.is_by_neurons(name):
            copy = quantized_rows if is_quantized(dst.dtype) else float_rows
            self._run(name, copy(src, dst, column_ids), *_rows_of(dst))
        elif is_blocks(src.dtype):
            turn = quantized_columns(src, dst, column_ids)
            self._run(name, turn, *_rows_of(dst), COLUMNS_AT_ONCE)
        elif is_quantized(dst.dtype):
            block_rows = max(1, _TURNED_BYTES // max(1, height * src.itemsize))
            self._run(name, quantized_columns(src, dst, column_ids), *_rows_of(dst), block_rows)
        else:
            self._run(name, float_columns(src, dst, column_ids), *_rows_of(dst))

    def _row_items(self, dtype: np.dtype, width: int) -> int:
        """`row_items`, with an error that says whose fault it is."""
        try:
            return row_items(dtype, width)
        except ValueError as problem:
            if self.checkpoint.quantized_dtype is None and not is_blocks(dtype):
                require_whole_groups(dtype, width)
            raise CheckpointError(
                f"{self.checkpoint.path}: is quantized, but its configuration asks for {problem}; "
                "they belong to different models"
            ) from None

    def _run(
        self,
        name: str,
        copy: Copy,
        num_rows: int,
        row_bytes: int,
        block_rows: int | None = None,
    ) -> None:
        if self._most_rows is not None:
            num_rows = min(num_rows, self._most_rows)
        block = block_rows or max(1, BLOCK_BYTES // max(1, row_bytes))
        spans = [(start, min(start + block, num_rows)) for start in range(0, num_rows, block)]
        futures = [self._pool.submit(copy, start, end) for start, end in spans]
        num_read = 0
        for future, (start, end) in zip(futures, spans, strict=True):
            self._require_good(name, future.result())
            num_bytes = (end - start) * row_bytes
            self._on_bytes(num_bytes)
            num_read += num_bytes
            if num_read >= _RELEASED_BYTES and not self.checkpoint.keeps_pages:
                self.checkpoint.release(name)
                num_read = 0
        self.checkpoint.release(name)  # or a process would hold the model twice

    def _require_good(self, name: str, status: int) -> None:
        if status != quantize.DONE:
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {self.checkpoint.shown_name(name)} "
                f"{FAULTS[status]}"
            )


def _rows_of(matrix: np.ndarray) -> tuple[int, int]:
    """Return the number of rows and the bytes of one."""
    return matrix.shape[0], matrix.shape[1] * matrix.itemsize
