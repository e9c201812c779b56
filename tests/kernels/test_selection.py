"""Selections drawn at random over every source of rows: float64, batch-mates, what is not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.cpu.neuron_store import NeuronStore
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.offloaded_neurons import OffloadedShare
from hotcold.model.bundles.bundle_file import read_bundle_file
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.bundles.pack import write_bundles
from hotcold.model.config.build import read_config
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.ffn import load_ffn
from hotcold.numba_kernels.decode.activations import ALL_FIRE, Thresholds, activation, not_zero
from hotcold.numba_kernels.decode.selection import EVERYTHING, Selection
from hotcold.numba_kernels.ffn.in_memory import new_scratch
from hotcold.numba_kernels.ffn.serve_ffn import NeuronBuckets, ffn_request
from hotcold.numba_kernels.ffn_arrays import FfnArrays, most_rows, starts_of
from hotcold.numba_kernels.load.convert import row_lengths
from hotcold.numba_kernels.serve.mailbox import (
    ALL_NEURONS,
    FFN,
    GATE_THRESHOLD,
    LAST_FIRED,
    LAST_GATES,
    LAYER,
    NUM_BUCKETS,
    NUM_COMPUTED,
    NUM_IDS,
    NUM_TOKENS,
    OPERATION,
    PRODUCT_THRESHOLD,
    WATCHED,
    WEIGHS_BLOCKS,
    threshold_words,
)
from tests.conftest import TinyCheckpoint
from tests.kernels import reference
from tests.kernels.arrays import BITS, random_bits, random_floats
from tests.kernels.numba_calls import fired_ids
from tests.kernels.quantized_rows import random_rows
from tests.kernels.selections import (
    KINDS,
    factors,
    random_selection,
    selected_ffn,
    starts_of_blocks,
)
from tests.kernels.sources import Source, alone, in_memory, listed, transposed

pytestmark = pytest.mark.sweep(source=["f32", "transposed f32", "offloaded"])

LAYERS, NEURONS, WIDTH = 2, 416, 96
NUMBERS = 1, 2, 7, 32  # of tokens
ACTIVATIONS = "relu", "silu", "drelu"
SOURCES = [*BITS, "q8", *(f"transposed {kind}" for kind in BITS), "offloaded"]
Tiny = Callable[..., TinyCheckpoint]


def arrays_of(kind: str, num_blocks: int, has_up: bool = True, has_bias: bool = True) -> FfnArrays:
    """Random neurons of two layers, each in blocks of its own sizes."""
    rng = np.random.default_rng(num_blocks)
    cuts = [starts_of_blocks(rng, NEURONS, num_blocks) for _ in range(LAYERS)]
    total = LAYERS * NEURONS

    def rows(seed: int) -> np.ndarray:
        if kind in BITS:
            return random_bits(seed, BITS[kind], total, WIDTH)
        return random_rows(seed, kind, total, WIDTH).rows

    def biases(*shape: int) -> np.ndarray:
        return random_floats(9, *shape) if has_bias else np.empty((*shape[:-1], 0), np.float32)

    gate, down = rows(1), rows(3)
    none = np.empty(0, np.float32)
    return FfnArrays(
        starts_of(np.diff(cuts, axis=1)),
        gate,
        rows(2) if has_up else gate[:0],
        down,
        biases(total) if has_bias else none,
        biases(total) if has_bias and has_up else none,
        biases(LAYERS, num_blocks, WIDTH),
        row_lengths(down),
    )


@cache
def weights_of(source: str, num_blocks: int) -> FfnArrays:
    return arrays_of(source.split()[-1], num_blocks, has_up=num_blocks != 3)


@pytest.fixture
def offloaded(tiny: Tiny) -> Iterator[Callable[..., tuple[FfnArrays, Source]]]:
    """make(num_blocks): a model's neurons in memory and offloaded, with few slots."""
    path: Path = tiny("opt-postnorm").path
    config, checkpoint = read_config(path), Checkpoint(path)
    geometry, stores = BundleGeometry.of(config), []

    def make(num_blocks: int, more_gates: int = 0) -> tuple[FfnArrays, Source]:
        ids = [np.arange(config.ffn_size, dtype=np.int32)] * config.num_layers
        weights = load_ffn(checkpoint, config, ids, include_down_bias=True)
        rng = np.random.default_rng(num_blocks)
        cuts = [starts_of_blocks(rng, config.ffn_size, num_blocks) for _ in ids]
        weights.starts = starts_of(np.diff(cuts, axis=1))
        weights.down_bias = random_floats(7, len(ids), num_blocks, config.hidden_size)
        order = np.stack([rng.permutation(config.ffn_size) for _ in ids]).astype(np.int32)
        file = read_bundle_file(
            write_bundles(path, config, order, "drawn", ""), geometry, ModelIdentity.of(path)
        )
        share = OffloadedShare(config.ffn_size + more_gates, config.ffn_size + 5)
        stores.append(NeuronStore(file, weights, share, 3, has_down_norms=True))
        arrays = FfnArrays(
            weights.starts, weights.gate, weights.up, weights.down, weights.gate_bias,
            weights.up_bias, weights.down_bias, stores[-1].arrays.down_norms,
        )  # fmt: skip
        return arrays, Source(stores[-1].stored, weights.starts, config.hidden_size)

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def make(
    offloaded: Callable[..., tuple[FfnArrays, Source]],
) -> Callable[..., tuple[FfnArrays, Source]]:
    """make(source, num_blocks): a source by name, and its neurons by rows in memory."""

    def made(source: str, num_blocks: int) -> tuple[FfnArrays, Source]:
        if source == "offloaded":
            return offloaded(num_blocks, num_blocks % 2 * 1000)
        arrays = weights_of(source, num_blocks)
        over = transposed if "transposed" in source else in_memory
        return arrays, over(arrays, WIDTH)

    return made


