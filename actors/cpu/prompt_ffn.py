"""The FFN of many tokens (prefill): a matmul of the gates, then what fired neurons add.

Tokens are multiplied with the blocks of neurons that they chose; a choice is a token and one of its
blocks. For choices for which few neurons fire, up and down are computed only for those; for the
others they are matmuls too. Each choice's own neurons decide, so a token's result does not depend
on its batch-mates. A token's choices are added in the order of blocks, matmuls before the others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hotcold.actors.cpu.kernel_matmul import Rows
from hotcold.actors.cpu.matmul import Matmul
from hotcold.actors.cpu.thread_team import MOST_CUTS, Shared
from hotcold.numba_kernels.checks import ACTIVATES_UP
from hotcold.numba_kernels.decode.activations import Activation
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.decode.selection import NO_WEIGHTS
from hotcold.numba_kernels.ffn_arrays import ExpertPredictors, FfnArrays, TransposedArrays
from hotcold.numba_kernels.formats import CHUNK, row_items
from hotcold.numba_kernels.ir.operands import PART_COLUMNS
from hotcold.numba_kernels.prompt.block_tokens import (
    BlockTokens,
    ChoiceRows,
    WeightBlocks,
    choices,
    every_token,
    layer_blocks,
    listed,
    one_block,
    row_starts,
    rows_of_block,
    token_rows,
    weight_blocks,
)
from hotcold.numba_kernels.prompt.prompt_ffn import (
    activate_kernel,
    add_bias_kernel,
    copy_kernel,
    empty_fired,
    list_fired,
    num_parts,
    prompt_down_kernel,
    prompt_up_kernel,
    run_shares,
    scale_kernel,
)

# Up to this share of a choice's neurons that fire, one by one is faster than a matmul over all
# (docs/lab_log.md).
_FEW = 0.18
_NO_ROWS = ChoiceRows(np.empty(0, np.float32), np.zeros(1, np.int64))


def prompt_ffn(
    matmul: Matmul,
    arrays: FfnArrays | TransposedArrays,
    layer: int,
    x: np.ndarray,
    function: Activation,
    out: np.ndarray,
    *,
    skip_silent: bool,
    counts: np.ndarray | None = None,
    await_up_down: Callable[[], None] = lambda: None,
    block_weights: np.ndarray = NO_WEIGHTS,
    predictors: LayerPredictors | None = None,
    firsts: np.ndarray | None = None,
) -> None:
    """out = the partial FFN output of layer `layer`'s shard for all tokens.

    `skip_silent` allows to leave out neurons whose activation is zero; thresholds do not apply to
    so many tokens, which together want nearly all. Where `counts` is given, counts[n] += number of
    tokens for which neuron n's activation is not 0; with drelu also its up product. `await_up_down`
    returns once up and down rows are loaded. Gate rows always are, and are multiplied before that
    where gate and up need not be multiplied together. `block_weights` as in `Selection`: a block is
    multiplied with the tokens for which its weight is not zero. firsts (B,): where the layer's
    blocks begin in rows and biases that are no layer's own, but in slots. `predictors` say which
    neurons of their blocks count.
    Shapes:  x, out (T, d) float32; counts (N of the layer's shard,) int64; block_weights (T, B)
    """
    matmul.begin_layer()
    shard = _Shard.of(arrays, layer, function, firsts)
    tokens, weights = choices(shard.widths, len(x), block_weights)
    h, factors = (_empty_rows(matmul, shard.widths, tokens) for _ in range(2))
    num_fired = np.empty(tokens.ids.size, np.int64)
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
            tokens, scores, at_once, h, num_fired,
        )  # fmt: skip
        matmul.then_rows(tokens.ids.size, activate)
        if waits:
            matmul.run()
            if not scales_at_once:
                await_up_down()
        if counts is not None:
            _count_fired(shard, tokens, h, counts)
        rest = _Rest(matmul, shard, x, factors if is_gated and not scales_at_once else _NO_ROWS)
        is_few = np.zeros(tokens.ids.size, bool)
        if skip_silent and isinstance(arrays, FfnArrays):
            widths = np.repeat(shard.widths, np.diff(tokens.starts))
            is_few = num_fired <= _FEW * widths
        rest.add_by_choice(tokens, h, is_few, out, block_weights.size > 0)
        if arrays.down_bias.shape[2]:
            add_bias = partial(add_bias_kernel, block_weights, arrays.down_bias[layer], out)
            matmul.then_rows(len(out), add_bias)


def compile_prompt_ffn(arrays: FfnArrays | TransposedArrays, function: Activation) -> None:
    """Compile what `prompt_ffn` calls beside `Matmul`'s own, so that no prompt waits for it.

    With a matmul of its own: a prompt may be computed by the service's meanwhile.
    """
    with closing(Matmul(1, ())) as matmul:
        _compile(matmul, arrays, function)


def _compile(matmul: Matmul, arrays: FfnArrays | TransposedArrays, function: Activation) -> None:
    nothing, ends = np.empty(0, np.float32), np.zeros(2, np.int64)
    tokens, rows = every_token(0), ChoiceRows(nothing, ends)
    biases = arrays.gate_bias[:0], arrays.up_bias[:0]
    num_fired = np.empty(0, np.int64)
    activate_kernel(function, nothing, *biases, ends, tokens, rows, rows, rows, num_fired, 0, 0)
    scale_kernel(function, biases[1], ends, tokens, rows, rows, 0, 0)
    no_tokens = np.empty((0, 0), np.float32)
    add_bias_kernel(NO_WEIGHTS, arrays.down_bias[0], no_tokens, 0, 0)
    outs: list[Rows] = [one_block(np.empty((1, CHUNK), np.float32))]
    if arrays.starts.shape[1] > 2:
        outs.append(np.empty((1, CHUNK), np.float32))
    if isinstance(arrays, FfnArrays):
        copy_kernel(tokens, rows, num_fired, tokens, rows, 0, 0)
        fired = empty_fired(tokens, ends[:1], ends[:1])
        list_fired(rows, ends, tokens, 0, 0, fired)
        if arrays.up.shape[0]:
            vectors = matmul.vectors(np.empty((0, CHUNK), np.float32), arrays.up)
            prompt_up_kernel(arrays.up, arrays.up_bias, vectors, tokens, 0, 0, fired)
        sums, out = np.empty((0, 0, 0), np.float32), np.empty((1, 0), np.float32)
        prompt_down_kernel(arrays.down, tokens, fired, 0, 0, sums, out)
        row = np.zeros((1, row_items(arrays.down.dtype, CHUNK)), arrays.down.dtype)
        h = one_block(np.zeros((1, 1), np.float32))
        with matmul.at_once():
            for target in outs:
                matmul.combine(h, every_token(1), weight_blocks(row), target)
        return
    for dtype in {array.dtype for array in (arrays.down.first, arrays.down.second)}:
        row = np.zeros((1, row_items(dtype, CHUNK)), dtype)
        h = one_block(np.zeros((1, CHUNK), np.float32))
        with matmul.at_once():
            for target in outs:
                matmul.block_linears(h, every_token(1), [(weight_blocks(row), target)])


class _Shard(NamedTuple):
    """A layer's rows of a shard; block b's are widths[b] from firsts[b] on.

    down: for each format, and whether they are a row an output
    """

    function: Activation
    firsts: np.ndarray
    widths: np.ndarray
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
            part(arrays.gate),
            part(arrays.up),
            part(arrays.gate_bias),
            part(arrays.up_bias),
            part(down) if isinstance(down, np.ndarray) else layer_blocks(down, layer),
        )

    def blocks(self, rows: np.ndarray) -> WeightBlocks:
        """Rows of all neurons, or none, by block."""
        return weight_blocks(rows, self.firsts, self.widths * (len(rows) > 0))


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


def _count_fired(shard: _Shard, tokens: BlockTokens, h: ChoiceRows, counts: np.ndarray) -> None:
    ends = np.concatenate([[0], np.cumsum(shard.widths)])
    for block, (first, last) in enumerate(pairwise(ends)):
        if len(rows := rows_of_block(h, tokens, block)[0]):
            counts[first:last] += np.count_nonzero(rows, axis=0)


def _set_zero(out: np.ndarray, first: int, last: int) -> None:
    out[first:last] = 0


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
        self,
        tokens: BlockTokens,
        h: ChoiceRows,
        is_few: np.ndarray,
        out: np.ndarray,
        has_weights: bool,
    ) -> None:
        """out = the sum of all choices; for those of which `is_few` is set neuron by neuron."""
        num_few = np.count_nonzero(is_few)
        if num_few == 0 and not has_weights and tokens.ids.size == len(out):  # one block
            self._add_all(tokens, h, token_rows(tokens, out))
            return
        self.matmul.then_rows(len(out), partial(_set_zero, out))
        if num_few == 0:
            self._add_all(tokens, h, out)
        elif num_few == is_few.size:
            self._add_fired(tokens, h, out)
        else:
            for add, which in ((self._add_all, ~is_few), (self._add_fired, is_few)):
                own = listed(tokens, which)
                own_h = _empty_rows(self.matmul, self.shard.widths, own)
                from_rows = np.flatnonzero(which)
                copy = partial(copy_kernel, tokens, h, from_rows, own, own_h)
                self.matmul.then_rows(own.ids.size, copy)
                add(own, own_h, out)

    def _add_all(self, tokens: BlockTokens, h: ChoiceRows, out: Rows) -> None:
        """Add the sum over all neurons of each choice, once it has been run."""
        matmul, shard = self.matmul, self.shard
        if self._scales:
            starts = row_starts(tokens, shard.widths)
            factors = ChoiceRows(self.factors.values[: starts[-1]], starts)
            matmul.block_linears(self.x, tokens, [(shard.blocks(shard.up), factors)])
            scale = partial(
                scale_kernel, shard.function, shard.up_bias, shard.firsts, tokens, factors, h
            )
            matmul.then_rows(tokens.ids.size, scale)
        if isinstance(shard.down, np.ndarray):
            matmul.combine(h, tokens, shard.blocks(shard.down), out)
            return
        for down in shard.down:
            matmul.block_linears(h, tokens, [(down, out)])

    def _add_fired(self, tokens: BlockTokens, h: ChoiceRows, out: np.ndarray) -> None:
        """Add the sum over the neurons that fire for each choice, once it has been run."""
        matmul, shard, down = self.matmul, self.shard, self.shard.down
        assert isinstance(down, np.ndarray)
        num_shares = matmul.num_threads * MOST_CUTS
        fired = empty_fired(tokens, shard.firsts, shard.widths, matmul.scratch)
        shares = run_shares(tokens, fired, num_shares)
        vectors = matmul.vectors(self.x, shard.up) if self._scales else self.x
        sums = matmul.scratch((num_parts(out.shape[1]), len(out), PART_COLUMNS))

        def scale(thread: int, part: int, count: int) -> None:
            first, last = shares[[part * num_shares // count, (part + 1) * num_shares // count]]
            list_fired(h, shard.firsts, tokens, first, last, fired)
            if self._scales:
                prompt_up_kernel(shard.up, shard.up_bias, vectors, tokens, first, last, fired)

        def add(thread: int, part: int, count: int) -> None:
            parts = split_range(num_parts(out.shape[1]) * len(out), part, count, 1)
            prompt_down_kernel(down, tokens, fired, *parts, sums, out)

        num_products = int(np.diff(tokens.starts) @ shard.widths * _FEW / 2) * out.shape[1]
        # A part of the columns that is cut by tokens is read twice.
        most = num_parts(out.shape[1]) // matmul.num_threads
        matmul.then(Shared(matmul.num_threads, num_products, scale))
        matmul.then(Shared(matmul.num_threads, num_products, add, most))
