"""Whole experts on storage: what is kept, evicted, read ahead, cancelled, and awaited."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from hotcold.actors.cpu.bundle_reads import BundleReads
from hotcold.actors.cpu.unit_store import ExpertStore
from hotcold.actors.protocol.offloaded_neurons import OffloadedShare
from hotcold.actors.setup.assignment import cold_shards, service_stripes
from hotcold.model.bundles import geometry as geometries
from hotcold.model.bundles.bundle_file import read_bundle_file
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.bundles.pack import write_bundles
from hotcold.model.config.build import read_config
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.check import stored_config
from hotcold.model.weights.ffn import load_ffn
from hotcold.numba_kernels.decode.activations import ALL_FIRE
from hotcold.numba_kernels.decode.selection import NO_IDS, NO_MASKS, Selection
from hotcold.numba_kernels.ffn_arrays import FfnArrays
from hotcold.numba_kernels.load.convert import row_lengths
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL
from hotcold.numba_kernels.loops.mailbox import (
    CELLS_A_SERVICE,
    DONE,
    LAYER,
    NUM_REQUEST_WORDS,
    NUM_TOKENS,
    REQUEST,
)
from hotcold.numba_kernels.storage.offloaded_units import NUM_MISSES, OffloadedNeurons
from hotcold.numba_kernels.storage.read_ahead import (
    NUM_CHOSEN,
    NUM_GUESSED,
    note_guesses,
    read_guessed,
    request_routed,
)
from hotcold.numba_kernels.storage.read_queue import NOW, NUM_BATCHES, num_pending
from hotcold.numba_kernels.storage.routed_ahead import read_routed, release_lock, take_lock
from tests.kernels.arrays import random_floats
from tests.kernels.neurons import Source
from tests.tiny_checkpoint import Tiny


class Stored:
    """A shard of a mixture, in memory and on storage."""

    begin: Callable[[], None]

    def __init__(self, path: Path, service: int = 0, threads: tuple[int, ...] = (2,), **share: Any):
        config = self.config = stored_config(Checkpoint(path), read_config(path), "")
        self.geometry = BundleGeometry.of(config)
        order = [np.arange(size, dtype=np.int32) for size in self.geometry.layer_bundles]
        self.path = write_bundles(path, config, order, "drawn")
        self.file = read_bundle_file(self.path, self.geometry, ModelIdentity.of(path))
        every = [np.arange(size, dtype=np.int32) for size in config.ffn_sizes]
        stripes = service_stripes(config, threads, None)
        ids = cold_shards(config, None, every, stripes)[service]
        if "without" in share:  # an expert that others hold; None: all
            assert config.experts is not None
            left_out = share.pop("without")
            ids = [
                own[:0] if left_out is None else own[own // config.experts.size != left_out]
                for own in ids
            ]
        weights = load_ffn(Checkpoint(path), config, ids, include_down_bias=service == 0)
        norms = row_lengths(weights.down)
        self.plain = Source(
            FfnArrays(
                weights.starts, weights.gate, weights.up, weights.down, weights.gate_bias,
                weights.up_bias, weights.down_bias, norms,
            ),
            weights.starts,
            config.hidden_size,
        )  # fmt: skip
        layers = [layer.ffn for layer in config.layers]
        kept = OffloadedShare(0, share.pop("kept", 0), **share)
        self.store = ExpertStore(self.file, layers, weights, kept, 3, has_down_norms=True)
        self.source = Source(self.store.stored, weights.starts, config.hidden_size)

    def choose(self, rng: np.random.Generator, layer: int, num_tokens: int) -> Selection:
        """A selection as a router makes it."""
        ffn, num_blocks = self.config.layers[layer].ffn, self.plain.starts.shape[1] - 1
        if ffn.router is None:
            return Selection(False, NO_IDS, NO_MASKS, np.empty((0, 0), np.float32))
        weights = np.zeros((num_tokens, num_blocks), np.float32)
        for row in weights:
            chosen = rng.choice(ffn.router.num_experts, ffn.router.num_chosen, replace=False)
            row[chosen] = rng.uniform(0.2, 1.5, chosen.size)
            row[ffn.router.num_experts : len(ffn.block_sizes)] = 1
        return Selection(False, NO_IDS, NO_MASKS, weights)


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stored]]:
    """stored(path, bundle_bytes=…, …): closed at the end."""
    made: list[Stored] = []

    def make(path: Path, bundle_bytes: int = 4096, **options: Any) -> Stored:
        monkeypatch.setattr(geometries, "_EXPERT_BUNDLE_BYTES", bundle_bytes)
        made.append(Stored(path, **options))
        return made[-1]

    yield make
    for one in made:
        one.store.close()


@pytest.fixture
def own_copy(tiny: Tiny, tmp_path: Path) -> Path:
    """A model whose bundle file a test may spoil."""
    copytree(tiny("qwen3-moe").path, tmp_path / "m", ignore=lambda *_: {"hotcold"})
    return tmp_path / "m"


def test_a_failed_read_leaves_nothing_to_the_next_request(
    own_copy: Path, stored: Callable[..., Stored]
) -> None:
    """Blocks of gates that threads had taken before a read failed are taken again."""
    one, rng = stored(own_copy, kept=10_000), np.random.default_rng(1)
    first, other = (one.choose(rng, layer, 1) for layer in (0, 1))
    x, y = (random_floats(seed, 1, one.config.hidden_size) for seed in (3, 4))
    name, kept = one.config.activation_fn, one.source.scratch(3, 1)
    one.source.ffn(0, x, first, ALL_FIRE, name, 3, kept)  # the experts are in slots from here on
    content, begin = one.path.read_bytes(), one.geometry.first_byte
    spoilt = np.frombuffer(content, np.uint8).copy()
    spoilt[begin::64] ^= 4
    rewrite(one.path, spoilt.tobytes())
    with pytest.raises(AssertionError):
        one.source.ffn(1, x, other, ALL_FIRE, name, 3, kept)
    rewrite(one.path, content)
    expected, _ = one.plain.ffn(0, y, first, ALL_FIRE, name, 3)
    found, _ = one.source.ffn(0, y, first, ALL_FIRE, name, 3, kept)
    np.testing.assert_array_equal(found, expected)


def rewrite(file: Path, content: bytes) -> None:
    """In place: whoever has it open sees it."""
    with file.open("r+b") as stream:
        stream.write(content)


@pytest.fixture
def unread(tiny: Tiny, stored: Callable[..., Stored], monkeypatch: pytest.MonkeyPatch) -> Stored:
    """Of SmallThinker, where nothing stays; no thread reads until `one.begin()` is called."""
    begin: list[Callable[[], None]] = []
    start = BundleReads.start
    monkeypatch.setattr(
        BundleReads, "start", lambda reads, *args: begin.append(lambda: start(reads, *args))
    )
    one = stored(tiny("smallthinker").path)
    one.begin = begin[0]
    return one


def routed_to(one: Stored, blocks: np.ndarray) -> np.ndarray:
    """`block_weights` of one token that chose `blocks`."""
    weights = np.zeros((1, one.plain.starts.shape[1] - 1), np.float32)
    weights[0, blocks] = 1
    return weights


def test_a_choice_that_comes_late_leaves_what_is_awaited(unread: Stored) -> None:
    """Reads that the layer's request waits for are not cancelled, wherever others stand."""
    shard, blocks = unread.store.stored, np.array([0, 2])
    unread.store.request(1, blocks)
    unread.store.request_ahead(2, np.array([1]))
    unread.store.request_ahead(2, np.array([3]))
    pending = [num_pending(shard.queue, batch) for batch in range(NUM_BATCHES)]
    assert all(pending)
    request_routed(shard, 1, routed_to(unread, blocks))
    assert [num_pending(shard.queue, batch) for batch in range(NUM_BATCHES)] == pending
    unread.begin()
    unread.store.await_blocks(1, blocks)


