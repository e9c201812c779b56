"""Mixtures whose experts are on storage: the same bits as in memory, in steps, batches, prompts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks import random_gguf
from hotcold.actors.cpu import bundle_reads
from hotcold.actors.cpu.bundle_reads import BundleReads
from hotcold.actors.cpu.offloaded_service import OffloadedExpertService, load_offloaded_service
from hotcold.actors.driver.driver import Driver
from hotcold.actors.driver.modes import step_mode
from hotcold.actors.exchange.service import Service
from hotcold.actors.protocol.failures import AnswerFailed
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage, OffloadedShare
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.preflight import prepare_system
from hotcold.actors.setup.shards import served_config, service_specs
from hotcold.actors.setup.storage import pack_model
from hotcold.actors.telemetry.experts import expert_counts
from hotcold.model.bundles import geometry as geometries
from hotcold.model.bundles.bundle_file import bundle_path, damaged_bundles, read_bundle_file
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.config.build import read_config
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.check import stored_config
from hotcold.numba_kernels.decode.activations import Thresholds
from hotcold.numba_kernels.serve.doorbell import INTS_A_CELL
from hotcold.numba_kernels.serve.mailbox import (
    BYTES_READ,
    DRAFT,
    PARTS_GUESSABLE,
    PARTS_LOOKED_UP,
    PARTS_MISSED,
    PARTS_USEFUL,
    ROUTED,
    TARGET,
    cell,
)
from hotcold.placement.storage import least_in_memory
from tests.actors import test_gguf_experts, test_gguf_mixtures
from tests.actors.in_process import InProcessSystem
from tests.conftest import TinyCheckpoint
from tests.mxfp4_models import make_mxfp4

pytestmark = pytest.mark.usefixtures("one_torch_thread", "small_bundles")
Tiny = Callable[..., TinyCheckpoint]
IDS = np.random.default_rng(3).integers(0, 101, 60)
WAYS = ([1], [2, 7, 4], [32], [41, 1, 18])


@pytest.fixture
def small_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert of a tiny model is several of them."""
    monkeypatch.setattr(geometries, "_EXPERT_BUNDLE_BYTES", 4096)


