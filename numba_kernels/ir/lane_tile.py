"""A tile of products whose lanes are tokens, or columns, with its sums in registers.

Numbers go by in items of 32 bits: a pair of bfloat16 or int16, or one float32. A tile is TILE_ROWS
rows of weights times up to MAX_GROUPS groups of LANES tokens. Where rows are weighted and summed,
columns stand for tokens here, and tokens for rows. Tokens are the lanes, so an item of
weights is broadcast to them and no sum crosses lanes; each token's sum has one order, whatever its
batch-mates. The tile's sums fill the registers: with AVX-512, for each item of columns, four loads
of tokens and six of weights feed 24 instructions; with AVX2 two and six feed 12.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hotcold.numba_kernels.ir.target import LANES, has_feature
from hotcold.numba_kernels.ir.vec import (
    I32,
    Array,
    Ptr,
    Var,
    Vec,
    for_range,
    whole_steps,
)

TILE_ROWS = 6
MAX_GROUPS = 4 if has_feature("avx512f") else 1
ROWS_AHEAD = 3
_CACHE_LINE = 64


@dataclass(frozen=True)
class Instruction:
    """What adds to 32-bit sums, in each lane, the products of two items.

    sums: their type; add(sums, tokens, weights) gives new sums, of vectors of items as int32
    items_a_step: of a loop; LLVM loads what more of them need too early, and runs out of registers
    """

    sums: Any
    add: Callable[[Vec, Vec, Vec], Vec]
    items_a_step: int


@dataclass(frozen=True)
class Ahead:
    """Rows prefetched into the second-level cache meanwhile, some bytes of each for every item."""

    rows: list[Ptr]
    bytes_an_item: Vec | int

    @classmethod
    def of(cls, array: Array, row: Vec, column: Vec, bytes_an_item: Vec | int) -> Ahead:
        """ROWS_AHEAD rows of `array` from `column` on."""
        return cls(array.rows(row, column, ROWS_AHEAD), bytes_an_item)

    def prefetch(self, item: Vec) -> None:
        """Ask for the lines that belong to this item."""
        for row in self.rows:
            (row + item * self.bytes_an_item).prefetch(locality=2)


@dataclass(frozen=True)
class LaneTile:
    """TILE_ROWS rows of items of weights, and groups of tokens.

    tokens: where each group's first item is, LANES of them for each item of a row
    weights, stride: where each row's first item is, and the bytes from item to item
    """

    instruction: Instruction
    tokens: list[Ptr]
    weights: list[Ptr]
    stride: Vec
    ahead: Ahead

    def sums(self, first: Vec, last: Vec) -> list[list[Vec]]:
        """Sums over items first..last-1, by row and group: vectors of one sum a token."""
        builder, at_once = first.builder, self.instruction.items_a_step
        zero = Vec.full(builder, 0, self.instruction.sums, LANES)
        sums = [[Var(zero) for _ in self.tokens] for _ in self.weights]

        def one_item(item: Vec) -> None:
            xs = [
                (group + item * (4 * LANES)).load(I32, LANES, align=_CACHE_LINE)
                for group in self.tokens
            ]
            for row, of_row in zip(self.weights, sums, strict=True):
                weight = (row + item * self.stride).load(I32).spread(LANES)
                for x, total in zip(xs, of_row, strict=True):
                    total.set(self.instruction.add(total.get(), x, weight))

        def step(item: Vec) -> None:
            self.ahead.prefetch(item)
            for i in range(at_once):
                one_item(item + i)

        whole = first + whole_steps(last - first, at_once)
        for_range(first, whole, at_once, step)
        for_range(whole, last, 1, one_item)
        return [[total.get() for total in of_row] for of_row in sums]
