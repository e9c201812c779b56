"""Copies tensors from a checkpoint into memory, in parallel, and checks shapes and values.

Matrices are copied as stored, or cast or quantized block by block: only blocks are held in both
formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
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
from hotcold.numba_kernels.block_rows import BlockRows, block_places
from hotcold.numba_kernels.formats import (
    FORMATS,
    Q8,
    VALUES,
    is_blocks,
    is_quantized,
    row_items,
    row_width,
)
from hotcold.numba_kernels.load import loading, quantize
from hotcold.numba_kernels.load.blocks import COLUMNS_AT_ONCE, blocks_status
from hotcold.numba_kernels.load.convert import to_float32

OnBytes = Callable[[int], None]
# Takes new matrices (R, C) before anything is written to them: `memory_pages.FirstTouch`.
Touch = Callable[[Sequence[np.ndarray]], None]
BLOCK_BYTES = 16 << 20
_RELEASED_BYTES = 64 << 20  # at a time
_TRANSPOSED_BYTES = 2 << 20  # of columns that a thread transposes, then quantizes


@dataclass(frozen=True)
class _Copying:
    """A matrix that threads copy: in each span of rows, of `row_bytes` each."""

    name: str
    futures: list[Future[int]]
    spans: list[tuple[int, int]]
    row_bytes: int


@dataclass(frozen=True)
class RowPart:
    """Columns from `first` on of a stack's matrix `index`, which are copied into `rows`."""

    index: int
    rows: np.ndarray
    first: int  # begins a block of the tensor's format


