"""Mixtures whose experts are on storage: the same bits as in memory, in steps, batches, prompts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks import random_gguf
from hotcold.actors.cpu.offloaded_service import OffloadedService
from hotcold.actors.driver.driver import Driver
from hotcold.actors.driver.modes import step_mode
from hotcold.actors.protocol.failures import AnswerFailed
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage, OffloadedShare
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.preflight import prepare_system
from hotcold.actors.setup.shards import service_specs
from hotcold.actors.setup.storage import pack_model
from hotcold.actors.telemetry.experts import expert_counts
from hotcold.model.bundles import geometry as geometries
from hotcold.model.bundles.bundle_file import damaged_bundles, read_bundle_file
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.config.build import read_config
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.check import stored_config
from hotcold.numba_kernels.decode.activations import Thresholds
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL
from hotcold.numba_kernels.loops.mailbox import (
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
from tests.actors import test_gguf_mixtures
from tests.actors.in_process import InProcessSystem
from tests.actors.test_stored_neurons import StoredSystem
from tests.mxfp4_models import make_mxfp4
from tests.tiny_checkpoint import Tiny

pytestmark = pytest.mark.usefixtures("small_bundles")
IDS = np.random.default_rng(3).integers(0, 101, 60)
WAYS = ([1, 1, 2, 7, 4], [32], [41, 1, 18])


@pytest.fixture
def small_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert of a tiny model is several of them."""
    monkeypatch.setattr(geometries, "_EXPERT_BUNDLE_BYTES", 4096)


