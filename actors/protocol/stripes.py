"""Stripes of neurons: which services have which, so that sums have one order whatever they have.

See `hotcold.numba_kernels.decode.stripes`. Neuron n of a block is in stripe n modulo their number:
neighbours in the checkpoint may fire alike, so no thread should get a run of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.weights.down_outputs import UNIT
from hotcold.numba_kernels.decode.stripes import ALL_STRIPES, OF_BIASES, first_stripes, meet
from hotcold.numba_kernels.ffn_arrays import ShardStripes
from hotcold.numba_kernels.formats import DTYPES, Q8, QUANT_GROUP, ROW_FORMATS

if TYPE_CHECKING:
    from hotcold.actors.protocol.messages import ServicePart

_FEWEST_STRIPES, _MOST_STRIPES = 8, 32  # as many threads as that can share the work
_NEURONS_A_STRIPE = 384  # or more, of those that a token computes: else sums of batches take long
# Services have whole shares of the stripes, each of which is multiplied as one in prompts: of fewer
# neurons that takes longer.
_FEWEST_SHARES, _MOST_SHARES, _NEURONS_A_SHARE = 4, 8, 1024
# Where down rows are an output each, a block is cut in pieces of so many neurons or more.
_OUTPUT_STRIPES, _NEURONS_A_PIECE = 8, 2400
_GROUPWISE = {dtype for dtype, row in ROW_FORMATS.items() if row.block_groups == 1} - {Q8}


class Stripes(NamedTuple):
    """A service's stripes first..end-1 of the model's `total`, a power of two.

    Where down rows are an output each, blocks have so many `pieces` or more, cut at multiples of
    `unit` neurons.
    """

    first: int
    end: int
    total: int
    pieces: int = 1
    unit: int = UNIT


def num_stripes(config: ModelConfig) -> int:
    """How many stripes a model's neurons have: a function of the model alone."""
    most = _FEWEST_STRIPES
    for layer in config.layers:
        sizes = sorted(layer.ffn.block_sizes, reverse=True)
        router = layer.ffn.router
        chosen = sizes if router is None else sizes[: router.num_chosen]
        most = max(most, sum(chosen) // _NEURONS_A_STRIPE)
    return min(_MOST_STRIPES, 1 << most.bit_length() - 1)


def num_shares(config: ModelConfig) -> int:
    """Into how many shares services can divide the stripes: a function of the model alone."""
    smallest = min(size for layer in config.layers for size in layer.ffn.block_sizes)
    return _power_of_two(smallest // _NEURONS_A_SHARE, _FEWEST_SHARES, _MOST_SHARES)


def num_output_stripes(config: ModelConfig) -> int:
    """How many stripes neurons have where down rows are an output each: as `num_stripes`."""
    sizes = [layer.ffn.block_sizes for layer in config.layers]
    if any(len(of_layer) > 1 for of_layer in sizes):
        return _OUTPUT_STRIPES
    return min(_num_pieces(size) for (size,) in sizes)


def _num_pieces(size: int) -> int:
    return _power_of_two(size // _NEURONS_A_PIECE, 1, _OUTPUT_STRIPES)


def _power_of_two(number: int, least: int, most: int) -> int:
    """The largest power of two up to `number` that is within least..most."""
    return min(most, max(least, 1 << max(1, number).bit_length() - 1))


def output_stripes(
    config: ModelConfig, threads: Sequence[int], expert_pieces: int = 1
) -> list[Stripes]:
    """Each service's stripes, in proportion to its threads, of down rows that are an output each.

    `expert_pieces`: of `SystemConfig`. Experts are cut evenly where all formats have blocks of a
    group each; what is 8 bits here may be larger blocks in its file.
    """
    pieces, unit = 1, UNIT
    if config.experts is not None and expert_pieces > 1:
        formats = {DTYPES[down] for of_layer in config.block_formats for *_, down in of_layer}
        pieces, unit = expert_pieces, QUANT_GROUP if formats and formats <= _GROUPWISE else UNIT
    shares = share_stripes(num_output_stripes(config), threads)
    return [own._replace(pieces=pieces, unit=unit) for own in shares]


def share_stripes(total: int, weights: Sequence[int], at_once: int = 1) -> list[Stripes]:
    """Each service's stripes, in proportion to `weights`, whole multiples of `at_once`.

    Services beyond the number of these have none.
    """
    ends = np.rint(np.cumsum(weights) / sum(weights) * total / at_once).astype(int) * at_once
    return [
        Stripes(int(first), int(end), total) for first, end in zip([0, *ends], ends, strict=False)
    ]


def stripes_of(ids: np.ndarray, block_sizes: Sequence[int], total: int) -> np.ndarray:
    """The stripe of each neuron, of a layer's ids. Shapes: ids, result (N,)."""
    starts = np.append(0, np.cumsum(block_sizes))
    places: np.ndarray = ids - starts[np.searchsorted(starts, ids, side="right") - 1]
    return places % total


def in_loading_order(ids: np.ndarray, block_sizes: Sequence[int], stripes: Stripes) -> np.ndarray:
    """Those of a layer's `ids` that are in these stripes: by block, by stripe, ascending; int32."""
    ids = np.sort(ids)
    stripe = stripes_of(ids, block_sizes, stripes.total)
    own = (stripe >= stripes.first) & (stripe < stripes.end)
    ids, stripe = ids[own], stripe[own]
    blocks = np.searchsorted(np.cumsum(block_sizes), ids, side="right")
    return ids[np.lexsort((ids, stripe, blocks))].astype(np.int32)


def output_run(size: int, block: int, stripe: int, stripes: Stripes) -> tuple[int, int]:
    """First neuron and end of a stripe of a block of `size`, where down rows are an output each.

    A block is in some stripes, equally far apart: its pieces are runs cut at multiples of
    `stripes.unit`. The next block begins in the next stripe.
    """
    total, unit = stripes.total, stripes.unit
    pieces = min(max(stripes.pieces, _num_pieces(size)), total)
    units, turn = -(-size // unit), (stripe - block) % total
    piece, rest = divmod(turn, total // pieces)
    if rest:
        return 0, 0
    first, end = (min(units * place // pieces * unit, size) for place in (piece, piece + 1))
    return first, end


def runs_of_stripes(config: ModelConfig, stripes: Stripes | None) -> np.ndarray | None:
    """`output_run` of each layer's blocks, of each of the stripes: (L, B, stripes, 2) int64."""
    if stripes is None:
        return None
    blocks = [layer.ffn.block_sizes for layer in config.layers]
    own = range(stripes.first, stripes.end)
    found = np.zeros((len(blocks), max(map(len, blocks)), len(own), 2), np.int64)
    for layer, sizes in enumerate(blocks):
        for block, size in enumerate(sizes):
            for place, stripe in enumerate(own):
                found[layer, block, place] = output_run(size, block, stripe, stripes)
    return found


def output_shard(config: ModelConfig, stripes: Stripes) -> list[np.ndarray]:
    """A service's neurons of each layer in loading order, where down rows are an output each."""
    runs = runs_of_stripes(config, stripes)
    assert runs is not None
    found = []
    for layer, of_layer in zip(config.layers, runs, strict=True):
        begins = np.concatenate([[0], np.cumsum(layer.ffn.block_sizes)])
        ids = [
            np.arange(first + begin, end + begin, dtype=np.int32)
            for begin, of_block in zip(begins, of_layer, strict=False)
            for first, end in of_block
        ]
        found.append(np.concatenate([np.zeros(0, np.int32), *ids]))
    return found


def every_stripe(
    config: ModelConfig, neuron_ids: Sequence[np.ndarray]
) -> tuple[Stripes, list[np.ndarray]]:
    """All stripes, and a service's ids of each layer in loading order, some of each stripe."""
    stripes = Stripes(0, num_stripes(config), num_stripes(config))
    layers = zip(neuron_ids, config.layers, strict=True)
    return stripes, [in_loading_order(ids, layer.ffn.block_sizes, stripes) for ids, layer in layers]


def shard_stripes(
    starts: np.ndarray,
    neuron_ids: np.ndarray,
    config: ModelConfig,
    stripes: Stripes | None,
    of_outputs: bool = False,
) -> ShardStripes:
    """Where a shard's stripes begin in each block, and end.

    `of_outputs`: of stripes of down rows that are an output each, as `TransposedArrays` has them.
    Shapes:  starts (L, B + 1): of `FfnWeights`, neuron_ids its (N,); stripes (L, B, stripes + 1)
    Errors:  ValueError unless each block's neurons come stripe after stripe, and are in these
             stripes
    """
    if stripes is None:
        return ShardStripes()
    if of_outputs:
        runs = runs_of_stripes(config, stripes)
        assert runs is not None
        ends = np.zeros((*runs.shape[:2], runs.shape[2] + 1), np.int64)
        ends[:, :, 1:] = np.cumsum(np.diff(runs, axis=3)[..., 0], axis=2)
        ends += starts[:, :-1, None]
        if (ends[:, :, -1] != starts[:, 1:]).any():
            raise ValueError(f"neurons of other stripes than {stripes}")
        return ShardStripes(ends, stripes.first)
    num_blocks, count = starts.shape[1] - 1, stripes.end - stripes.first
    found = np.zeros((len(starts), num_blocks, count + 1), np.int64)
    for layer, spec in enumerate(config.layers):
        first, last = int(starts[layer, 0]), int(starts[layer, -1])
        own = (
            stripes_of(neuron_ids[first:last], spec.ffn.block_sizes, stripes.total) - stripes.first
        )
        blocks = np.repeat(np.arange(num_blocks), np.diff(starts[layer]))
        if own.size and (own.min() < 0 or own.max() >= count):
            raise ValueError(f"layer {layer} has neurons of other stripes than {stripes}")
        if (np.diff(blocks * count + own) < 0).any():
            raise ValueError(f"the neurons of layer {layer} do not come stripe after stripe")
        sizes = np.bincount(blocks * count + own, minlength=num_blocks * count)
        found[layer, :, 1:] = np.cumsum(sizes.reshape(num_blocks, count), axis=1)
        found[layer] += starts[layer, :-1, None]
    return ShardStripes(found, stripes.first, max(1, stripes.total // num_shares(config)))


def num_outputs(services: Sequence[Stripes], has_bias: bool) -> int:
    """How many sums a service passes on at most, with that of the biases; 1 where one has all."""
    if len(services) == 1:
        return 1
    return has_bias + max(len(first_stripes(stripes.first, stripes.end)) for stripes in services)


def most_outputs(total: int, has_bias: bool) -> int:
    """`num_outputs` of several services, whatever shares they have of `total`."""
    return has_bias + max(1, 2 * (total.bit_length() - 2))


def sums_of_services(parts: Sequence[ServicePart], has_bias: bool) -> np.ndarray:
    """What several CPU services pass on: (n, 3) int64, of each service, output, and first stripe.

    In the order of stripes; nothing where one service has all.
    """
    found = []
    own = {s: part for s, part in enumerate(parts) if part.is_cpu_service and part.stripes}
    for service, part in own.items() if len(own) > 1 else ():
        assert part.stripes is not None
        stripes = first_stripes(part.stripes.first, part.stripes.end).tolist()
        found += [(service, output, stripe) for output, stripe in enumerate(stripes)]
        if has_bias and part.has_down_bias:  # never the first output
            found.append((service, max(1, len(stripes)), OF_BIASES))
    sums: np.ndarray = np.array(sorted(found, key=lambda each: each[2]), np.int64).reshape(-1, 3)
    return sums


ADD = -1  # a step of `sum_order`
MOST_KEPT = 15  # outputs, beside a GPU's own one: MOST_KEPT of cuda_kernels/csrc/share.cu


def sum_order(parts: Sequence[ServicePart], sums: np.ndarray, num_outputs: int) -> np.ndarray:
    """How the CPU services' partial outputs are added up: int32 words, of any number.

    The services: their number, then each; the steps: their number, then each: an output that is
    pushed, or ADD, which adds the last one to that before it. What is left is added in order.
    Output o of service s is s where o is 0, else len(parts) + s * (num_outputs - 1) + o - 1.
    `sums` as in `LayerFacts`; the order is that of `output_sums.add_sums`.
    """
    services = [s for s, part in enumerate(parts) if part.is_cpu_service]
    steps, kept = [] if len(sums) else list(services), list[int]()
    for service, output, stripe in sums.tolist():
        steps += [ADD] * _num_met(kept, stripe)
        more = len(parts) + service * (num_outputs - 1) + output - 1
        steps.append(more if output else service)
        kept.append(stripe)
    steps += [ADD] * _num_met(kept, ALL_STRIPES)
    return np.array([len(services), *services, len(steps), *steps], np.int32)


def num_kept(order: np.ndarray) -> int:
    """How many outputs at most wait for others while the steps of `sum_order` are done."""
    steps = order[2 + order[0] :]
    return int(np.where(steps == ADD, -1, 1).cumsum().max(initial=0))


def _num_met(kept: list[int], stripe: int) -> int:
    """How many sums that are `kept` go into those before them when `stripe` comes; they go."""
    before = len(kept)
    while len(kept) > 1 and meet.py_func(kept[-2], kept[-1], 0, stripe):
        kept.pop()
    return before - len(kept)
