"""Neurons on storage: the same bits as in memory, in every mode, format, batch and prompt."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.cpu import bundle_reads
from hotcold.actors.cpu.bundle_reads import BundleReads
from hotcold.actors.cpu.offloaded_service import OffloadedService, load_offloaded_service
from hotcold.actors.exchange.service import Service
from hotcold.actors.protocol.messages import PREDICTED_MODES, THRESHOLD
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage, OffloadedShare
from hotcold.actors.setup.shards import served_config
from hotcold.model.bundles import direct_io
from hotcold.model.bundles.bundle_file import bundle_path
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.bundles.pack import write_bundles
from hotcold.model.config.build import read_config
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.check import stored_config
from hotcold.numba_kernels.decode.activations import Thresholds, not_zero
from hotcold.numba_kernels.decode.predict import pack_weights
from hotcold.numba_kernels.loops.mailbox import (
    BYTES_READ,
    FFN,
    GATE_THRESHOLD,
    LAYER,
    NEXT_LAYER,
    NUM_IDS,
    NUM_TOKENS,
    OPERATION,
    PARTS_LOOKED_UP,
    PARTS_MISSED,
    PRODUCT_THRESHOLD,
    threshold_words,
)
from hotcold.numba_kernels.loops.predict_team import bit_rows
from hotcold.numba_kernels.storage import io_ring
from hotcold.numba_kernels.storage.io_ring import DESCRIPTOR, IoRing, new_ring
from hotcold.numba_kernels.storage.offloaded_units import ReadAhead
from hotcold.numba_kernels.storage.read_ahead import NUM_AHEAD, NUM_USEFUL
from hotcold.numba_kernels.storage.read_queue import NOW, num_pending
from hotcold.predictors.predictor import NeuronPredictor
from hotcold.predictors.predictor_file import Predictors, read_predictors, write_predictors
from hotcold.predictors.read_ahead import words_to_read_ahead
from hotcold.predictors.sign import SignLayer
from tests.actors.in_process import InProcessSystem
from tests.actors.test_predicted_modes import for_services, layer_tensors, oracles
from tests.tiny_checkpoint import Tiny

IDS = np.random.default_rng(3).integers(0, 101, 40)
WAYS = ([1], [2, 7, 4], [32], [35, 1, 1])
STORES: list[dict[str, Any]] = [
    {},  # no slot more than a layer needs
    {"more_gates": 1000, "more_slots": 13},  # all gates stay
    {"reads_whole": False, "more_gates": 40, "more_slots": 13, "has_rates": True},
    {"more_slots": 1000},
]


def packed(path: Path, weight_dtype: str = "", seed: int = 1) -> Path:
    """The model's bundle file, its neurons in some order."""
    config = stored_config(Checkpoint(path), read_config(path), weight_dtype)
    draw = np.random.default_rng(seed)
    order = [draw.permutation(config.ffn_size) for _ in range(config.num_layers)]
    return write_bundles(path, config, np.array(order, np.int32), "drawn", weight_dtype)


