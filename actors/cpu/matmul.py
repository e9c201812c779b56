"""Matmul of prefill, over weights that stay bits of their checkpoint's format.

`matmul_kinds` says how they are multiplied on this CPU.

Calls compute nothing at once: they become phases, in their order, and `run` has all threads go
through them (`thread_team.py`). Each thread converts and multiplies rows of its own: cores then
share nothing but the input, which matters where they share no cache.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from hotcold.actors.cpu.kernel_matmul import (
    AmxMatmul,
    Bfloat16Matmul,
    Float32Matmul,
    Int16Matmul,
    QuantizedMatmul,
)
from hotcold.actors.cpu.thread_team import Phase, ThreadTeam
from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.decode.vectors import QuantizedVectors
from hotcold.numba_kernels.formats import CHUNK, is_quantized, row_items
from hotcold.numba_kernels.ir.target import has_feature
from hotcold.numba_kernels.prefill.block_tokens import (
    BlockTokens,
    CutRows,
    Rows,
    StripeSums,
    WeightBlocks,
    every_token,
    one_block,
    weight_blocks,
)
from hotcold.numba_kernels.prefill.shared_rows import (
    Tokens,
    float_tokens,
    int16_tokens,
    quantized_tokens,
)
from hotcold.placement.machine.pinning import pin_thread

_FEATURES = ("amx-bf16", "avx512bf16", "avx512vnni")  # that decide, by LLVM's names
ThreadCores = Sequence[Sequence[int]]
RowsPart = Callable[[int, int], object]  # of the first row and the one after the last
# A class whose objects have operand(x, weights, tokens), linear(operand, weights, out) and most of
# them combine(h, tokens, rows, out), as those of `kernel_matmul`.
Kind = type[Any]


def matmul_features() -> frozenset[str]:
    """The features of the CPU that `matmul_kinds` looks at.

    Kernels are compiled for that CPU; see `has_feature`.
    """
    return frozenset(name for name in _FEATURES if has_feature(name))


def matmul_kinds(dtype: np.dtype, features: Collection[str]) -> tuple[Kind, Kind]:
    """How weights of `dtype` are multiplied on a CPU with `features`: x @ weights.T, h @ rows.

    It depends on nothing else, so that CPUs of one kind never differ in a bit:

    | weights             | amx-bf16           | avx512bf16 | avx512vnni | others   |
    | ------------------- | ------------------ | ---------- | ---------- | -------- |
    | float32             | float32            | float32    | float32    | float32  |
    | 16 bits, x @ w.T    | bfloat16, in tiles | bfloat16   | int16      | float32  |
    | 16 bits, h @ rows   | bfloat16, in tiles | bfloat16   | float32    | float32  |
    | quantized, x @ w.T  | integers           | integers   | integers   | integers |
    | quantized, h @ rows | bfloat16, in tiles | bfloat16   | float32    | float32  |

    A CPU is of the leftmost column whose feature it has. None of them lets a token's bits depend on
    its batch-mates. Figures: docs/decisions.md.
    """
    if dtype == np.float32:
        return Float32Matmul, Float32Matmul
    sums: Kind = Bfloat16Matmul if "avx512bf16" in features else Float32Matmul
    if {"amx-bf16", "avx512bf16"} <= set(features):  # numbers are rounded by the latter
        sums = AmxMatmul
    if is_quantized(dtype):
        return QuantizedMatmul, sums
    if sums is Float32Matmul and "avx512vnni" in features:
        return Int16Matmul, sums
    return sums, sums


def new_tokens(num_threads: int, num_tokens: int, dtype: np.dtype, width: int) -> Tokens:
    """Work space of a compiled loop for tokens of up to `width` numbers: as `matmul_kinds` has it.

    They are multiplied with rows of `dtype`, x @ weights.T.
    """
    kind = matmul_kinds(dtype, matmul_features())[0]
    if kind is QuantizedMatmul:
        return quantized_tokens(num_threads, num_tokens, width)
    if kind is Int16Matmul:
        return int16_tokens(num_threads, num_tokens, width)
    return float_tokens(num_threads, num_tokens, width, kind.items)


@dataclass(frozen=True)
class _RowShares:
    """A phase of parts that a thread goes through for its own rows."""

    count: int
    num_threads: int
    parts: list[RowsPart]

    def __call__(self, thread: int) -> None:
        first, last = split_range(self.count, thread, self.num_threads, 1)
        for part in self.parts if first < last else ():
            part(first, last)


class Matmul:
    """Multiplies a service's weights with the hidden states of many tokens."""

    def __init__(
        self, num_threads: int, dtypes: Sequence[np.dtype], thread_cores: ThreadCores = ()
    ) -> None:
        """`num_threads` cores, each with its own rows; thread t kept on thread_cores[t] if any.

        Kernels of `block_linears` for weights of `dtypes` are compiled at once; `combine` is for
        down rows alone, whose service compiles it (`actors.cpu.prefill_ffn`).
        """

        def begin(thread: int) -> None:
            if thread_cores:
                pin_thread(thread_cores[thread])

        self.num_threads = num_threads
        self._features = matmul_features()
        self._team = ThreadTeam(num_threads, begin)
        self._phases: list[Phase] = []
        self._scratch: list[np.ndarray] = []
        self._num_allocated = 0
        self._kinds: dict[Kind, Any] = {}
        for dtype in dtypes:
            self._compile(dtype)

    def _compile(self, dtype: np.dtype) -> None:
        """So that no prompt waits for it."""
        row = np.zeros((1, row_items(dtype, CHUNK)), dtype)
        x, out = np.zeros((1, CHUNK), np.float32), one_block(np.empty((1, 1), np.float32))
        with self.at_once():
            self.block_linears(x, every_token(1), [(weight_blocks(row), out)])

    def begin_layer(self) -> None:
        """What `scratch` gave before may be used for something else from now on."""
        self._num_allocated = 0

    def scratch(self, shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
        """An array of whatever was there, until the next `begin_layer`.

        The next layer has the same memory: to be given new memory takes as long as to fill it.
        """
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if self._num_allocated == len(self._scratch):
            self._scratch.append(aligned_empty((num_bytes,), np.uint8))
        elif self._scratch[self._num_allocated].size < num_bytes:
            self._scratch[self._num_allocated] = aligned_empty((num_bytes,), np.uint8)
        buffer = self._scratch[self._num_allocated]
        self._num_allocated += 1
        return buffer[:num_bytes].view(dtype).reshape(shape)

    def close(self) -> None:
        """End the threads."""
        self._team.close()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Run at the end what was called within, and nothing of it where building it failed."""
        self._phases = []
        yield
        self.run()

    def then(self, phase: Phase) -> None:
        """Let every thread call `phase` with its number, after the phases before."""
        self._phases.append(phase)

    def then_rows(self, count: int, part: RowsPart) -> None:
        """Let every thread call part(first, last) for its share of `count` rows.

        It may read what parts before it made of the same rows: there is no barrier in between.
        """
        last = self._phases[-1] if self._phases else None
        if isinstance(last, _RowShares) and last.count == count:
            last.parts.append(part)
        else:
            self.then(_RowShares(count, self.num_threads, [part]))

    def run(self) -> None:
        """Compute what was called for."""
        phases, self._phases = self._phases, []
        if phases:
            self._team.run(phases)

    def block_linears(
        self, x: Rows, tokens: BlockTokens, matrices: Sequence[tuple[WeightBlocks, Rows]]
    ) -> None:
        """Products of blocks' weights and the tokens that chose them, once it has been run.

        out = x @ weights.T for the choices of each block, of each (weights, out). A choice's bits
        depend on nothing but its x and weights.
        Shapes:  x (T, d), or rows of choices, whole or cut; out: rows of choices, or `StripeSums`,
                 which products are added to
        Dtypes:  x, out float32; weights bits, of one dtype
        """
        first = matrices[0][0]
        kind = self._kind(matmul_kinds(first.array.dtype, self._features)[0])
        operand = kind.operand(x, first, tokens)
        for weights, out in matrices:
            kind.linear(operand, weights, out)

    def combine(self, h: CutRows, tokens: BlockTokens, rows: WeightBlocks, out: StripeSums) -> None:
        """out = h @ rows of each block's choices, added up as `out` says, once it has been run.

        Shapes:  h: rows of choices, as long as their block has rows
        Dtypes:  h, out float32; rows bits
        """
        self._kind(matmul_kinds(rows.array.dtype, self._features)[1]).combine(h, tokens, rows, out)

    def few(self, rows: np.ndarray) -> float:
        """Up to which share of neurons with such down rows one by one is faster than `combine`.

        Of quantized ones as without AMX, which makes them twice as fast at most.
        """
        if is_quantized(rows.dtype):
            return Float32Matmul.few
        share: float = matmul_kinds(rows.dtype, self._features)[1].few
        return share

    def vectors(self, x: np.ndarray, weights: np.ndarray) -> np.ndarray | QuantizedVectors:
        """What kernels multiply `weights` with: x (T, d), or its vectors until the next matmul."""
        if not is_quantized(weights.dtype):
            return x
        kind, tokens = self._kind(QuantizedMatmul), every_token(len(x))
        operand = kind.operand(x, weight_blocks(weights), tokens)
        return cast(QuantizedVectors, operand.vectors)

    def _kind(self, kind: Kind) -> Any:
        """That of this object; a thread's buffers are made when the first weights need them."""
        if kind not in self._kinds:
            self._kinds[kind] = kind(self.num_threads, self.then)
        return self._kinds[kind]