class TensorReader:
    """A checkpoint with a pool of threads, one for each CPU that this process may use.

    `on_bytes(n)` is called in the caller's thread after every n bytes of weights. Matrices are
    converted to `dtype`. `touch` gets every new matrix. At most `max_rows` of each matrix are
    copied and checked, for callers that only compile kernels.
    Errors:  CheckpointError naming the tensor for a wrong shape, and for NaN or infinite values;
             UsageError where the model cannot be loaded in `dtype`
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        on_bytes: OnBytes | None = None,
        dtype: np.dtype | None = None,
        touch: Touch | None = None,
        max_rows: int | None = None,
    ):
        self.checkpoint = checkpoint
        self._dtype = dtype
        self._touch = touch
        self._most_rows = max_rows
        self._on_bytes = on_bytes or (lambda num_bytes: None)
        self._pool = ThreadPoolExecutor(num_cpus(), "load")
        self._waiting: list[_Copying] | None = None  # of `together`

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

        The reader's; else that of a quantized checkpoint, whose head may be tied to embeddings that
        are not quantized; else the tensor's.
        """
        own = self.checkpoint.loaded_dtype(name)
        quantized = self.checkpoint.quantized_dtype
        target = quantized if self._dtype is None else self._dtype
        if target is None:
            return own
        if quantized not in (None, target):
            raise self._already_quantized(target, dtype_name(quantized))
        stored = self.checkpoint.dtype(name)
        if not is_quantized(target) and is_blocks(stored) and stored != VALUES:
            raise self._already_quantized(target, self.checkpoint.format_name(name))
        return target

    def own_dtype(self, name: str) -> np.dtype:
        """Return the dtype that a matrix is loaded in if other layers may have other formats."""
        if self._dtype is not None or self.checkpoint.quantized_dtype is not None:
            return self.loaded_dtype(name)
        return self.checkpoint.own_dtype(name)

    def _already_quantized(self, target: np.dtype, stored: str) -> UsageError:
        return UsageError(
            f"--dtype {option_name(target)}: {self.checkpoint.path} is quantized to {stored} "
            "already; leave --dtype out, or name the original model"
        )

    def matrix(
        self,
        shape: tuple[int, ...],
        name: str,
        offsets: np.ndarray | None = None,
        dtype: np.dtype | None = None,
    ) -> np.ndarray:
        """Return a new array of `shape` weights, which `rows` or `columns` of a tensor fill.

        It has three dimensions, shape[0] matrices, or two: one matrix, or stacked ones of the rows
        offsets[i] to offsets[i + 1]. Its dtype is `dtype`, or the tensor's `loaded_dtype`.
        """
        dtype = self.loaded_dtype(name) if dtype is None else dtype
        array = self.empty((*shape[:-1], self.row_items(dtype, shape[-1])), dtype)
        if array.size:
            stacked = [array] if offsets is None else np.split(array, offsets[1:-1])
            self.touch(list(array) if array.ndim == 3 else stacked)
        return array

    def touch(self, matrices: Sequence[np.ndarray]) -> None:
        """Say that these new matrices will be filled."""
        if self._touch is not None:
            self._touch(matrices)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return a new array of `shape` items."""
        return aligned_empty(shape, dtype)

    def refuse(self, name: str) -> None:
        """Raise where the checkpoint has a tensor that config.json does not allow for."""
        if self.checkpoint.has(name):
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {self.checkpoint.shown_name(name)} is not part of "
                "the model that config.json describes; they belong to different models"
            )

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise unless the tensor exists, with a supported dtype and this shape."""
        self.checkpoint.dtype(name)
        found = self.checkpoint.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {self.checkpoint.shown_name(name)} has shape "
                f"{shown(list(found))}, the model's configuration asks for {list(shape)}; they "
                "belong to different models"
            )

    def require_rows(self, name: str, num_rows: int, width: int, stack: int = 0) -> None:
        """Raise unless the tensor is a matrix of so many rows of `width` weights, or a stack."""
        self.require_matrices(name, (stack, num_rows, width) if stack else (num_rows, width))

    def require_matrices(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise unless the tensor has `shape` in weights: a matrix, or stacked ones."""
        items = self.row_items(self.checkpoint.dtype(name), shape[-1])
        self.require(name, (*shape[:-1], items))

    def require_columns(self, name: str, height: int, num_columns: int, stack: int = 0) -> None:
        """Raise unless the tensor has so many columns of `height` weights, or its transpose has."""
        if self.checkpoint.is_by_neurons(name):
            self.require_rows(name, num_columns, height, stack)
        else:
            self.require_rows(name, height, num_columns, stack)

    def require_floats(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise unless the tensor has this shape and is not in quantized rows."""
        dtype = self.checkpoint.dtype(name)
        if is_blocks(dtype):
            shape = (*shape[:-1], self.row_items(dtype, shape[-1]))
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

    def mapped(self, name: str, shape: tuple[int, ...], is_checked: bool = True) -> np.ndarray:
        """Return a matrix as a view of the file: shape checked, with `is_checked` values too."""
        self.require_floats(name, shape)
        return self.checked(name) if is_checked else self.checkpoint.array(name)

    def checked(self, name: str) -> np.ndarray:
        """Return a tensor as a view of the file, its values checked."""
        bits = self.checkpoint.array(name)
        matrix = bits.reshape(-1, bits.shape[-1] if bits.ndim and bits.size else 1)

        def check(start: int, end: int) -> int:
            if is_blocks(matrix.dtype):
                return blocks_status(matrix[start:end])
            return finite_status(loading.all_finite(matrix[start:end]))

        self._run(name, check, *_rows_of(matrix))
        return bits

    @contextmanager
    def together(self) -> Iterator[None]:
        """Copy the matrices that are asked for within side by side; all are copied at its end."""
        self._waiting = []
        try:
            yield
            self._finish(self._waiting)
        finally:
            self._waiting = None

    def rows(
        self,
        name: str,
        num_rows: int,
        dst: np.ndarray,
        row_ids: np.ndarray | None = None,
        stack: int = 0,
    ) -> None:
        """Copy all rows of a matrix, or `row_ids` of them, into `dst`, in dst's format.

        With `stack` the tensor is that many matrices, whose rows follow each other.

        Shapes:  in weights: the tensor (num_rows, C) or (stack, num_rows, C), dst (N, C)
        """
        self.require_rows(name, num_rows, row_width(dst.dtype, dst.shape[1]), stack)
        if not len(dst):
            return
        src = self.checkpoint.array(name)
        src = src.reshape(-1, src.shape[-1])
        if not is_quantized(dst.dtype):
            self._run(name, float_rows(src, dst, row_ids), *_rows_of(dst))
            return
        ids = np.arange(len(dst), dtype=np.int32) if row_ids is None else row_ids
        self._run(name, quantized_rows(src, dst, ids), *_rows_of(dst))

    def made_rows(
        self, name: str, make: Callable[[np.ndarray], np.ndarray], dst: np.ndarray
    ) -> None:
        """Copy rows that `make` makes of a tensor's array into `dst`, in dst's format.

        Shapes:  in weights: of make's result and dst (N, C); its dtype is float32
        """
        src = make(self.checkpoint.array(name))
        if is_quantized(dst.dtype):
            copy = quantized_rows(src, dst, np.arange(len(dst), dtype=np.int32))
        else:
            copy = float_rows(src, dst, None)
        self._run(name, copy, *_rows_of(dst))

    def row_parts(self, name: str, shape: tuple[int, ...], parts: Sequence[RowPart]) -> None:
        """Copy parts of the rows of a matrix of blocks, or of stacked ones.

        Shapes:  in weights: the tensor `shape`, (N, width) or (E, N, width)
        """
        self.require_matrices(name, shape)
        stored = self.checkpoint.array(name)
        matrices = stored.reshape(-1, *stored.shape[-2:])
        height = shape[-2]
        ids = np.arange(height, dtype=np.int32)

        def copy_part(part: RowPart, start: int, end: int) -> int:
            begin = row_items(matrices.dtype, part.first)
            width = row_width(part.rows.dtype, part.rows.shape[1])
            columns = slice(begin, begin + row_items(matrices.dtype, width))
            return quantized_rows(matrices[part.index][:, columns], part.rows, ids)(start, end)

        def copy(start: int, end: int) -> int:
            for index in range(start // height, -(-end // height)):
                first, last = max(start - index * height, 0), min(end - index * height, height)
                status = copy_part(parts[index], first, last)
                if status != quantize.DONE:
                    return status
            return quantize.DONE

        num_bytes = sum(part.rows.nbytes for part in parts)
        num_rows = len(parts) * height
        self._run(name, copy, num_rows, num_bytes // max(1, num_rows))

    def columns(
        self,
        name: str,
        num_columns: int,
        dst: np.ndarray,
        column_ids: np.ndarray,
        stack: int = 0,
        index: int = 0,
    ) -> None:
        """Copy columns of a matrix into rows of `dst`; the tensor may be stored transposed.

        With `stack` the matrix is the `index`-th of the tensor's.

        Shapes:  in weights: the tensor (R, num_columns) or (stack, R, num_columns), dst (N, R)
        """
        height = row_width(dst.dtype, dst.shape[1])
        self.require_columns(name, height, num_columns, stack)
        if not len(dst):
            return
        src = self.checkpoint.array(name)
        src = src[index] if stack else src
        if self.checkpoint.is_by_neurons(name):
            copy = quantized_rows if is_quantized(dst.dtype) else float_rows
            self._run(name, copy(src, dst, column_ids), *_rows_of(dst))
        elif is_blocks(src.dtype):
            transposed = quantized_columns if is_quantized(dst.dtype) else float_columns
            self._run(name, transposed(src, dst, column_ids), *_rows_of(dst), COLUMNS_AT_ONCE)
        elif is_quantized(dst.dtype):
            block_rows = max(1, _TRANSPOSED_BYTES // max(1, height * src.itemsize))
            self._run(name, quantized_columns(src, dst, column_ids), *_rows_of(dst), block_rows)
        else:
            self._run(name, float_columns(src, dst, column_ids), *_rows_of(dst))

    def row_items(self, dtype: np.dtype, width: int) -> int:
        """`row_items`, with an error that blames --dtype or the checkpoint."""
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
        copying = _Copying(name, futures, spans, row_bytes)
        if self._waiting is None:
            self._finish([copying])
        else:
            self._waiting.append(copying)

    def _finish(self, copyings: Sequence[_Copying]) -> None:
        """Await copies. What was read is unloaded, else the process would hold the model twice.

        A tensor of which several read parts is unloaded after the last of them; without
        `keeps_pages` earlier too.
        """
        last = {copying.name: copying for copying in copyings}
        names: list[str] = []
        num_read = 0
        for copying in copyings:
            name = copying.name
            for future, (start, end) in zip(copying.futures, copying.spans, strict=True):
                self._require_good(name, future.result())
                num_bytes = (end - start) * copying.row_bytes
                self._on_bytes(num_bytes)
                num_read += num_bytes
                if num_read >= _RELEASED_BYTES:
                    begun = () if self.checkpoint.keeps_pages else (name,)
                    self.checkpoint.release(*names, *begun)
                    names, num_read = [], 0
            if last[name] is copying:
                names.append(name)
        self.checkpoint.release(*names)

    def _require_good(self, name: str, status: int) -> None:
        if status != quantize.DONE:
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {self.checkpoint.shown_name(name)} "
                f"{FAULTS[status]}"
            )


def _rows_of(matrix: np.ndarray) -> tuple[int, int]:
    """Return the number of rows and the bytes of one."""
    return matrix.shape[0], matrix.shape[1] * matrix.itemsize


def held_dtypes(
    reader: TensorReader, layers: Sequence[Sequence[str]], by_layer: bool
) -> list[list[np.dtype]]:
    """Return the dtypes that matrices of one role are loaded in, of each layer's tensors.

    With `by_layer` it is each tensor's `own_dtype`, but 8 bits of floats beside quantized ones. Of
    floats alone, and without `by_layer`, all have the first tensor's `loaded_dtype`.
    Errors:  CheckpointError, UsageError as of `TensorReader.loaded_dtype`
    """
    own = [[reader.own_dtype(name) for name in names] for names in layers if by_layer]
    if any(is_quantized(dtype) for layer in own for dtype in layer):
        return [[dtype if is_quantized(dtype) else Q8 for dtype in layer] for layer in own]
    dtype = reader.loaded_dtype(layers[0][0])
    return [[dtype] * len(names) for names in layers]


def empty_blocks(
    reader: TensorReader,
    dtypes: Sequence[Sequence[np.dtype]],
    heights: np.ndarray | int,
    widths: np.ndarray | int,
    num_parts: int = 1,
) -> BlockRows:
    """Return new matrices of heights[l, b] rows of widths[l, b] weights, in dtypes[l][b].

    Layers may have different numbers of blocks; behind theirs heights are 0. With `num_parts` each
    block is that many, one after another.
    Errors:  UsageError, CheckpointError for rows that a format cannot hold
    """
    found = {dtype for layer in dtypes for dtype in layer}
    kinds = [dtype for dtype in FORMATS if dtype in found]
    formats = np.zeros((len(dtypes), max(map(len, dtypes))), np.int64)
    for own, layer in zip(formats, dtypes, strict=True):
        own[: len(layer)] = [kinds.index(dtype) for dtype in layer]
    formats = formats.repeat(num_parts, axis=1)
    all_widths = np.broadcast_to(widths, formats.shape)
    for which, width in {*zip(formats.flat, all_widths.flat, strict=True)}:
        reader.row_items(kinds[which], int(width))
    places, counts = block_places(heights, widths, kinds, formats)
    arrays = [reader.empty((count,), dtype) for count, dtype in zip(counts, kinds, strict=True)]
    rows = BlockRows(tuple(arrays), places)
    reader.touch([rows.matrix(*index) for index in np.argwhere(rows.heights).tolist()])
    return rows


def tensor_places(rows: BlockRows, layer: int, sizes: Sequence[int]) -> list[np.ndarray]:
    """Return the views of a layer's tensors, with `sizes` rows, that follow one another."""
    parts, places, begin = rows.parts(layer), [], 0
    for size in sizes:
        if parts and begin >= len(parts[0]):
            parts, begin = parts[1:], 0
        places.append(parts[0][begin : begin + size])
        begin += size
    return places
