"""Matmul of prefill, over weights that stay bits of their checkpoint's format.

`matmul_kinds` says how they are multiplied on this CPU.

Calls compute nothing at once: they become phases, in their order, and `run` has all threads go
through them (`thread_team.py`). Each thread converts and multiplies rows of its own: cores then
share nothing but the input, which matters where they share no cache.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from hotcold.actors.cpu.thread_team import Phase, Shared, Then, ThreadTeam
from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.block_rows import BEGIN, END
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.decode.vectors import QuantizedVectors
from hotcold.numba_kernels.formats import QUANT_GROUP, is_quantized
from hotcold.numba_kernels.ir.target import LANES, has_feature
from hotcold.numba_kernels.prefill.block_tokens import (
    BlockTokens,
    CutRows,
    Rows,
    StripeSums,
    WeightBlocks,
    every_token,
    weight_blocks,
)
from hotcold.numba_kernels.prefill.float_items import num_items, row_stride, row_unit
from hotcold.numba_kernels.prefill.float_matmul import (
    combine_kernel,
    num_groups,
    pack_rows_kernel,
)
from hotcold.numba_kernels.prefill.shared_rows import (
    AMX,
    BFLOAT16,
    FLOAT32,
    INT16,
    QUANTIZED,
    FloatTokens,
    Tokens,
    multiply_blocks,
    new_tokens,
    prepare_blocks,
    token_items,
    token_space,
)
from hotcold.placement.machine.pinning import pin_thread

_FEATURES = ("amx-bf16", "avx512bf16", "avx512vnni")  # that decide, by LLVM's names
ThreadCores = Sequence[Sequence[int]]
RowsPart = Callable[[int, int], object]  # of the first row and the one after the last


def matmul_features() -> frozenset[str]:
    """The features of the CPU that `matmul_kinds` looks at.

    Kernels are compiled for that CPU; see `has_feature`.
    """
    return frozenset(name for name in _FEATURES if has_feature(name))


def matmul_kinds(dtype: np.dtype, features: Collection[str]) -> tuple[type, type]:
    """How weights of `dtype` are multiplied on a CPU with `features`: x @ weights.T, h @ rows.

    It depends on nothing else, so that CPUs of one kind never differ in a bit:

    | weights             | amx-bf16  | avx512bf16 | avx512vnni | others    |
    | ------------------- | --------- | ---------- | ---------- | --------- |
    | float32             | FLOAT32   | FLOAT32    | FLOAT32    | FLOAT32   |
    | 16 bits, x @ w.T    | AMX       | BFLOAT16   | INT16      | FLOAT32   |
    | 16 bits, h @ rows   | AMX       | BFLOAT16   | FLOAT32    | FLOAT32   |
    | quantized, x @ w.T  | QUANTIZED | QUANTIZED  | QUANTIZED  | QUANTIZED |
    | quantized, h @ rows | AMX       | BFLOAT16   | FLOAT32    | FLOAT32   |

    A CPU is of the leftmost column whose feature it has. None of them lets a token's bits depend on
    its batch-mates. Figures: docs/decisions.md.
    """
    if dtype == np.float32:
        return FLOAT32, FLOAT32
    sums: type = BFLOAT16 if "avx512bf16" in features else FLOAT32
    if {"amx-bf16", "avx512bf16"} <= set(features):  # numbers are rounded by the latter
        sums = AMX
    if is_quantized(dtype):
        return QUANTIZED, sums
    if sums is FLOAT32 and "avx512vnni" in features:
        return INT16, sums
    return sums, sums


def loop_tokens(num_threads: int, num_tokens: int, dtype: np.dtype, width: int) -> Tokens:
    """Work space of a compiled loop for tokens of up to `width` numbers: as `matmul_kinds` has it.

    They are multiplied with rows of `dtype`, x @ weights.T.
    """
    return new_tokens(matmul_kinds(dtype, matmul_features())[0], num_threads, num_tokens, width)


class Operand(NamedTuple):
    """What blocks of weights are multiplied with: their choices; see `prepare_blocks`."""

    choices: BlockTokens
    tokens: Tokens
    starts: np.ndarray


class BlockProducts:
    """Products of blocks of weights and the tokens that chose them, as numbers of one kind.

    Each token's sums have one order, whatever its batch-mates and however many threads there are.
    Work space is kept from call to call: new memory takes long to get.
    """

    def __init__(self, kind: type, num_threads: int, then: Then) -> None:
        """`then` has a function called with every thread's number, after those before."""
        self._kind, self._num_threads, self._then = kind, num_threads, then
        self._num_items = self._num_tokens = 0
        self._space: Tokens | None = None

    def operand(self, x: Rows, weights: WeightBlocks, choices: BlockTokens) -> Operand:
        """Each block's rows of x as rows like `weights` take them."""
        counts, widths = np.diff(choices.starts), _row_widths(x, choices)
        if self._kind is QUANTIZED:
            starts = choices.starts
            tokens: Tokens = self._vectors(choices.ids.size, int(widths.max(initial=0)))
        else:
            groups = num_groups(counts)
            starts = _starts(groups * LANES * token_items(self._kind, widths))
            tokens = self._floats(int(starts[-1]), int(groups.max(initial=0)) * LANES)

        def prepare(thread: int) -> None:
            prepare_blocks(
                weights.array, x, choices, tokens, starts, thread, thread, self._num_threads
            )

        self._then(prepare)
        return Operand(choices, tokens, starts)

    def linear(self, operand: Operand, weights: WeightBlocks, out: Rows) -> None:
        """out = x @ weights.T of each block's choices.

        Shapes:  out: `ChoiceRows`, or `StripeSums`, which they are added to
        Dtypes:  out float32
        """

        def multiply(thread: int, part: int, count: int) -> None:
            multiply_blocks(*weights, *operand, out, thread, part, count)

        # Multiplications, or of bytes if quantized.
        items = weights.places[:, END] - weights.places[:, BEGIN]
        work = int(items @ np.diff(operand.choices.starts))
        self._then(Shared(self._num_threads, work, multiply))

    def combine(
        self, h: CutRows, choices: BlockTokens, rows: WeightBlocks, out: StripeSums
    ) -> None:
        """out = h @ rows of each block's choices, added up as `out` says; not as integers.

        Shapes:  h: as many numbers for each choice as its block has rows
        Dtypes:  h float32; rows float32, 16 bits, or of ROW_FORMATS
        """
        kind, counts = self._kind, np.diff(choices.starts)
        strides, unit = row_stride(num_items(_row_widths(h, choices), kind), kind), row_unit(kind)
        starts = _starts(counts * strides)
        most = -(-int(counts.max(initial=0)) // unit) * unit
        space = self._floats(int(starts[-1]) + unit * int(strides.max(initial=0)), most)
        assert isinstance(space, FloatTokens)

        def pack(thread: int) -> None:
            pack_rows_kernel(h, choices, space.packed, starts, thread, self._num_threads)

        def multiply(thread: int, part: int, count: int) -> None:
            combine_kernel(
                *rows, choices, space.packed, starts, space.buffers[thread], space.sums[thread],
                out, part, count,
            )  # fmt: skip

        self._then(pack)
        # Fewer columns than a block has take longer: no thread's columns are cut.
        self._then(Shared(self._num_threads, 0, multiply))

    def _floats(self, num_items: int, num_tokens: int) -> Tokens:
        """Space for so many items, and for sums of so many tokens of a block."""
        if num_items > self._num_items or num_tokens > self._num_tokens or self._space is None:
            self._num_items = max(num_items, self._num_items)
            self._num_tokens = max(num_tokens, self._num_tokens)
            self._space = token_space(
                self._kind, self._num_threads, self._num_items, self._num_tokens, aligned_empty
            )
        return self._space

    def _vectors(self, count: int, width: int) -> QuantizedVectors:
        """Space for so many vectors."""
        groups = -(-width // QUANT_GROUP)
        if count * groups > self._num_items or self._space is None:
            self._num_items = max(count * groups, self._num_items)
            self._space = new_tokens(QUANTIZED, 1, self._num_items, QUANT_GROUP)
        sizes = groups * QUANT_GROUP, groups, groups
        return QuantizedVectors(
            *(
                array.reshape(-1)[: count * size].reshape(count, size)
                for array, size in zip(self._space, sizes, strict=True)
            )
        )


def _row_widths(rows: Rows, choices: BlockTokens) -> np.ndarray:
    """How many numbers a row has in each block (B,) int64."""
    counts = np.diff(choices.starts)
    if isinstance(rows, np.ndarray):
        return np.full(counts.size, rows.shape[1])
    if isinstance(rows, CutRows):
        return np.diff(rows.columns).ravel()
    assert not isinstance(rows, StripeSums)
    return np.diff(rows.starts) // np.maximum(counts, 1)


def _starts(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


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

    def __init__(self, num_threads: int, thread_cores: ThreadCores = ()) -> None:
        """`num_threads` cores, each with its own rows; thread t kept on thread_cores[t] if any."""

        def begin(thread: int) -> None:
            if thread_cores:
                pin_thread(thread_cores[thread])

        self.num_threads = num_threads
        self._features = matmul_features()
        self._team = ThreadTeam(num_threads, begin)
        self._phases: list[Phase] = []
        self._scratch: list[np.ndarray] = []
        self._num_allocated = 0
        self._kinds: dict[type, BlockProducts] = {}

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

        And what makes its numbers, over all (docs/decisions.md). Of quantized ones as without AMX,
        which makes them twice as fast at most.
        """
        kind = matmul_kinds(rows.dtype, self._features)[1]
        return 0.05 if kind is AMX and not is_quantized(rows.dtype) else 0.18

    def vectors(self, x: np.ndarray, weights: np.ndarray) -> np.ndarray | QuantizedVectors:
        """What kernels multiply `weights` with: x (T, d), or its vectors until the next matmul."""
        if not is_quantized(weights.dtype):
            return x
        operand = self._kind(QUANTIZED).operand(x, weight_blocks(weights), every_token(len(x)))
        return cast(QuantizedVectors, operand.tokens)

    def _kind(self, kind: type) -> BlockProducts:
        """Those of a kind, whose work space is made when the first weights need it."""
        if kind not in self._kinds:
            self._kinds[kind] = BlockProducts(kind, self.num_threads, self.then)
        return self._kinds[kind]