def layer_of(arrays: FfnArrays, layer: int) -> tuple[dict[str, Any], np.ndarray]:
    """A layer's weights as `selected_ffn` names them, and its blocks' starts from 0."""
    part = slice(arrays.starts[layer, 0], arrays.starts[layer, -1])

    def own(array: np.ndarray) -> np.ndarray | None:
        return array[part] if array.size else None

    biases = arrays.down_bias[layer]
    named = {
        "gate": own(arrays.gate),
        "up": own(arrays.up),
        "down": own(arrays.down),
        "gate_bias": own(arrays.gate_bias),
        "up_bias": own(arrays.up_bias),
        "down_biases": biases if biases.size else None,
    }
    return named, arrays.starts[layer] - arrays.starts[layer, 0]


def sizes_of(x: np.ndarray, named: dict[str, Any], chosen: np.ndarray) -> np.ndarray:
    """What rounding is relative to: sums of absolute values of all that is added up."""

    def size(matrix: str, bias: str) -> np.ndarray | float:
        weights = named[matrix]
        if weights is None:
            return 1.0
        shift = named[bias]
        found = np.abs(x) @ np.abs(reference.widened(weights)).T
        return found + np.abs(0 if shift is None else shift)

    h = size("gate", "gate_bias") * size("up", "up_bias") * np.abs(chosen)
    assert named["down"] is not None
    biases = 0 if named["down_biases"] is None else np.abs(named["down_biases"]).sum(axis=0)
    found: np.ndarray = h @ np.abs(reference.widened(named["down"])) + 2 * biases
    return found