def guessing(shard: OffloadedNeurons, weights: np.ndarray) -> OffloadedNeurons:
    """The same, where routers write their guesses to `weights`."""
    return shard._replace(ahead=shard.ahead._replace(guessed=weights))


AHEAD: dict[str, Callable[[ExpertStore, int, np.ndarray], object]] = {
    "prompt": lambda store, layer, weights: store.request_ahead(layer, np.arange(weights.shape[1])),
    "guess": lambda store, layer, weights: read_guessed(
        guessing(store.stored, weights), layer, len(weights)
    ),
    "choice": lambda store, layer, weights: request_routed(store.stored, layer, weights),
}


@pytest.mark.parametrize("way", AHEAD)
def test_reading_a_layer_ahead_evicts_none_of_it(
    tiny: Tiny, stored: Callable[..., Stored], way: str
) -> None:
    """Six slots, three of another layer that was used more."""
    one = stored(tiny("smallthinker").path)
    slots, blocks = one.store.stored.gates, np.arange(3, 6)
    one.store.request(1, blocks)
    one.store.await_blocks(1, blocks)
    for _ in range(4):
        one.store.request(0, blocks)
        one.store.await_blocks(0, blocks)
    assert slots.unit_of.size == 6 and (slots.unit_of >= 0).all()
    one.store.request(2, np.zeros(0, np.int64))
    units = 6 + blocks
    before = slots.slot_of[units].tolist()
    AHEAD[way](one.store, 1, routed_to(one, np.arange(6)))
    assert slots.slot_of[units].tolist() == before
    assert sorted(slots.unit_of) == list(range(6, 12))


