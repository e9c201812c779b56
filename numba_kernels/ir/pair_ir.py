"""Dot products of pairs of 16-bit numbers, bfloat16 or int16: a tile with its sums in registers.

A tile is TILE_ROWS rows of weights times up to MAX_GROUPS groups of LANES tokens. Tokens are the
lanes, so a pair of weights is broadcast to them and no sum crosses lanes; each token's sum has one
order, whatever its batch-mates. The tile's sums fill the registers: for each pair of columns, four
loads of tokens and six of weights feed 24 instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hotcold.numba_kernels.ir.vec import (
    I32,
    Array,
    Ptr,
    Var,
    Vec,
    for_range,
    whole_steps,
)

LANES = 16
TILE_ROWS = 6
MAX_GROUPS = 4
ROWS_AHEAD = 3
_PAIRS_A_STEP = 4
_CACHE_LINE = 64


@dataclass(frozen=True)
class PairInstruction:
    """An instruction that adds to 32-bit sums, in each lane, the products of two pairs.

    sums: their type; add(sums, tokens, weights) gives new sums, of vectors of pairs as int32
    """

    sums: Any
    add: Callable[[Vec, Vec, Vec], Vec]


@dataclass(frozen=True)
class Ahead:
    """Rows prefetched into the second-level cache meanwhile, some bytes of each for every pair."""

    rows: list[Ptr]
    bytes_a_pair: Vec | int

    @classmethod
    def of(cls, array: Array, row: Vec, column: Vec, bytes_a_pair: Vec | int) -> Ahead:
        """ROWS_AHEAD rows of `array` from `column` on."""
        return cls(array.rows(row, column, ROWS_AHEAD), bytes_a_pair)

    def prefetch(self, pair: Vec) -> None:
        """Ask for the lines that belong to this pair."""
        for row in self.rows:
            (row + pair * self.bytes_a_pair).prefetch(locality=2)


@dataclass(frozen=True)
class PairTile:
    """TILE_ROWS rows of pairs of weights, and groups of tokens.

    tokens: where each group's first pair is, LANES pairs for each pair of columns
    weights, stride: where each row's first pair is, and the bytes from pair to pair
    """

    instruction: PairInstruction
    tokens: list[Ptr]
    weights: list[Ptr]
    stride: Vec
    ahead: Ahead

    def sums(self, first: Vec, last: Vec) -> list[list[Vec]]:
        """Sums over pairs first..last-1, by row and group: vectors of one sum a token."""
        builder = first.builder
        zero = Vec.full(builder, 0, self.instruction.sums, LANES)
        sums = [[Var(zero) for _ in self.tokens] for _ in self.weights]

        def one_pair(pair: Vec) -> None:
            xs = [
                (group + pair * (4 * LANES)).load(I32, LANES, align=_CACHE_LINE)
                for group in self.tokens
            ]
            for row, of_row in zip(self.weights, sums, strict=True):
                weight = (row + pair * self.stride).load(I32).spread(LANES)
                for x, total in zip(xs, of_row, strict=True):
                    total.set(self.instruction.add(total.get(), x, weight))

        def step(pair: Vec) -> None:
            self.ahead.prefetch(pair)
            for i in range(_PAIRS_A_STEP):
                one_pair(pair + i)

        whole = first + whole_steps(last - first, _PAIRS_A_STEP)
        for_range(first, whole, _PAIRS_A_STEP, step)
        for_range(whole, last, 1, one_pair)
        return [[total.get() for total in of_row] for of_row in sums]