@dataclass
class StoredExperts(InProcessSystem):
    """As `InProcessSystem`; CPU services have rows of so many neurons more than needed."""

    more: int = 0
    share: dict[str, Any] = field(default_factory=dict)  # of OffloadedShare

    def _cpus(self) -> list[Service]:
        config = served_config(self.system(), Checkpoint(self.path), self.config)
        file = bundle_path(self.path, BundleGeometry.of(config))
        kept = least_in_memory([layer.ffn for layer in config.layers]) + self.more
        share = OffloadedShare(kept, kept // self.num_services, **self.share)
        return [
            load_offloaded_service(
                replace(one, storage=NeuronStorage(str(file), 0, 0)),
                self.config,
                share,
                None,
                lambda num_bytes: None,
            )
            for one in self.cpu_specs()
        ]

    def counted(self, word: int) -> int:
        """A word of the CPU services' replies, added up."""
        return int(self.exchange.buffers.replies[self.topology.cpu_services, word].sum())


def answers(system: InProcessSystem, modes: Sequence[str]) -> list[np.ndarray]:
    """Logits of every way and mode, in turn."""
    return [system.logits(mode, IDS, way) for mode in modes for way in WAYS]


def packed(path: Path) -> Path:
    """The model's bundle file."""
    return pack_model(path, stored_config(Checkpoint(path), read_config(path), ""))


VARIANTS = [
    "qwen3-moe-dense",
    "glm4-moe-groups",
    "gpt-oss",
    "smallthinker",
    "qwen2-moe-windows",
    "turbosparse-mixtral",
]
RELU = "smallthinker", "turbosparse-mixtral"


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_bits_as_in_memory(tiny: Tiny, variant: str) -> None:
    path = tiny(variant).path
    packed(path)
    modes = ["exact", "dense"] if variant in RELU else ["dense"]
    with InProcessSystem(path, 2, 2) as plain:
        wanted = answers(plain, modes)
    for more in (0, 100):
        with StoredExperts(path, 2, 2, more=more) as stored:
            for found, expected in zip(answers(stored, modes), wanted, strict=True):
                np.testing.assert_array_equal(found, expected)
            assert 0 < stored.counted(PARTS_MISSED) < stored.counted(PARTS_LOOKED_UP)
            assert stored.counted(BYTES_READ) > 0
            misses = stored.exchange.buffers.block_misses[stored.topology.cpu_services]
            assert misses.sum() == stored.counted(PARTS_MISSED)
            counts = expert_counts(stored.config, stored.engine("dense").block_counts, misses)
            assert counts is not None and counts.missed is not None
            for layer, missed in zip(stored.config.layers, counts.missed, strict=True):
                num_experts = 0 if layer.ffn.router is None else layer.ffn.router.num_experts
                assert missed[:num_experts].any() == (num_experts > 0)
                assert not missed[num_experts:].any()


@pytest.mark.parametrize("variant", ["qwen3-moe", "smallthinker"])
def test_the_same_bits_with_experts_read_ahead(tiny: Tiny, variant: str) -> None:
    path = tiny(variant).path
    packed(path)
    with InProcessSystem(path, 1, 2) as plain:
        wanted = answers(plain, ["dense"])
    with StoredExperts(path, 1, 2, more=24, num_guessed=4) as stored:
        for found, expected in zip(answers(stored, ["dense"]), wanted, strict=True):
            np.testing.assert_array_equal(found, expected)
        service = stored.services[1]
        assert isinstance(service, OffloadedExpertService)
        chosen, guessed, read, useful = service.store.stored.ahead_counts.tolist()
        assert chosen >= guessed > 0.5 * chosen  # layers of random weights change little
        assert read >= useful > 0
        told = stored.exchange.buffers.replies[1, PARTS_GUESSABLE : PARTS_USEFUL + 1]
        assert told.tolist() == [chosen, guessed, read, useful]


def test_drafts_guess_nothing(tiny: Tiny) -> None:
    """Their experts are in memory: what is on storage is read by the model's own choices."""
    path = tiny("smallthinker").path
    packed(path)
    with StoredExperts(path, 1, 2, num_guessed=4) as stored:
        engine, buffers = stored.engine("dense"), stored.exchange.buffers
        rung = buffers.cells[cell(0, ROUTED) * INTS_A_CELL :][:1]
        mode = step_mode(stored.config, "dense")
        for weights in (DRAFT, TARGET):
            buffers.guessed_weights[:], before = -1, int(rung[0])
            engine.step([3], range(1), [0], 1, replace(mode, weights=weights))
            assert (buffers.guessed_weights[0] == -1).all() == (weights == DRAFT)
            assert (rung[0] == before) == (weights == DRAFT)


def test_misses_are_unknown_where_services_have_arenas_of_their_own(tiny: Tiny) -> None:
    path = tiny("qwen3-moe").path
    packed(path)
    shared = SystemConfig(str(path), storage=NeuronStorage("", 0, 0))
    for system in (shared, replace(shared, exchange="calls"), replace(shared, hosts=("a", "b"))):
        copying = system is not shared
        with StoredExperts(path, 1, 2, copying=copying) as stored:
            engine = stored.engine("dense")
            engine.step([3], range(1), [0])
            driver = SimpleNamespace(
                engine=engine, generator=SimpleNamespace(config=stored.config), _system=system
            )
            counts = Driver._expert_counts(cast(Driver, driver))
            assert counts is not None and stored.counted(PARTS_MISSED) > 0
            hits = 1 - stored.counted(PARTS_MISSED) / stored.counted(PARTS_LOOKED_UP)
            assert counts.hit_rate == (None if copying else pytest.approx(hits))


def test_the_same_bits_by_threads(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no io_uring."""
    path = tiny("qwen3-moe").path
    packed(path)
    monkeypatch.setattr(bundle_reads, "new_ring", lambda num_entries: None)
    with InProcessSystem(path, 1, 2) as plain, StoredExperts(path, 1, 2) as stored:
        for way in WAYS:
            expected = plain.logits("dense", IDS, way)
            np.testing.assert_array_equal(stored.logits("dense", IDS, way), expected)


@pytest.fixture
def own_copy(tiny: Tiny, tmp_path: Path) -> Path:
    """A model and its bundle file that a test may spoil."""
    copytree(tiny("qwen3-moe").path, tmp_path / "m", ignore=lambda *_: {"hotcold"})
    packed(tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize("way", [[1], [40]], ids=["token", "prompt"])
@pytest.mark.parametrize("fault", ["shorter", "changed"])
def test_a_file_that_is_spoilt_under_a_system(own_copy: Path, fault: str, way: list[int]) -> None:
    """One line, nothing wrong computed; once the file is mended, the same service goes on."""
    file = next((own_copy / "hotcold").glob("bundles-*.bin"))
    content = file.read_bytes()
    config = stored_config(Checkpoint(own_copy), read_config(own_copy), "")
    first = BundleGeometry.of(config).first_byte
    with InProcessSystem(own_copy, 1, 2) as plain:
        wanted = plain.logits("dense", IDS, way)
    with StoredExperts(own_copy, 1, 2) as stored:
        if fault == "shorter":
            os.truncate(file, first + 4096)
        else:
            spoilt = np.frombuffer(content, np.uint8).copy()
            spoilt[first::256] ^= 4
            file.write_bytes(spoilt.tobytes())
        for _ in range(8):
            with pytest.raises(AnswerFailed, match=str(file)) as caught:
                stored.logits("dense", IDS, way)
            assert "\n" not in str(caught.value)
            said = "became shorter" if fault == "shorter" else "expert"
            assert said in str(caught.value)
        with file.open("r+b") as stream:
            stream.write(content)
        np.testing.assert_array_equal(stored.logits("dense", IDS, way), wanted)


def test_a_disk_that_is_slow_is_waited_for(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads begin when half of the answers have been waited for a while."""
    from concurrent.futures import ThreadPoolExecutor

    from hotcold.numba_kernels.storage.read_queue import NOW, num_pending

    path = tiny("smallthinker").path  # nothing stays: no read is needed before the first request
    packed(path)
    with InProcessSystem(path, 1, 2) as plain:
        wanted = plain.logits("exact", IDS[:3], [1])
    begin: list[Callable[[], None]] = []
    start = BundleReads.start
    monkeypatch.setattr(
        BundleReads, "start", lambda reads, *args: begin.append(lambda: start(reads, *args))
    )
    with StoredExperts(path, 1, 2) as stored, ThreadPoolExecutor(1) as pool:
        found = pool.submit(stored.logits, "exact", IDS[:3], [1])
        service = stored.services[1]
        assert isinstance(service, OffloadedExpertService)
        while not num_pending(service.store.stored.queue, NOW):
            assert not found.done()
        begin[0]()
        np.testing.assert_array_equal(found.result(), wanted)


def _relu(folder: Path) -> Path:
    """A GGUF file of SmallThinker, whose `exact` leaves out what does not fire."""
    random_gguf.write(folder / "m.gguf", random_gguf.SHAPES["tiny-smallthinker"], "q4_0")
    return folder / "m.gguf"


# Mixtures whose down rows are an output each: in one format, in two by layers, in two within a
# layer whose shared expert has more bits and is wider, in MXFP4 with biases, and of ReLU.
OUTPUTS: dict[str, Callable[[Path], Path]] = {
    "Q4_0": lambda folder: test_gguf_mixtures.quantized("Q4_0", folder),
    "Q4_K_M": lambda folder: test_gguf_mixtures.quantized("Q4_K_M", folder),
    "three": test_gguf_experts.write,
    "mxfp4": make_mxfp4,
    "relu": _relu,
}


@dataclass
class Outputs:
    """A mixture whose down rows are an output each, as a command would start it; packed."""

    path: Path
    num_services: int = 1
    has_down_norms: bool = False
    mode: str = "dense"
    pieces: int = 1  # of an expert, at least

    def __post_init__(self) -> None:
        services = self.num_services
        options = SystemOptions(mode=self.mode, context_length=128, num_cpu_actors=services)
        system, self.config = prepare_system(self.path, options)
        assert system.down_transposed
        norms, pieces = self.has_down_norms, self.pieces
        system = replace(system, has_down_norms=norms, expert_pieces=pieces)
        self.specs = service_specs(system, self.config)
        self.file = pack_model(self.path, self.config)

    def plain(self) -> InProcessSystem:
        """All in memory."""
        return InProcessSystem(self.path, num_threads=2, specs=self.specs)

    def stored(self, **options: Any) -> StoredExperts:
        """As much in memory as has to be, unless `more` neurons are."""
        return StoredExperts(self.path, num_threads=2, specs=self.specs, **options)


@pytest.mark.timeout(400)
@pytest.mark.sweep(keep=6)
@pytest.mark.parametrize(
    ("kind", "num_services", "pieces"),
    [
        ("relu", 1, 1),
        ("relu", 2, 2),
        ("Q4_K_M", 2, 1),
        ("mxfp4", 1, 2),
        ("Q4_0", 1, 1),
        ("three", 1, 1),
        ("relu", 2, 1),
        ("Q4_K_M", 1, 1),
        ("mxfp4", 1, 1),
        ("mxfp4", 2, 1),
        ("Q4_0", 2, 2),
    ],
)
def test_the_same_bits_of_down_rows_that_are_an_output(
    kind: str, num_services: int, pieces: int, tmp_path: Path
) -> None:
    modes = ["exact", "dense"] if kind == "relu" else ["dense"]
    model = Outputs(OUTPUTS[kind](tmp_path), num_services, mode=modes[0], pieces=pieces)
    geometry = BundleGeometry.of(model.config)
    assert geometry.has_outputs
    file = read_bundle_file(model.file, geometry, ModelIdentity.of(model.path))
    assert damaged_bundles(file) == []
    with model.plain() as plain:
        wanted = answers(plain, modes)
    for more, guessed in ((0, 0), (512, 4)):
        with model.stored(more=more, num_guessed=guessed) as stored:
            for found, expected in zip(answers(stored, modes), wanted, strict=True):
                np.testing.assert_array_equal(found, expected)
            assert 0 < stored.counted(PARTS_MISSED) < stored.counted(PARTS_LOOKED_UP)


def test_the_same_bits_by_thresholds(tmp_path: Path) -> None:
    """Norms of down's columns come from the file."""
    model = Outputs(OUTPUTS["Q4_0"](tmp_path), has_down_norms=True)
    some = [Thresholds(np.float32(0.01), np.float32(1e-4))] * model.config.num_layers
    found = []
    for system in (model.plain, model.stored):
        with system() as running:
            found += [running.logits("threshold", IDS, way, thresholds=some) for way in WAYS[:3]]
            for way in WAYS[:1]:
                found.append(running.logits("dense", IDS, way))
    for plain, stored in zip(found[:4], found[4:], strict=True):
        np.testing.assert_array_equal(plain, stored)
    assert not np.array_equal(found[0], found[3])  # something was left out


@pytest.mark.parametrize("way", [[1], [40]], ids=["token", "prompt"])
@pytest.mark.parametrize("part", ["first", "second"])
def test_down_rows_that_are_damaged_are_read_again(
    tmp_path: Path, part: str, way: list[int]
) -> None:
    """One line while they are; once the file is mended the same service computes the same bits."""
    model = Outputs(OUTPUTS["Q4_0"](tmp_path))
    geometry, content = BundleGeometry.of(model.config), model.file.read_bytes()
    with model.plain() as plain:
        wanted = plain.logits("dense", IDS, way)
    with model.stored() as stored:
        spoilt = np.frombuffer(content, np.uint8).copy()
        first = geometry.first_byte + (geometry.gate_bytes if part == "second" else 0)
        spoilt[first :: geometry.bundle_bytes] ^= 4
        model.file.write_bytes(spoilt.tobytes())
        for _ in range(3):
            with pytest.raises(AnswerFailed, match=str(model.file)) as caught:
                stored.logits("dense", IDS, way)
            assert "expert" in str(caught.value) and "\n" not in str(caught.value)
        with model.file.open("r+b") as stream:
            stream.write(content)
        np.testing.assert_array_equal(stored.logits("dense", IDS, way), wanted)