def test_a_choice_is_read_only_while_attention_is_computed(unread: Stored) -> None:
    """Else its layer and weights may be another request's; nothing waits for the lock."""
    weights = routed_to(unread, np.array([0, 2]))
    shard = guessing(unread.store.stored, np.zeros_like(weights))
    requests = np.zeros((1, NUM_REQUEST_WORDS), np.int64)
    requests[0, [LAYER, NUM_TOKENS]] = 1, 1
    cells = np.zeros((CELLS_A_SERVICE, INTS_A_CELL), np.int32)

    def reads(number: int, asked: int, done: int) -> bool:
        cells[[REQUEST, DONE], 0] = asked, done
        read_routed(shard, 0, cells.reshape(-1), requests, weights, number)
        return bool(num_pending(shard.queue, NOW + 1))

    assert not reads(4, asked=5, done=4)
    assert not reads(5, asked=5, done=5)
    take_lock(shard.lock)
    assert not reads(5, asked=5, done=4)
    release_lock(shard.lock)
    assert reads(5, asked=5, done=4)
    unread.begin()


def test_a_service_without_neurons(tiny: Tiny, stored: Callable[..., Stored]) -> None:
    """As where a GPU has all that would be its own: nothing to read, no norms, sums of zero."""
    one, rng = stored(tiny("smallthinker").path, without=None), np.random.default_rng(3)
    assert not one.store.units.sizes.any() and one.store.arrays.down_norms.size == 0
    x, chosen = random_floats(3, 3, one.config.hidden_size), one.choose(rng, 0, 3)
    found, _ = one.source.ffn(0, x, chosen, ALL_FIRE, one.config.activation_fn, 3)
    assert found.shape == x.shape and not found.any()
    counts = one.store.stored.counts
    assert counts[NUM_MISSES] == 0 and one.store.stored.queue.counts[:, 0].sum() == 0


def test_a_choice_replaces_guesses_only_where_it_can_be_read(unread: Stored) -> None:
    shard, blocks = unread.store.stored, np.array([0, 2])
    unread.store.request_ahead(1, np.array([1]))
    request_routed(shard, 1, routed_to(unread, blocks))
    units = blocks + (unread.plain.starts.shape[1] - 1)
    firsts = shard.gates.firsts
    assert all(shard.gates.requested[firsts[unit]] for unit in units)
    assert not shard.gates.requested[firsts[units[0] + 1]]  # the guess was cancelled
    unread.store.request_ahead(1, np.array([1]))  # in the other batch: now none is free
    pending = [num_pending(shard.queue, batch) for batch in range(NUM_BATCHES)]
    request_routed(shard, 1, routed_to(unread, np.array([3])))
    assert [num_pending(shard.queue, batch) for batch in range(NUM_BATCHES)] == pending
    unread.begin()


def test_requests_keep_nothing(unread: Stored) -> None:
    """References to arrays are not counted where Python calls, or they would stay for ever."""
    order = unread.store.stored.order
    before = sys.getrefcount(order)
    for _ in range(5):
        unread.store.request(1, np.array([0, 2]))
    assert sys.getrefcount(order) == before


@pytest.mark.parametrize("way", ["guess", "choice"])
def test_blocks_without_neurons_take_no_slots(
    tiny: Tiny, stored: Callable[..., Stored], way: str
) -> None:
    """A service may hold no neuron of an expert."""
    one = stored(tiny("smallthinker").path, without=2)
    assert one.store.units.sizes[6:12].tolist() == [24, 24, 0, 24, 24, 24]
    AHEAD[way](one.store, 1, routed_to(one, np.arange(6)))
    has_slot = one.store.stored.gates.slot_of[6:12] >= 0
    assert has_slot.tolist() == [True, True, False, True, True, True]


def test_a_guess_is_compared_with_the_choice_of_its_layer(
    tiny: Tiny, stored: Callable[..., Stored]
) -> None:
    """By then there is one for the next layer; more tokens than are guessed for count nothing."""
    one = stored(tiny("smallthinker").path)
    guessed = routed_to(one, np.array([0, 2]))
    shard = guessing(one.store.stored, guessed)
    read_guessed(shard, 1, 1)
    guessed[:] = routed_to(one, np.array([3]))
    note_guesses(shard, 1, np.array([2, 3, 4]))
    counted = shard.ahead.counts[[NUM_CHOSEN, NUM_GUESSED]].tolist()
    assert counted == [3, 1]
    read_guessed(shard, 2, 1)
    read_guessed(shard, 2, 5)
    note_guesses(shard, 2, np.array([3]))
    assert shard.ahead.counts[[NUM_CHOSEN, NUM_GUESSED]].tolist() == counted
