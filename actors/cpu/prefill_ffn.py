"""The FFN of many tokens (prefill): a matmul of the gates, then what fired neurons add.

Tokens are multiplied with the blocks of neurons that they chose; a choice is a token and one of its
blocks. Products with down are added up by stripes (`numba_kernels.decode.stripes`), some neighbours
of which are one here: a part is what a block has in such a stripe. For parts of choices for which
few neurons fire, up and down are computed only for those; for the others they are matmuls too. The
part's own neurons decide, so a token's result depends neither on its batch-mates nor on what else a
service has. In a stripe a token's parts are added in the order of blocks, matmuls before the
others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from hotcold.actors.cpu.matmul import Matmul
from hotcold.actors.cpu.thread_team import MOST_CUTS, Shared
from hotcold.numba_kernels.block_rows import NUM_PLACE_NUMBERS, BlockRows
from hotcold.numba_kernels.checks import ACTIVATES_UP
from hotcold.numba_kernels.decode.activations import Activation
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.decode.selection import NO_WEIGHTS
from hotcold.numba_kernels.decode.stripes import meet
from hotcold.numba_kernels.ffn_arrays import ExpertPredictors, FfnArrays, TransposedArrays
from hotcold.numba_kernels.formats import CHUNK, row_items
from hotcold.numba_kernels.ir.operands import PART_COLUMNS
from hotcold.numba_kernels.prefill.block_tokens import (
    CLEARS,
    IS_WHOLE,
    LEVEL,
    MERGES,
    NUM_STEP_NUMBERS,
    BlockTokens,
    ChoiceRows,
    CutRows,
    StripeSums,
    WeightBlocks,
    choices,
    layer_blocks,
    row_starts,
    weight_blocks,
)
from hotcold.numba_kernels.prefill.ffn import (
    activate_kernel,
    add_bias_kernel,
    empty_fired,
    list_fired,
    num_parts,
    prompt_down_kernel,
    prompt_up_kernel,
    run_shares,
    scale_kernel,
)

_NO_ROWS = ChoiceRows(np.empty(0, np.float32), np.zeros(1, np.int64))
_NO_SUMS = np.empty((0, 0, 0), np.float32)


def prompt_ffn(
    matmul: Matmul,
    arrays: FfnArrays | TransposedArrays,
    layer: int,
    x: np.ndarray,
    function: Activation,
    out: np.ndarray,
    more: np.ndarray = _NO_SUMS,
    *,
    skip_silent: bool,
    counts: np.ndarray | None = None,
    await_up_down: Callable[[], None] = lambda: None,
    block_weights: np.ndarray = NO_WEIGHTS,
    predictors: LayerPredictors | None = None,
    firsts: np.ndarray | None = None,
) -> None:
    """out, more = what is left over of the sums of layer `layer`'s shard, for all tokens.

    As of `layer_ffn`: `out` is the sum of the first of its stripes, or of all, `more` are others,
    and the biases, where services have some of the stripes each.

    `skip_silent` allows to leave out neurons whose activation is zero; thresholds do not apply to
    so many tokens, which together want nearly all. Where `counts` is given, counts[n] += number of
    tokens for which neuron n's activation is not 0; with drelu also its up product. `await_up_down`
    returns once up and down rows are loaded. Gate rows always are, and are multiplied before that
    where gate and up need not be multiplied together. `block_weights` as in `Selection`: a block is
    multiplied with the tokens for which its weight is not zero. firsts (B,): where the layer's
    blocks begin in rows and biases that are no layer's own, but in slots. `predictors` say which
    neurons of their blocks count.
    Shapes:  x, out (T, d), more (M, at least T, d) float32; counts (N of the layer's shard,) int64;
             block_weights (T, B)
    """
    matmul.begin_layer()
    shard = _Shard.of(arrays, layer, function, firsts)
    tokens, weights = choices(shard.widths, len(x), block_weights)
    h, factors = (_empty_rows(matmul, shard.widths, tokens) for _ in range(2))
    num_fired = np.empty((shard.num_stripes, tokens.ids.size), np.int64)
    # Which neurons fire is not waited for where all are computed.
    waits = skip_silent or counts is not None
    is_gated = shard.up.shape[0] > 0
    scales_at_once = is_gated and (not waits or function.code in ACTIVATES_UP)
    products = [(shard.blocks(shard.gate), h), (shard.blocks(shard.up), factors)]
    at_once = factors if scales_at_once else _NO_ROWS

    with matmul.at_once():
        if scales_at_once or not waits:
            await_up_down()
        matmul.block_linears(x, tokens, products if scales_at_once else products[:1])
        scores = _NO_ROWS if predictors is None else predictors.scores(matmul, shard, tokens, x)
        activate = partial(
            activate_kernel, function, weights, shard.gate_bias, shard.up_bias, shard.firsts,
            tokens, scores, at_once, shard.ends, h, num_fired,
        )  # fmt: skip
        matmul.then_rows(tokens.ids.size, activate)
        if waits:
            matmul.run()
            if not scales_at_once:
                await_up_down()
        if counts is not None:
            _count_fired(shard, h, counts)
        rest = _Rest(matmul, shard, x, factors if is_gated and not scales_at_once else _NO_ROWS)
        is_few = np.zeros(num_fired.shape, bool)
        if skip_silent and isinstance(arrays, FfnArrays):
            widths = np.repeat(np.diff(shard.ends), np.diff(tokens.starts), axis=0).T
            is_few = (num_fired <= matmul.few(arrays.down) * widths) & (widths > 0)
        tree = _Tree.of(matmul, shard, out)
        rest.add_by_choice(tokens, h, is_few, tree)
        for output, level in enumerate(range(1, tree.num_left)):
            matmul.then_rows(len(out), partial(_copy_rows, tree.more[level - 1], more[output]))
        if tree.num_left == 0:
            matmul.then_rows(len(out), partial(_set_zero, out))
        if arrays.down_bias.shape[2]:
            of_biases = out
            if len(more):
                of_biases = more[max(tree.num_left - 1, 0), : len(out)]
                matmul.then_rows(len(out), partial(_set_zero, of_biases))
            add_bias = partial(add_bias_kernel, block_weights, arrays.down_bias[layer], of_biases)
            matmul.then_rows(len(out), add_bias)


def compile_prompt_ffn(arrays: FfnArrays | TransposedArrays, function: Activation) -> None:
    """Compile what `prompt_ffn` calls, so that no prompt waits for it: for a layer of zeros.

    With a matmul of its own: a prompt may be computed by the service's meanwhile.
    """
    if arrays.starts[-1, -1] == 0:  # all neurons are elsewhere
        return
    layer = _zero_layer(arrays)
    x, out = np.zeros((1, CHUNK), np.float32), np.empty((1, CHUNK), np.float32)
    with closing(Matmul(1)) as matmul:
        # Neurons one by one; then as matmuls, whose up products wait for what fires.
        prompt_ffn(matmul, layer, 0, x, function, out, skip_silent=True)
        counts = np.zeros(layer.starts[0, -1], np.int64)
        prompt_ffn(matmul, layer, 0, x, function, out, skip_silent=False, counts=counts)


def _zero_layer(arrays: FfnArrays | TransposedArrays) -> FfnArrays | TransposedArrays:
    """A layer of few neurons in the formats of `arrays`; a block for each format of down rows."""
    down, starts = arrays.down, np.array([[0, 1]])
    if isinstance(down, BlockRows):
        starts = np.array([[0, CHUNK, 2 * CHUNK]])
        own = [np.zeros(CHUNK * row_items(each.dtype, CHUNK), each.dtype) for each in down[:2]]
        places = [[(i, 0, each.size, each.size // CHUNK) for i, each in enumerate(own)]]
        down = BlockRows(own[0], own[1], np.array(places))

    def rows(like: np.ndarray) -> np.ndarray:
        count = starts[0, -1] if like.shape[0] else 0
        return np.zeros((count, row_items(like.dtype, CHUNK)), like.dtype)

    def bias(like: np.ndarray) -> np.ndarray:
        return np.zeros(starts[0, -1] if like.shape[0] else 0, np.float32)

    width = CHUNK if arrays.down_bias.shape[2] else 0
    parts: Any = (
        starts,
        rows(arrays.gate),
        rows(arrays.up),
        down if isinstance(down, BlockRows) else rows(down),
        bias(arrays.gate_bias),
        bias(arrays.up_bias),
        np.zeros((1, starts.size - 1, width), np.float32),
    )
    return type(arrays)(*parts)


class _Shard(NamedTuple):
    """A layer's rows of a shard; block b's are widths[b] from firsts[b] on.

    ends (B, stripes + 1): where stripes begin in each block, and end; first_stripe: the first's
    number
    down: for each format, and whether they are a row an output
    """

    function: Activation
    firsts: np.ndarray
    widths: np.ndarray
    ends: np.ndarray
    first_stripe: int
    gate: np.ndarray
    up: np.ndarray
    gate_bias: np.ndarray
    up_bias: np.ndarray
    down: np.ndarray | list[WeightBlocks]

    @classmethod
    def of(
        cls,
        arrays: FfnArrays | TransposedArrays,
        layer: int,
        function: Activation,
        firsts: np.ndarray | None,
    ) -> _Shard:
        """Views of a layer, or with `firsts` of all rows."""
        starts = np.asarray(arrays.starts[layer], np.int64)
        own = slice(starts[0], starts[-1]) if firsts is None else slice(None)

        def part(array: np.ndarray) -> np.ndarray:
            return array[own] if array.shape[0] else array

        down = arrays.down
        return cls(
            function,
            starts[:-1] - starts[0] if firsts is None else firsts,
            np.diff(starts),
            *prompt_stripes(arrays, layer),
            part(arrays.gate),
            part(arrays.up),
            part(arrays.gate_bias),
            part(arrays.up_bias),
            part(down) if isinstance(down, np.ndarray) else layer_blocks(down, layer),
        )

    @property
    def num_stripes(self) -> int:
        """Stripes of the shard."""
        return self.ends.shape[1] - 1

    def blocks(self, rows: np.ndarray) -> WeightBlocks:
        """Rows of all neurons, or none, by block."""
        return weight_blocks(rows, self.firsts, self.widths * (len(rows) > 0))

    def parts(self, rows: np.ndarray, parts: _Parts) -> WeightBlocks:
        """Rows of all neurons, by part."""
        return weight_blocks(rows, parts.firsts, parts.widths)


class _Parts(NamedTuple):
    """Parts of blocks, stripe after stripe; part s is of block s % B.

    tokens: their choices; h: what is multiplied with down rows; firsts (S,): first rows; stripes:
    the first of them and the end, counted from the shard's first
    """

    tokens: BlockTokens
    h: CutRows
    firsts: np.ndarray
    stripes: tuple[int, int]

    @classmethod
    def of(cls, ends: np.ndarray, shard: _Shard, tokens: BlockTokens, h: ChoiceRows) -> _Parts:
        """Of all choices; stripes end in each block where `ends` (B, stripes + 1) says."""
        num_stripes, counts = ends.shape[1] - 1, np.diff(tokens.starts)
        columns = np.stack([ends[:, :-1], ends[:, 1:]], axis=2).swapaxes(0, 1)
        columns = np.ascontiguousarray(columns.reshape(-1, 2))
        rows = np.arange(tokens.ids.size) - np.repeat(tokens.starts[:-1], counts)
        return cls(
            BlockTokens(
                np.tile(tokens.ids, num_stripes),
                np.concatenate([[0], np.cumsum(np.tile(counts, num_stripes))]),
                tokens.order,
            ),
            CutRows(h.values, h.starts, shard.widths, columns, np.tile(rows, num_stripes)),
            np.tile(shard.firsts, num_stripes) + columns[:, 0],
            (0, num_stripes),
        )

    @property
    def widths(self) -> np.ndarray:
        """How many neurons each part has."""
        return np.diff(self.h.columns).ravel()

    @property
    def counts(self) -> np.ndarray:
        """How many choices each part has."""
        return np.diff(self.tokens.starts)

    def listed(self, is_listed: np.ndarray) -> _Parts:
        """Only the parts of choices of which `is_listed` is set."""
        starts = np.concatenate([[0], np.cumsum(is_listed, dtype=np.int64)])[self.tokens.starts]
        tokens = self.tokens._replace(ids=self.tokens.ids[is_listed], starts=starts)
        return self._replace(tokens=tokens, h=self.h._replace(rows=self.h.rows[is_listed]))

    def stripe(self, stripe: int) -> _Parts:
        """Those of one stripe."""
        num_blocks = self.h.widths.size
        own = slice(stripe * num_blocks, (stripe + 1) * num_blocks)
        starts = self.tokens.starts[own.start : own.stop + 1]
        of_stripe = slice(starts[0], starts[-1])
        tokens = self.tokens._replace(ids=self.tokens.ids[of_stripe], starts=starts - starts[0])
        h = self.h._replace(columns=self.h.columns[own], rows=self.h.rows[of_stripe])
        return _Parts(tokens, h, self.firsts[own], (stripe, stripe + 1))


class _Tree(NamedTuple):
    """Sums of stripes, and how they are added up (`numba_kernels.decode.stripes`).

    out (T, d), more (H, T, d): sums that are not complete, level by level
    steps (stripes, 2): the level of each stripe's sum, and how many levels are merged once it is
    there
    num_left: how many sums are left over at the end
    """

    out: np.ndarray
    more: np.ndarray
    steps: list[tuple[int, int]]
    num_left: int

    @classmethod
    def of(cls, matmul: Matmul, shard: _Shard, out: np.ndarray) -> _Tree:
        """Of the shard's stripes."""
        steps, sums, height = [], list[int](), 0
        for stripe in range(shard.first_stripe, shard.first_stripe + shard.num_stripes):
            level, merges = len(sums), 0
            sums.append(stripe)
            while len(sums) > 1 and meet(sums[-2], sums[-1], shard.first_stripe, stripe + 1):
                sums.pop()
                merges += 1
            steps.append((level, merges))
            height = max(height, level)
        return cls(out, matmul.scratch((height, *out.shape)), steps, len(sums))

    @property
    def height(self) -> int:
        """How many sums there are at once."""
        return len(self.more) + 1

    def sums(
        self, parts: _Parts, clears: bool, merges: bool, overwrites: bool = True
    ) -> StripeSums:
        """The sums of parts, the first (`clears`) and the last (`merges`) of their stripes.

        `overwrites`: products may be written instead of added.
        """
        num_blocks, stripes = parts.h.widths.size, range(*parts.stripes)
        steps = np.zeros((len(stripes), num_blocks, NUM_STEP_NUMBERS), np.int64)
        is_full = (parts.counts == len(self.out)) & (parts.widths > 0)
        # Where all tokens chose one block there is nothing to add to.
        is_whole = is_full.reshape(len(stripes), num_blocks)
        for own, stripe, whole, counts in zip(
            steps, stripes, is_whole, parts.counts.reshape(is_whole.shape), strict=True
        ):
            own[:, LEVEL], last = self.steps[stripe][0], num_blocks - 1
            if overwrites and clears and merges and whole.any() and np.count_nonzero(counts) == 1:
                last = int(whole.argmax())
                own[last, IS_WHOLE] = 1
            elif clears:
                own[0, CLEARS] = 1
            if merges:
                own[last, MERGES] = self.steps[stripe][1]
        return StripeSums(self.out, self.more, steps.reshape(-1, NUM_STEP_NUMBERS))


def prompt_stripes(arrays: FfnArrays | TransposedArrays, layer: int) -> tuple[np.ndarray, int]:
    """Where a layer's stripes begin in each block and end (B, stripes + 1); the first's number.

    Of neurons' rows some neighbours are one stripe: each has more to multiply.
    """
    starts, every = arrays.starts[layer], arrays.stripes
    if isinstance(arrays, TransposedArrays):
        every = arrays.cuts
    if every.shape[2] == 0:  # of a shard without stripes
        return np.stack([np.zeros_like(starts[1:]), np.diff(starts)], axis=1), 0
    stripes = every[layer][:, :: arrays.stripes_at_once]
    return stripes - stripes[:, :1], arrays.first_stripe // arrays.stripes_at_once


def _empty_rows(matmul: Matmul, widths: np.ndarray, tokens: BlockTokens) -> ChoiceRows:
    """Space for widths[b] numbers for each choice of block b."""
    starts = row_starts(tokens, widths)
    return ChoiceRows(matmul.scratch((int(starts[-1]),)), starts)


class LayerPredictors(NamedTuple):
    """The predictors of one layer, of all of its neurons that a shard has."""

    of_model: ExpertPredictors
    layer: int

    def scores(
        self, matmul: Matmul, shard: _Shard, tokens: BlockTokens, x: np.ndarray
    ) -> ChoiceRows:
        """outer . relu(inner . x) of each choice's neurons, in blocks that have a predictor."""
        starts = self.of_model.inner_starts[self.layer]
        ranks, firsts = np.diff(starts), starts[:-1] - starts[0]
        inner = weight_blocks(self.of_model.inner[starts[0] : starts[-1]], firsts, ranks)
        hidden = _empty_rows(matmul, ranks, tokens)
        scores = _empty_rows(matmul, np.where(ranks > 0, shard.widths, 0), tokens)
        matmul.block_linears(x, tokens, [(inner, hidden)])
        matmul.then_rows(hidden.values.size, partial(_relu, hidden.values))
        for outer in layer_blocks(self.of_model.outer, self.layer):
            matmul.block_linears(hidden, tokens, [(outer, scores)])
        return scores


def _relu(values: np.ndarray, first: int, last: int) -> None:
    np.maximum(values[first:last], 0, out=values[first:last])


def _count_fired(shard: _Shard, h: ChoiceRows, counts: np.ndarray) -> None:
    ends = np.concatenate([[0], np.cumsum(shard.widths)])
    for (first, last), own in zip(pairwise(ends), pairwise(h.starts), strict=True):
        if first < last:
            rows = h.values[slice(*own)].reshape(-1, last - first)
            counts[first:last] += np.count_nonzero(rows, axis=0)


def _set_zero(out: np.ndarray, first: int, last: int) -> None:
    out[first:last] = 0


def _copy_rows(source: np.ndarray, target: np.ndarray, first: int, last: int) -> None:
    target[first:last] = source[first:last]


class _Rest(NamedTuple):
    """What is left to do once gates are activated.

    factors: space for products with up, or none where `h` is multiplied with them already
    """

    matmul: Matmul
    shard: _Shard
    x: np.ndarray
    factors: ChoiceRows

    @property
    def _scales(self) -> bool:
        return self.factors is not _NO_ROWS

    def add_by_choice(
        self, tokens: BlockTokens, h: ChoiceRows, is_few: np.ndarray, tree: _Tree
    ) -> None:
        """Add all choices up; neuron by neuron the parts where is_few (stripes, P) is set."""
        shard, is_few = self.shard, is_few.ravel()
        parts = _Parts.of(shard.ends, shard, tokens, h)
        adders: list[tuple[_Parts, Callable[[_Parts, _Tree, bool, bool], None]]] = []
        others = parts if not is_few.any() else parts.listed(~is_few)
        if others.tokens.ids.size:
            if self._scales and others is parts:  # a block's parts at once
                ends = np.stack([np.zeros_like(shard.widths), shard.widths], axis=1)
                self._scale(_Parts.of(ends, shard, tokens, h))
            elif self._scales:
                self._scale(others)
            if isinstance(shard.down, np.ndarray):
                adders.append((others, self._combine))
            else:
                adders += [(others, partial(self._multiply, down)) for down in shard.down]
        if is_few.any():
            adders.append((parts.listed(is_few), self._add_fired))
        if len(adders) == 1:
            own, add = adders[0]
            add(own, tree, True, True)
            return
        if not adders:
            for sums in (tree.out, *tree.more):
                self.matmul.then_rows(len(sums), partial(_set_zero, sums))
        for stripe in range(shard.num_stripes):
            for number, (own, add) in enumerate(adders):
                add(own.stripe(stripe), tree, number == 0, number == len(adders) - 1)

    def _scale(self, parts: _Parts) -> None:
        """Multiply what down rows are multiplied with by up products."""
        matmul, shard = self.matmul, self.shard
        starts = row_starts(parts.tokens, parts.widths)
        factors = ChoiceRows(self.factors.values[: starts[-1]], starts)
        matmul.block_linears(self.x, parts.tokens, [(shard.parts(shard.up, parts), factors)])
        scale = partial(
            scale_kernel, shard.function, shard.up_bias, parts.firsts, parts.tokens, factors,
            parts.h,
        )  # fmt: skip
        matmul.then_rows(parts.tokens.ids.size, scale)

    def _combine(self, parts: _Parts, tree: _Tree, clears: bool, merges: bool) -> None:
        """Add the sum over all neurons of each part, where down has a row for each."""
        down, sums = self.shard.down, tree.sums(parts, clears, merges)
        assert isinstance(down, np.ndarray)
        self.matmul.combine(parts.h, parts.tokens, self.shard.parts(down, parts), sums)

    def _multiply(
        self, down: WeightBlocks, parts: _Parts, tree: _Tree, clears: bool, merges: bool
    ) -> None:
        """Add the same, where down has a row for each output."""
        by_stripe = down.places.reshape(self.shard.widths.size, -1, NUM_PLACE_NUMBERS).swapaxes(
            0, 1
        )
        places = np.ascontiguousarray(by_stripe[slice(*parts.stripes)]).reshape(
            -1, NUM_PLACE_NUMBERS
        )
        products = WeightBlocks(down.array, places), tree.sums(parts, clears, merges)
        self.matmul.block_linears(parts.h, parts.tokens, [products])

    def _add_fired(self, parts: _Parts, tree: _Tree, clears: bool, merges: bool) -> None:
        """Add the sum over the neurons of each part that fire."""
        matmul, shard, down = self.matmul, self.shard, self.shard.down
        assert isinstance(down, np.ndarray)
        num_threads, num_tokens, tokens = matmul.num_threads, len(tree.out), parts.tokens
        num_columns, num_shares = num_parts(tree.out.shape[1]), num_threads * MOST_CUTS
        fired = empty_fired(tokens, parts.firsts, parts.widths, matmul.scratch)
        shares = run_shares(tokens, fired, num_shares)
        vectors = matmul.vectors(self.x, shard.up) if self._scales else self.x
        out = tree.sums(parts, clears, merges, overwrites=False)
        steps, height = out.steps, tree.height
        if clears and merges:
            left = np.zeros((tree.num_left, NUM_STEP_NUMBERS), np.int64)
            left[:, LEVEL], left[:, CLEARS] = np.arange(tree.num_left), 1
        else:  # one stripe, whose sum is added to what is there
            left, steps = steps.max(axis=0, keepdims=True), np.zeros_like(steps)
            steps[0, CLEARS], height = 1, 1
        sums = matmul.scratch((num_threads, height, num_tokens, PART_COLUMNS))

        def scale(thread: int, part: int, count: int) -> None:
            first, last = shares[[part * num_shares // count, (part + 1) * num_shares // count]]
            list_fired(parts.h, parts.firsts, tokens, first, last, fired)
            if self._scales:
                prompt_up_kernel(shard.up, shard.up_bias, vectors, tokens, first, last, fired)

        def add(thread: int, part: int, count: int) -> None:
            share = split_range(num_columns * num_tokens, part, count, 1)
            prompt_down_kernel(down, tokens, fired, steps, left, *share, sums[thread], out)

        num_products = int(parts.counts @ parts.widths * matmul.few(down) / 2) * tree.out.shape[1]
        matmul.then(Shared(num_threads, num_products, scale))
        # Columns that are cut by tokens are read twice.
        matmul.then(Shared(num_threads, num_products, add, num_columns // num_threads))