@dataclass
class StoredExperts(StoredSystem):
    """As `InProcessSystem`; CPU services have rows of so many neurons more than needed."""

    more: int = 0

    def _share(self, index: int, shard: Sequence[np.ndarray]) -> OffloadedShare:
        kept = least_in_memory(self.config) + self.more
        return OffloadedShare(kept, kept // self.num_services)


def answers(system: InProcessSystem, modes: Sequence[str]) -> list[np.ndarray]:
    """Logits of every way and mode, in turn."""
    return [system.logits(mode, IDS, way) for mode in modes for way in WAYS]


def require_same(system: StoredExperts, modes: Sequence[str], wanted: Sequence[np.ndarray]) -> None:
    """Of what is read from storage, though some of it is in memory."""
    for found, expected in zip(answers(system, modes), wanted, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert 0 < system.counted(PARTS_MISSED) < system.counted(PARTS_LOOKED_UP)


def packed(path: Path) -> Path:
    """The model's bundle file."""
    return pack_model(path, stored_config(Checkpoint(path), read_config(path), ""))


VARIANTS = "glm4-moe-groups", "gpt-oss", "turbosparse-mixtral", "nemotron-h-moe"
RELU = ("turbosparse-mixtral", "nemotron-h-moe")


@pytest.mark.sweep(variant=["gpt-oss", "turbosparse-mixtral"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_bits_as_in_memory(tiny: Tiny, variant: str) -> None:
    path = tiny(variant).path
    packed(path)
    modes = ["exact", "dense"] if variant in RELU else ["dense"]
    with InProcessSystem(path, 2, 2) as plain:
        wanted = answers(plain, modes)
    for more in (0, 100):
        with StoredExperts(path, 2, 2, more=more) as stored:
            require_same(stored, modes, wanted)
            assert stored.counted(BYTES_READ) > 0
            misses = stored.exchange.buffers.block_misses[stored.topology.cpu_services]
            assert misses.sum() == stored.counted(PARTS_MISSED)
            counts = expert_counts(stored.config, stored.engine("dense").block_counts, misses)
            assert counts is not None and counts.missed is not None
            for layer, missed in zip(stored.config.layers, counts.missed, strict=True):
                num_experts = 0 if layer.ffn.router is None else layer.ffn.router.num_experts
                assert missed[:num_experts].any() == (num_experts > 0)
                assert not missed[num_experts:].any()


@pytest.mark.parametrize("variant", ["qwen3-moe", "smallthinker", "gemma4-a4b"])
def test_the_same_bits_with_experts_read_ahead(tiny: Tiny, variant: str) -> None:
    path = tiny(variant).path
    packed(path)
    with InProcessSystem(path, 1, 2) as plain:
        wanted = answers(plain, ["dense"])
    with StoredExperts(path, 1, 2, more=24, num_guessed=4) as stored:
        require_same(stored, ["dense"], wanted)
        service = stored.services[1]
        assert isinstance(service, OffloadedService)
        chosen, guessed, read, useful = service.store.stored.ahead.counts.tolist()
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
    for system in (shared, replace(shared, hosts=("a", "b"))):
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


def _relu(folder: Path) -> Path:
    """A GGUF file of SmallThinker, whose `exact` leaves out what does not fire."""
    random_gguf.write(folder / "m.gguf", random_gguf.SHAPES["tiny-smallthinker"], "q4_0")
    return folder / "m.gguf"


# Mixtures whose down rows are an output each: all in one format, all roles in three by layers and
# within a layer whose shared expert has more bits and is wider, in MXFP4 with biases, and of ReLU.
OUTPUTS: dict[str, Callable[[Path], Path]] = {
    "Q4_0": lambda folder: test_gguf_mixtures.quantized("Q4_0", folder),
    "three": test_gguf_mixtures.three_formats,
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


@pytest.mark.sweep(kind=["relu"])
@pytest.mark.parametrize(
    ("kind", "num_services", "pieces"), [("relu", 1, 1), ("mxfp4", 1, 2), ("three", 2, 2)]
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
            require_same(stored, modes, wanted)


def test_the_same_bits_by_thresholds(tmp_path: Path) -> None:
    """Norms of down's columns come from the file."""
    model = Outputs(OUTPUTS["Q4_0"](tmp_path), has_down_norms=True)
    some = [Thresholds(np.float32(0.01), np.float32(1e-4))] * model.config.num_layers
    found = []
    for system in (model.plain, model.stored):
        with system() as running:
            found += [running.logits("threshold", IDS, way, thresholds=some) for way in WAYS[:2]]
            found.append(running.logits("dense", IDS, WAYS[0]))
    for plain, stored in zip(found[:3], found[3:], strict=True):
        np.testing.assert_array_equal(plain, stored)
    assert not np.array_equal(found[0], found[2])  # something was left out


@pytest.mark.parametrize(
    ("name", "part", "way"),
    [
        ("llama-gqa", "", [1]),
        ("llama-gqa", "gates", [1]),
        ("llama-gqa", "gates", [40]),
        ("qwen3-moe", "", [1]),
        ("qwen3-moe", "gates", [40]),
        ("Q4_0", "gates", [40]),
        ("Q4_0", "downs", [1]),
    ],
)
def test_a_file_that_is_spoilt_under_a_system(
    tiny: Tiny, tmp_path: Path, name: str, part: str, way: list[int]
) -> None:
    """One line, nothing wrong computed; once the file is mended, the same service goes on.

    Without a `part` it is cut short. In Q4_0 down rows are an output each.
    """
    kind, mode = (StoredSystem, "exact") if name == "llama-gqa" else (StoredExperts, "dense")
    systems: list[Callable[[], InProcessSystem]]
    if name == "Q4_0":
        model = Outputs(OUTPUTS[name](tmp_path))
        file, geometry, systems = model.file, BundleGeometry.of(model.config), [model.plain]
        systems.append(model.stored)
    else:
        path = copytree(tiny(name).path, tmp_path / "m", ignore=lambda *_: {"hotcold"})
        file = packed(path)
        geometry = BundleGeometry.of(stored_config(Checkpoint(path), read_config(path), ""))
        systems = [partial(each, path, 1, 2) for each in (InProcessSystem, kind)]
    content, first = file.read_bytes(), geometry.first_byte
    plain, stored = systems
    with plain() as system:
        wanted = system.logits(mode, IDS, way)
    with stored() as running:
        if part:
            spoilt = np.frombuffer(content, np.uint8).copy()
            first += geometry.gate_bytes if part == "downs" else 0
            spoilt[first :: geometry.bundle_bytes] ^= 4
            rewrite(file, spoilt.tobytes())
        else:
            os.truncate(file, first + 4096)
        told = "became shorter" if not part else "of layer" if kind is StoredSystem else "expert"
        for _ in range(10):  # threads notice in any order
            with pytest.raises(AnswerFailed, match=str(file)) as caught:
                running.logits(mode, IDS, way)
            assert "\n" not in str(caught.value) and told in str(caught.value)
        rewrite(file, content)
        np.testing.assert_array_equal(running.logits(mode, IDS, way), wanted)


def rewrite(file: Path, content: bytes) -> None:
    """In place: whoever has it open sees it."""
    with file.open("r+b") as stream:
        stream.write(content)