@pytest.mark.parametrize("source", [name for name in SOURCES if name != "q8"])
@pytest.mark.parametrize("num_blocks", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_the_neurons_selected_with_their_weights(
    make: Callable[..., tuple[FfnArrays, Source]], source: str, num_blocks: int, kind: str
) -> None:
    arrays, over = make(source, num_blocks)
    rng = np.random.default_rng(len(kind) + num_blocks)
    for turn, num_tokens in enumerate(NUMBERS):
        layer, name = turn % len(arrays.starts), ACTIVATIONS[turn % 3]
        named, starts = layer_of(arrays, layer)
        x = random_floats(turn, num_tokens, over.width)
        selection = random_selection(rng, kind, starts, num_tokens)
        expected = selected_ffn(x, **named, selection=selection, starts=starts, activation_fn=name)
        limits = 4e-6 * sizes_of(x, named, factors(selection, starts, num_tokens))
        for thresholds in (ALL_FIRE, not_zero(name)):
            for num_threads in (1, 3):
                found, _ = over.ffn(layer, x, selection, thresholds, name, num_threads)
                assert (np.abs(found - expected) <= limits).all()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("thresholds", [ALL_FIRE, Thresholds(np.float32(0.5), np.float32(9))])
def test_bits_alone_and_with_batch_mates(
    make: Callable[..., tuple[FfnArrays, Source]], source: str, kind: str, thresholds: Thresholds
) -> None:
    """Of three threads, each token's row is that of its own request, listed or not."""
    arrays, over = make(source, 8)
    rng = np.random.default_rng(len(kind))
    for layer, num_tokens in enumerate((7, 32)):
        starts = arrays.starts[layer] - arrays.starts[layer, 0]
        x = random_floats(layer, num_tokens, over.width)
        selection = random_selection(rng, kind, starts, num_tokens)
        together, _ = over.ffn(layer, x, selection, thresholds, "silu", 3)
        for t in range(0, num_tokens, 1 if num_tokens < 8 else 5):
            own = alone(selection, t)
            for chosen in (own, listed(own, starts)):
                found, _ = over.ffn(layer, x[t : t + 1], chosen, thresholds, "silu", 3)
                np.testing.assert_array_equal(found[0], together[t])


@pytest.mark.parametrize("source", ["f32", "offloaded"])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_one_source_has_the_bits_of_another(
    make: Callable[..., tuple[FfnArrays, Source]], source: str, num_tokens: int
) -> None:
    """Offloaded neurons those in memory; blocks that are all chosen, with one weight, one block."""
    arrays, over = make(source, 8)
    whole = Source(arrays, arrays.starts, over.width)
    rng = np.random.default_rng(1)
    for kind in KINDS:
        starts = arrays.starts[1] - arrays.starts[1, 0]
        x = random_floats(5, num_tokens, over.width)
        selection = random_selection(rng, kind, starts, num_tokens)
        for thresholds in (ALL_FIRE, Thresholds(np.float32(0.2), np.float32(0.5))):
            found, counted = over.ffn(1, x, selection, thresholds, "silu", 2)
            expected, wanted = whole.ffn(1, x, selection, thresholds, "silu", 2)
            np.testing.assert_array_equal(found, expected)
            assert fired_ids(counted).tolist() == fired_ids(wanted).tolist()
            assert counted.up_counts.tolist() == wanted.up_counts.tolist()


@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("kind", ["blocks", "masked ids of blocks"])
def test_what_is_not_selected_is_not_read(kind: str, num_tokens: int) -> None:
    """Its rows hold NaN, which would show in any sum."""
    arrays = weights_of("f32", 8)
    starts = arrays.starts[1] - arrays.starts[1, 0]
    selection = random_selection(np.random.default_rng(4), kind, starts, num_tokens)
    selection.block_weights[:, np.diff(starts).argmax()] = 0
    left_out = np.flatnonzero(~factors(selection, starts, num_tokens).any(axis=0))
    assert 0 < left_out.size < NEURONS
    rows = {name: getattr(arrays, name).copy() for name in ("gate", "up", "down")}
    for matrix in rows.values():
        matrix[NEURONS + left_out] = np.nan
    x = random_floats(3, num_tokens, WIDTH)
    spoilt, expected = (
        in_memory(each, WIDTH).ffn(1, x, selection, not_zero("relu"), "relu", 2)
        for each in (arrays._replace(**rows), arrays)
    )
    np.testing.assert_array_equal(spoilt[0], expected[0])
    assert not np.intersect1d(fired_ids(spoilt[1]), left_out).size


@pytest.mark.parametrize("source", ["f32", "transposed f32"])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_a_weight_comes_before_the_products_threshold(
    make: Callable[..., tuple[FfnArrays, Source]], source: str, num_tokens: int
) -> None:
    arrays, over = make(source, 8)
    named, starts = layer_of(arrays, 1)
    norms = arrays.down_norms[NEURONS:]
    x = random_floats(8, num_tokens, WIDTH)
    selection = random_selection(np.random.default_rng(2), "blocks", starts, num_tokens)
    thresholds = Thresholds(np.float32(0.1), np.float32(200))
    expected, unweighed = (
        selected_ffn(
            x, **named, selection=chosen, starts=starts, activation_fn="silu",
            thresholds=(0.1, 200), down_norms=norms,
        )
        for chosen in (
            selection,
            replace_weights(selection, (selection.block_weights > 0).astype(np.float32)),
        )
    )  # fmt: skip
    found, scratch = over.ffn(1, x, selection, thresholds, "silu", 2)
    limits = 4e-6 * sizes_of(x, named, factors(selection, starts, num_tokens))
    assert (np.abs(found - expected) <= limits).all()
    assert np.abs(expected - unweighed).max() > 100 * limits.max()
    assert 0 < scratch.counts.sum() < scratch.up_counts.sum()


def replace_weights(selection: Selection, weights: np.ndarray) -> Selection:
    return selection._replace(block_weights=weights)


def test_everything_is_the_same_in_blocks_of_any_number() -> None:
    """By one thread, whose neurons are the same ones in the same order."""
    arrays, x = weights_of("f32", 8), random_floats(1, 7, WIDTH)
    found, _ = in_memory(arrays._replace(down_bias=arrays.down_bias[:, :, :0]), WIDTH).ffn(
        1, x, EVERYTHING, ALL_FIRE, "silu"
    )
    one = arrays._replace(starts=arrays.starts[:, [0, -1]], down_bias=arrays.down_bias[:, :1, :0])
    expected, _ = in_memory(one, WIDTH).ffn(1, x, EVERYTHING, ALL_FIRE, "silu")
    np.testing.assert_array_equal(found, expected)
    assert most_rows(one.starts) == NEURONS


@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("kind", ["blocks", "masked ids of blocks"])
def test_neurons_of_chosen_blocks_are_counted(kind: str, num_tokens: int) -> None:
    arrays = weights_of("f32", 8)
    starts = arrays.starts[1] - arrays.starts[1, 0]
    selection = random_selection(np.random.default_rng(6), kind, starts, num_tokens)
    layout = ArenaLayout(2, num_tokens, WIDTH, NEURONS, 8, 1, 1, 1, LAYERS, num_blocks=8)
    buffers = layout.buffers(layout.new_arena())
    buffers.ffn_input[:] = random_floats(2, num_tokens, WIDTH)
    buffers.block_weights[:] = selection.block_weights
    request = buffers.requests[1]
    request[[OPERATION, LAYER, NUM_TOKENS, WEIGHS_BLOCKS, WATCHED]] = FFN, 1, num_tokens, 1, 1
    request[[GATE_THRESHOLD, PRODUCT_THRESHOLD]] = threshold_words([not_zero("relu")])[0]
    request[NUM_IDS] = selection.ids.size if selection.is_listed else ALL_NEURONS
    buffers.active_ids[1, : selection.ids.size] = selection.ids
    buffers.active_masks[1, : selection.token_masks.size] = selection.token_masks
    draw = np.random.default_rng(7)
    bucket = draw.integers(0, NUM_BUCKETS, LAYERS * NEURONS).astype(np.uint8)
    buckets = NeuronBuckets(arrays.starts, bucket, np.zeros((LAYERS, NUM_BUCKETS), np.uint32))
    scratch = new_scratch(1, num_tokens, NEURONS, WIDTH, 8)
    ffn_request(0, 1, 1, buffers, arrays, scratch, None, None, buckets, activation("relu"))
    rows = np.arange(NEURONS) if not selection.is_listed else selection.ids
    chosen = (selection.block_weights != 0).any(axis=0)
    gates = rows[np.repeat(chosen, np.diff(starts))[rows]]
    found, own = buffers.neuron_counts[1, 1], bucket[NEURONS:]
    for ids, word in ((gates, LAST_GATES), (fired_ids(scratch), LAST_FIRED)):
        assert found[:, word].tolist() == np.bincount(own[ids], minlength=NUM_BUCKETS).tolist()
    assert buffers.replies[1, NUM_COMPUTED] == scratch.counts.sum() > 0
    out, _ = in_memory(arrays, WIDTH).ffn(
        1, buffers.ffn_input.copy(), selection, not_zero("relu"), "relu"
    )
    np.testing.assert_array_equal(buffers.partials[1], out)