@dataclass
class StoredSystem(InProcessSystem):
    """As `InProcessSystem`, with CPU services that have so many slots besides a layer."""

    more_slots: int = 0
    more_gates: int = 0  # besides those
    reads_whole: bool = True
    has_rates: bool = False
    predictors: Path | None = None
    shares_bits: bool = False  # of predictors, which `sign_predictor` lays into the arena

    def _cpus(self) -> list[Service]:
        config = served_config(self.system(), self.config)
        file = bundle_path(self.path, BundleGeometry.of(config))
        sizes = self.topology.num_neurons.T[self.topology.cpu_services]
        if self.shares_bits:
            self.predictor_words = words_to_read_ahead(self._predictors())
        specs = [replace(one, storage=NeuronStorage(str(file), 0, 0)) for one in self.cpu_specs()]
        if self.shares_bits:
            specs = [
                replace(one, among=np.stack([sizes[:place].sum(axis=0), sizes.sum(axis=0)], axis=1))
                for place, one in enumerate(specs)
            ]
        return [
            load_offloaded_service(
                one,
                self.config,
                self._share(one.index, one.neuron_ids or []),
                self.predictors,
                lambda num_bytes: None,
            )
            for one in specs
        ]

    def _share(self, index: int, shard: Sequence[np.ndarray]) -> OffloadedShare:
        most, total = max(ids.size for ids in shard), sum(ids.size for ids in shard)
        draw = np.random.default_rng(index)
        rates = draw.random(total if self.has_rates else 0).astype(np.float32)
        num_up_downs = most + self.more_slots
        num_gates = num_up_downs + self.more_gates
        return OffloadedShare(num_gates, num_up_downs, rates, self.reads_whole)

    def _predictors(self) -> Predictors:
        assert self.predictors is not None
        return read_predictors(self.predictors, ModelIdentity.of(self.path), self.config)

    @contextmanager
    def sign_predictor(self) -> Iterator[NeuronPredictor]:
        """As a driver has it, with threads that score."""
        bits = self.exchange.buffers.predictor_bits
        predictor = self._predictors().arranged(self.layer_shards(), bits)
        predictor.start_helpers(self.exchange.buffers, 0, self.num_threads)
        yield predictor
        predictor.close()

    def ahead(self) -> list[ReadAhead]:
        """What each CPU service reads ahead by."""
        return [s.store.stored.ahead for s in self.services if isinstance(s, OffloadedService)]

    def counted(self, word: int) -> int:
        """A word of the CPU services' replies, added up."""
        return int(self.exchange.buffers.replies[self.topology.cpu_services, word].sum())


def answers(system: InProcessSystem, modes: Sequence[str]) -> Iterator[np.ndarray]:
    """Logits of every way and mode, in turn."""
    layers = [Thresholds(np.float32(0.12), np.float32(0.3))] * system.config.num_layers
    for mode in modes:
        is_predicted = mode in PREDICTED_MODES
        thresholds = layers if mode == THRESHOLD else None
        for way in WAYS:
            predictor = for_services(system, oracles(system)) if is_predicted else None
            yield system.logits(mode, IDS, way, predictor=predictor, thresholds=thresholds)


def assert_same_bits(plain: InProcessSystem, stores: Sequence[StoredSystem], modes: Sequence[str]):
    """Of all systems, which are stopped."""
    with plain:
        wanted = list(answers(plain, modes))
    for stored in stores:
        with stored:
            for found, expected in zip(answers(stored, modes), wanted, strict=True):
                np.testing.assert_array_equal(found, expected)
            assert 0 < stored.counted(PARTS_MISSED) <= stored.counted(PARTS_LOOKED_UP)
            assert stored.counted(BYTES_READ) > 0


NORMS = {"has_down_norms": True}
CASES: list[tuple[str, list[int], list[str], dict[str, Any]]] = [
    ("llama-gqa", [0, 1, 2, 3], ["exact"], {}),
    ("opt-postnorm", [0, 2], ["dense"], {}),
    ("falcon-bias", [1, 2], ["exact"], {}),
    ("llama-relu", [1, 2], ["sign"], {}),
    ("llama-silu", [0, 2], [THRESHOLD], NORMS),
]


@pytest.mark.sweep(variant=["llama-gqa", "llama-relu", "llama-silu"])
@pytest.mark.parametrize(("variant", "stores", "modes", "options"), CASES)
def test_the_same_bits_as_in_memory(
    tiny: Tiny, variant: str, stores: list[int], modes: list[str], options: dict[str, Any]
) -> None:
    path = tiny(variant).path
    packed(path)
    stored = [StoredSystem(path, 2, 2, **options, **STORES[number]) for number in stores]
    assert_same_bits(InProcessSystem(path, 2, 2, **options), stored, modes)


@pytest.fixture
def predicted(tiny: Tiny, tmp_path: Path) -> tuple[Path, Path]:
    """A packed model, and predictors that take two bits of its gates' weights."""
    path = tiny("llama-relu").path
    packed(path)
    return path, two_bits(path, tmp_path / "p.safetensors")


