"""Rows of matrices that a file holds packed, or in parts: blocks are made as they are read.

Imports no Numba: files are opened without it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from hotcold.numba_kernels.formats import BLOCK_FORMATS, NVFP4_SCALED, row_items, row_width


class RowSource(Protocol):
    """A matrix of `shape`, in weights, whose rows become blocks of `dtype`, of BLOCK_FORMATS."""

    @property
    def dtype(self) -> np.dtype:
        """That of the blocks."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and weights of each."""

    def blocks(self, row_ids: np.ndarray, first: int, last: int) -> np.ndarray:
        """Return the weights `first` to `last` of rows, whole blocks, as an array (N, bytes).

        It is called by several threads at once.
        """

    @property
    def held(self) -> RowSource | None:
        """The same as blocks of another dtype, for rows that hold these to the bit; or None."""


@dataclass(frozen=True)
class ScaledBlocks:
    """A `RowSource` of NVFP4 blocks whose scales, of tensors, stand apart.

    rows (R, bytes) of NVFP4, scales (R,) float32
    """

    rows: np.ndarray
    scales: np.ndarray
    dtype = NVFP4_SCALED
    held = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and weights of each."""
        return self.rows.shape[0], row_width(self.rows.dtype, self.rows.shape[1])

    def blocks(self, row_ids: np.ndarray, first: int, last: int) -> np.ndarray:
        """As `RowSource.blocks`."""
        block = BLOCK_FORMATS[self.rows.dtype]
        begin, end = (at // block.weights * block.num_bytes for at in (first, last))
        own = self.rows.view(np.uint8)[row_ids, begin:end]
        own = own.reshape(row_ids.size, -1, block.num_bytes)
        scales = self.scales[row_ids].view(np.uint8).reshape(row_ids.size, 1, 4)
        scales = np.broadcast_to(scales, (*own.shape[:2], 4))
        return np.concatenate([own, scales], axis=2).reshape(row_ids.size, -1).view(self.dtype)


@dataclass(frozen=True)
class StoredRows:
    """Stands in for an array of a source's blocks: it has what readers of rows take of one.

    Shapes:  row_ids (..., R): of the source's rows; as an array (..., R, bytes of blocks)
    Units:   memory for the rows that are asked for at once
    """

    source: RowSource
    row_ids: np.ndarray
    first: int  # weight of each row
    last: int

    @classmethod
    def of(cls, source: RowSource, *matrices: int) -> StoredRows:
        """All of the source; it has stacked ones where their number is given."""
        row_ids = np.arange(source.shape[0]).reshape(*matrices, -1)
        return cls(source, row_ids, 0, source.shape[1])

    @property
    def dtype(self) -> np.dtype:
        """That of the blocks."""
        return self.source.dtype

    itemsize = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """In bytes of blocks."""
        return *self.row_ids.shape, row_items(self.dtype, self.last - self.first)

    @property
    def ndim(self) -> int:
        """Dimensions."""
        return self.row_ids.ndim + 1

    @property
    def size(self) -> int:
        """Bytes of the blocks."""
        return self.row_ids.size * self.shape[-1]

    def __len__(self) -> int:
        return len(self.row_ids)

    def reshape(self, *shape: int) -> StoredRows:
        """Matrices joined or taken apart; rows stay."""
        return replace(self, row_ids=self.row_ids.reshape(shape[:-1]))

    def __getitem__(self, index: Any) -> StoredRows:
        """Some rows or matrices, or [:, bytes of whole blocks]."""
        if not isinstance(index, tuple):
            return replace(self, row_ids=self.row_ids[index])
        rows, part = index
        begin, end, _ = part.indices(self.shape[-1])
        first, last = (self.first + row_width(self.dtype, at) for at in (begin, end))
        return replace(self, row_ids=self.row_ids[rows], first=first, last=last)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        """All rows as an array of blocks."""
        return self.source.blocks(self.row_ids.reshape(-1), self.first, self.last).reshape(
            self.shape
        )

    def blocks_for(self, dtype: np.dtype) -> StoredRows:
        """The same, as blocks that rows of `dtype` hold to the bit where the source has them."""
        held = self.source.held
        if held is None or dtype not in BLOCK_FORMATS[held.dtype].exact:
            return self
        return replace(self, source=held)

    def gathered(
        self, row_ids: np.ndarray, first_block: int = 0, num_blocks: int | None = None
    ) -> np.ndarray:
        """The rows `row_ids` of a matrix, or some blocks of each, as an array of blocks."""
        weights = BLOCK_FORMATS[self.dtype].weights
        first = self.first + first_block * weights
        last = self.last if num_blocks is None else first + num_blocks * weights
        return self.source.blocks(self.row_ids[row_ids], first, last)