def two_bits(path: Path, file: Path) -> Path:
    """Write such predictors of a model to `file`."""
    layers = [
        SignLayer(
            pack_weights(gate, 2),
            np.zeros(gate.shape[0], np.float32),
            np.zeros(gate.shape[1], np.float32),
            np.ones(gate.shape[1], np.float32),
        )
        for gate in layer_tensors(path, read_config(path), "mlp.gate_proj.weight")
    ]
    write_predictors(file, ModelIdentity.of(path), Predictors(layers, "ffn_input"))
    return file


AHEAD: list[dict[str, Any]] = [
    {"more_gates": 1000, "more_slots": 60},
    {"reads_whole": False, "more_slots": 40, "more_gates": 30, "has_rates": True},
]


@pytest.mark.parametrize("way", ["ring", "threads", "page cache"])
def test_the_same_bits_with_reads_ahead(
    predicted: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Also where there is no io_uring, or a file system that refuses direct reads."""
    path, file = predicted
    if way == "threads":
        monkeypatch.setattr(bundle_reads, "new_ring", lambda num_entries: None)
    if way == "page cache":
        refuse_direct(monkeypatch)
    stores = [
        StoredSystem(path, 1, 2, predictors=file, **store)
        for store in (AHEAD if way == "ring" else AHEAD[1:])
    ]
    assert_same_bits(InProcessSystem(path, 1, 2), stores, ["exact", "sign"])
    for stored in stores:
        for ahead in stored.ahead():
            assert 0 < ahead.counts[NUM_USEFUL] <= ahead.counts[NUM_AHEAD]


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refuse(name: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(name, flags, *rest)

    monkeypatch.setattr(direct_io.os, "open", refuse)


def test_services_read_ahead_by_the_bits_that_the_driver_laid(
    predicted: tuple[Path, Path],
) -> None:
    path, file = predicted
    own, shared = (
        StoredSystem(path, 2, 2, predictors=file, shares_bits=shares, more_slots=40)
        for shares in (False, True)
    )
    found = []
    for stored in (own, shared):
        with stored, stored.sign_predictor() as predictor:
            found.append(stored.logits("sign", IDS, [1], predictor=predictor))
            assert all(ahead.counts[NUM_USEFUL] for ahead in stored.ahead())
    np.testing.assert_array_equal(found[0], found[1])
    bits = shared.exchange.buffers.predictor_bits
    for one, other in zip(own.ahead(), shared.ahead(), strict=True):
        assert np.shares_memory(other.predictors.bits, bits)
        for layer in range(own.config.num_layers):
            rows = bit_rows.py_func(one.predictors, layer)
            np.testing.assert_array_equal(rows, bit_rows.py_func(other.predictors, layer))
            assert rows.any()


def test_a_disk_that_does_not_answer_is_waited_for(
    predicted: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a read takes: the request goes on once it has come."""
    path, file = predicted
    with InProcessSystem(path, 1, 2) as plain:
        wanted = plain.logits("exact", IDS[:2], [1])
    begin: list[Callable[[], None]] = []
    start = BundleReads.start
    monkeypatch.setattr(
        BundleReads, "start", lambda reads, *args: begin.append(lambda: start(reads, *args))
    )
    stored = StoredSystem(path, 1, 2, predictors=file, more_slots=40)
    with stored, ThreadPoolExecutor(1) as pool:
        found = pool.submit(stored.logits, "exact", IDS[:2], [1])
        service = stored.services[1]
        assert isinstance(service, OffloadedService)
        while not num_pending(service.store.stored.queue, NOW):
            time.sleep(0.001)
        assert not found.done()
        begin[0]()
        np.testing.assert_array_equal(found.result(), wanted)


@pytest.mark.parametrize("store", STORES[1:3])
def test_a_step_between_the_layers_of_a_prompt(tiny: Tiny, store: dict[str, Any]) -> None:
    """The next layer of the prompt is being read when a step of another request comes."""
    path = tiny("llama-relu").path
    packed(path)
    asked = (0, 40), (1, 40), (0, 1), (2, 40), (0, 3), (1, 40), (2, 40)
    draw = np.random.default_rng(5)
    inputs = [draw.standard_normal((size, 48)).astype(np.float32) for _, size in asked]
    found: list[list[np.ndarray]] = []
    for system in (InProcessSystem(path, 1, 2), StoredSystem(path, 1, 2, **store)):
        with system:
            parts = [ffn_of(system, layer, x) for (layer, _), x in zip(asked, inputs, strict=True)]
            found.append(parts)
    for plain, stored in zip(*found, strict=True):
        assert np.abs(plain).max() > 0
        np.testing.assert_array_equal(stored, plain)


def ffn_of(system: InProcessSystem, layer: int, x: np.ndarray) -> np.ndarray:
    """What the CPU service answers for a layer."""
    buffers = system.exchange.buffers
    assert x.shape[1] == system.config.hidden_size
    buffers.ffn_input[: len(x)] = x
    fires = threshold_words([not_zero(system.config.activation_fn)])[0]
    buffers.requests[1, [OPERATION, LAYER, NUM_TOKENS, NUM_IDS]] = FFN, layer, len(x), -1
    buffers.requests[1, [GATE_THRESHOLD, PRODUCT_THRESHOLD]] = fires
    buffers.requests[1, NEXT_LAYER] = layer + 2 if layer < 2 else 0  # of a prompt
    system.exchange.request([1])
    return buffers.partials[1, : len(x)].copy()


def test_a_larger_cache_reads_less(tiny: Tiny) -> None:
    path, found = tiny("llama-relu").path, []
    packed(path)
    for more_slots in (0, 60, 1000):
        with StoredSystem(path, 1, 2, more_slots=more_slots, more_gates=1000) as stored:
            stored.logits("exact", IDS, [1])
            found.append(stored.counted(PARTS_MISSED))
            before = stored.counted(BYTES_READ)
            stored.logits("exact", IDS, [1])
            again = stored.counted(BYTES_READ) - before
    assert found[0] > found[1] > found[2]
    assert again == 0  # everything was in memory


def test_a_ring_that_breaks_is_done_without(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing hangs and nothing wrong is computed, whatever the kernel says of the ring itself.

    What was under way may come at any time: here all of the ring's memory is written to, again
    and again, also once the system has ended.
    """
    path, rings, buffers = tiny("llama-gqa").path, [], []
    packed(path)

    def kept(num_entries: int) -> IoRing | None:
        rings.append(new_ring(num_entries))
        return rings[-1]

    monkeypatch.setattr(bundle_reads, "new_ring", kept)
    monkeypatch.setattr(bundle_reads, "register_buffers", lambda ring, into: buffers.append(into))
    with InProcessSystem(path, 1, 2) as system:
        expected = [system.logits("exact", IDS, way) for way in ([1], [40])]
    with StoredSystem(path, 1, 2) as stored:
        if rings[0] is None:
            pytest.skip("no io_uring here")
        stored.logits("exact", IDS[:2], [1])
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), int(rings[0].facts[DESCRIPTOR]))
        late = _LateReads(buffers[0])
        late.start()
        try:
            for way, logits in zip(([1], [40]), expected, strict=True):
                np.testing.assert_array_equal(stored.logits("exact", IDS, way), logits)
        finally:
            late.ended.set()
            late.join()
    assert late.num_written > 0
    assert any(buffers[0] is one for one in io_ring._written_by_kernel)


class _LateReads(threading.Thread):
    """Writes into buffers as the kernel does that has been asked for reads."""

    def __init__(self, buffers: np.ndarray) -> None:
        super().__init__(daemon=True)
        self.ended, self.num_written, self._buffers = threading.Event(), 0, buffers

    def run(self) -> None:
        while not self.ended.wait(0.005):
            self._buffers[:8] = self.num_written % 256
            self.num_written += 1
