"""Bundle files: what is written, runs that stop, and files that are not what they should be."""

from __future__ import annotations

import errno
import itertools
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from hotcold.actors.cpu.unit_store import ExpertStore
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.protocol.stripes import runs_of_stripes, shard_stripes
from hotcold.actors.setup import account as accounts
from hotcold.actors.setup.account import account
from hotcold.actors.setup.choose import choose_system
from hotcold.actors.setup.preflight import in_memory, packed_config, prepare_system, read_model
from hotcold.actors.setup.shards import service_specs
from hotcold.actors.setup.storage import offloaded_share, pack_model, storage_within
from hotcold.actors.setup.storage_shares import bytes_in_memory
from hotcold.jobs.cli import main
from hotcold.jobs.support import offload_plan
from hotcold.model.bundles import bundle_file, pack
from hotcold.model.bundles import geometry as geometries
from hotcold.model.bundles.bundle_file import (
    BundleFile,
    damaged_bundles,
    header_block,
    read_bundle_file,
)
from hotcold.model.bundles.geometry import BLOCK_BYTES, BundleGeometry
from hotcold.model.bundles.pack import write_bundles
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError, MemoryBudgetError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.atomic_write import part_of
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.files.safetensors_file import SafetensorsFile
from hotcold.model.weights.check import stored_config
from hotcold.model.weights.down_outputs import down_lengths, read_down_outputs
from hotcold.model.weights.ffn import load_ffn, load_ffn_biases, read_gates
from hotcold.model.weights.tensor_reader import TensorReader
from hotcold.placement.profile import ActivationProfile
from tests.actors import test_gguf_mixtures
from tests.full_disk import files_of_at_most
from tests.mxfp4_models import make_mxfp4
from tests.quantized_models import make_model
from tests.tiny_models import make_tiny
from tests.unit.test_artifact import change_in_place


class Model:
    """A tiny model with an order of its neurons."""

    def __init__(self, path: Path, dtype: str = "") -> None:
        self.path, self.dtype = path, dtype
        self.config = stored_config(Checkpoint(path), read_config(path), dtype)
        self.geometry = BundleGeometry.of(self.config)
        draw = np.random.default_rng(0)
        layers = range(self.config.num_layers)
        self.order = np.array([draw.permutation(self.config.ffn_size) for _ in layers], np.int32)
        self.file = path / "hotcold" / self.geometry.file_name
        self.part = self.file.with_name(f"{self.file.name}.part")

    def write(self, on_bytes: Callable[[int, int], None] = lambda done, total: None) -> bytes:
        """Write the file; its content."""
        write_bundles(self.path, self.config, self.order, "drawn", self.dtype, on_bytes)
        return self.file.read_bytes()

    def read(self) -> BundleFile:
        """Open the file. Errors: ArtifactError."""
        return read_bundle_file(self.file, self.geometry, ModelIdentity.of(self.path))


def make_relu(folder: Path) -> Path:
    return make_tiny("llama-gqa", folder / "m")


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(make_relu(tmp_path))


@pytest.mark.parametrize(("name", "dtype"), [("q-llama", "q4"), ("q-opt", "")])
def test_each_neuron_is_where_the_file_says(tmp_path: Path, name: str, dtype: str) -> None:
    model = Model(make_model(name, tmp_path / "m"), dtype)
    content, geometry = model.write(), model.geometry
    assert len(content) == geometry.file_bytes
    found = model.read()
    np.testing.assert_array_equal(found.order, model.order)
    ids = [np.arange(size, dtype=np.int32) for size in model.config.ffn_sizes]
    weights = load_ffn(
        Checkpoint(model.path), model.config, ids, include_down_bias=False, dtype=dtype
    )
    bundles = np.frombuffer(content, np.uint8)[geometry.first_byte :]
    for row in (0, 17, model.config.ffn_size + 5):
        layer, neuron = divmod(row, model.config.ffn_size)
        place = layer * geometry.layer_bundles[0] + found.places()[layer][neuron]
        bundle = bundles[place * geometry.bundle_bytes :][: geometry.bundle_bytes]
        gate, rest = np.split(bundle, [geometry.gate_bytes])
        up = weights.up[row].tobytes() if weights.up.shape[0] else b""
        for part, rows in ((gate, weights.gate[row].tobytes()), (rest, up)):
            assert part.tobytes().startswith(rows)
        assert rest.tobytes()[len(up) :].startswith(weights.down[row].tobytes())
        assert rest.size % 512 == gate.size % 512 == 0
    assert damaged_bundles(found) == []


def test_files_made_before_there_were_mixtures_are_read(model: Model) -> None:
    """Their header, written anew; the rest of the file has not changed."""
    content, config = model.write(), model.config
    geometry = {
        "num_layers": config.num_layers,
        "num_neurons": config.ffn_size,
        "gate_dtype": "float32",
        "down_dtype": "float32",
        "gate_row_bytes": 4 * config.hidden_size,
        "up_row_bytes": 4 * config.hidden_size,
        "down_row_bytes": 4 * config.hidden_size,
        "version": 2,
    }
    crc = zlib.crc32(content[BLOCK_BYTES : model.geometry.done_start])
    facts = ModelIdentity.of(model.path).facts() | {"geometry": geometry}
    text = json.dumps(facts | {"order_name": "drawn", "tables_crc": crc}, sort_keys=True).encode()
    head = b"hotcold bundles\n" + np.array([len(text), zlib.crc32(text)], "<u4").tobytes()
    assert content[:BLOCK_BYTES] == (head + text).ljust(BLOCK_BYTES, b"\0")


@pytest.mark.parametrize("at_once", [1, 7])
def test_a_damaged_neuron_is_named_wherever_it_lies(
    model: Model, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """The last of a layer too, which may be read alone."""
    geometry, content = model.geometry, bytearray(model.write())
    rows = at_once % geometry.layer_bundles[0]
    monkeypatch.setattr(bundle_file, "_READ_BYTES", rows * geometry.bundle_bytes)
    places = [(0, 0), (0, geometry.layer_bundles[0] - 1), (geometry.num_layers - 1, 3)]
    for layer, place in places:
        first = geometry.first_byte + layer * geometry.span(0)[1]
        content[first + place * geometry.bundle_bytes] ^= 4
    model.file.write_bytes(content)
    order = model.read().order
    expected = [(layer, int(order[layer][place])) for layer, place in places]
    assert sorted(damaged_bundles(model.read())) == sorted(expected)


def test_a_wrong_norm_is_found(model: Model) -> None:
    """The header of a program that has updated the tables' checksum."""
    geometry, content = model.geometry, bytearray(model.write())
    layer, place = 1, 5
    at = geometry.norms_start + 4 * (layer * geometry.layer_bundles[0] + place)
    content[at : at + 4] = bytes(4)
    tables = bytes(content[geometry.order_start : geometry.done_start])
    identity = ModelIdentity.of(model.path)
    header = header_block(geometry, identity, "drawn", zlib.crc32(tables))
    model.file.write_bytes(header + content[BLOCK_BYTES:])
    neuron = int(model.read().order[layer][place])
    assert damaged_bundles(model.read()) == [(layer, neuron)]


class Disk:
    """What is asked of a disk that may lose, with its power, what came after the last barrier."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[Callable[[int], None] | None] = []  # None: a barrier
        for name in ("pwrite", "ftruncate", "fsync", "fdatasync"):
            patch.setattr(pack.os, name, self._noted(name, getattr(os, name)))

    def _noted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def ask(descriptor: int, *arguments: Any) -> Any:
            if name.endswith("sync"):
                self.asked.append(None)
            else:
                kept = tuple(bytes(one) if not isinstance(one, int) else one for one in arguments)
                self.asked.append(lambda other: real(other, *kept))
            return real(descriptor, *arguments)

        return ask

    def crashes(self) -> Iterator[list[Callable[[int], None]]]:
        """What has come to the disk by each moment: all before a barrier, any of what is after."""
        settled: list[Callable[[int], None]] = []
        for is_barrier, asked in itertools.groupby(self.asked, lambda one: one is None):
            if is_barrier:
                continue
            open_ones = [one for one in asked if one is not None]
            for kept in itertools.product((False, True), repeat=len(open_ones)):
                yield [*settled, *itertools.compress(open_ones, kept)]
            settled += open_ones


def test_a_loss_of_power_blesses_nothing_wrong(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the disk has kept of a run, the next one writes the same file as a run in peace.

    The run before it was of another order, and left the file of another whole kind.
    """
    whole = model.write()
    own, model.order = model.order, model.order[:, ::-1].copy()
    model.write()
    model.file.rename(model.part)
    with model.part.open("r+b") as stream:  # as if it were not whole yet
        stream.write(header_block(model.geometry, ModelIdentity.of(model.path), "drawn", None))
    left = model.part.read_bytes()
    model.order = own
    with monkeypatch.context() as patch:
        disk = Disk(patch)
        assert model.write() == whole
    num_crashes, num_went_on = 0, 0
    for kept in disk.crashes():
        model.file.unlink(missing_ok=True)
        model.part.write_bytes(left)
        with model.part.open("r+b") as stream:
            for write in kept:
                write(stream.fileno())
        begun: list[int] = []
        assert model.write(lambda done, total: begun.append(done)) == whole  # noqa: B023
        num_went_on += not begun or begun[0] > model.geometry.span(0)[1]
        num_crashes += 1
    assert num_crashes > 20 and num_went_on > 3


def test_what_another_process_is_writing_is_waited_for_and_taken(model: Model) -> None:
    """Where it is asked for: not written again by one that had opened it before it was whole."""
    is_written, may_go_on = threading.Event(), threading.Event()
    taken: list[Path] = []
    own = model.order[:, ::-1].copy()

    def write(done: int, total: int) -> None:
        is_written.set()
        may_go_on.wait(60)

    def take() -> None:
        arguments = model.path, model.config, own, "other", model.dtype
        taken.append(write_bundles(*arguments, accept_existing=True))

    first, second = (
        threading.Thread(target=model.write, args=(write,)),
        threading.Thread(target=take),
    )
    first.start()
    assert is_written.wait(60)
    with pytest.raises(ArtifactError, match="another process is making it"):
        model.write()
    second.start()
    second.join(0.2)
    assert second.is_alive() and not model.file.exists()
    may_go_on.set()
    first.join(60)
    second.join(60)
    assert taken == [model.file] and not model.part.exists()
    np.testing.assert_array_equal(model.read().order, model.order)
    assert damaged_bundles(model.read()) == []
    model.order = own
    model.write()  # without `accept_existing` it is made anew
    np.testing.assert_array_equal(model.read().order, own)


def test_a_full_disk_is_one_line(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    real, written = os.pwrite, []

    def fail(descriptor: int, content: bytes, place: int) -> int:
        written.append(len(content))
        if sum(written) > model.geometry.first_byte + model.geometry.span(0)[1]:
            raise OSError(28, "No space left on device")
        return real(descriptor, content, place)

    with monkeypatch.context() as patch:
        patch.setattr(pack.os, "pwrite", fail)
        with pytest.raises(ArtifactError, match=r"No space left on device\); run the same again"):
            model.write()
    assert not model.file.exists()
    model.write()
    assert damaged_bundles(model.read()) == []


def test_a_file_that_cannot_be_begun_is_not_there(model: Model) -> None:
    with (
        pytest.raises(ArtifactError, match=r"cannot be written \(File too large\)"),
        files_of_at_most(model.geometry.file_bytes - 1),
    ):
        model.write()
    assert not model.file.exists() and not model.part.exists()


def test_no_room_is_said_before(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = pack.shutil.disk_usage(model.path)._replace(free=4096)
    monkeypatch.setattr(pack.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ArtifactError, match=r"takes 290\.\d kB, and 4\.1 kB are free there"):
        model.write()
    assert list(model.file.parent.iterdir()) == []


def test_a_file_system_without_locks(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is written, and neither a whole run nor a stopped or killed one leaves a part."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(pack.fcntl, "flock", flock)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.write(stop)
    assert list(model.file.parent.iterdir()) == []
    killed = part_of(model.file)
    killed.write_bytes(b"some neurons")
    os.utime(killed, (0, 0))
    model.write()
    assert list(model.file.parent.iterdir()) == [model.file]
    assert damaged_bundles(model.read()) == []


def changed(content: bytes, place: int, by: bytes) -> bytes:
    return content[:place] + by + content[place + len(by) :]


def test_files_that_are_not_what_they_should_be(model: Model, tmp_path: Path) -> None:
    content, geometry = model.write(), model.geometry
    identity = ModelIdentity.of(model.path)
    other = ModelIdentity("other", "0" * 64)
    unfinished = header_block(geometry, identity, "drawn", None)
    lies = {
        "no bundle file": [
            b"",
            b"x" * 9000,
            content[:100],
            changed(content, 60, b"~"),
            changed(content, 16, b"\xff\xff\xff\xff"),
            changed(content, 16, b"\x02\0\0\0"),
        ],
        "is not whole": [content[:-1], content + b"\0", unfinished + content[BLOCK_BYTES:]],
        "belongs to the model 'other'": [
            header_block(geometry, other, "drawn", 0) + content[BLOCK_BYTES:]
        ],
        "another format or version": [
            header_block(BundleGeometry((1,), "q4", "q4", 8, 8, 8), identity, "", 0)
        ],
        "tables are damaged": [
            changed(content, geometry.order_start, b"\xff"),
            changed(content, geometry.checksums_start + 5, b"\1\2\3"),
        ],
    }
    for text, files in lies.items():
        for lie in files:
            model.file.write_bytes(lie)
            with pytest.raises(ArtifactError, match=text) as caught:
                model.read()
            assert "\n" not in str(caught.value) and str(model.file) in str(caught.value)
    model.file.unlink()
    with pytest.raises(ArtifactError, match="there is no bundle file"):
        model.read()


def test_a_mixtures_bundles_are_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each is one neuron, which takes a whole read: a profile does not order them."""
    path = make_tiny("qwen3-moe", tmp_path / "m")
    config = stored_config(Checkpoint(path), read_config(path), "")
    monkeypatch.setattr("hotcold.model.bundles.geometry._EXPERT_BUNDLE_BYTES", 1)
    geometry, identity = BundleGeometry.of(config), ModelIdentity.of(path)
    assert geometry.bundle_neurons == 1 and geometry.layer_bundles == config.ffn_sizes
    counts = np.random.default_rng(0).integers(0, 100, (config.num_layers, config.largest_ffn))
    profile = ActivationProfile(counts, 100, "drawn", "0")
    monkeypatch.setattr("hotcold.actors.setup.storage.own_profile", lambda *_: profile)
    ascending = [np.arange(size, dtype=np.int32) for size in config.ffn_sizes]
    found = read_bundle_file(pack_model(path, config), geometry, identity)
    assert all(map(np.array_equal, found.order, ascending))
    file = write_bundles(path, config, [ids[::-1] for ids in ascending], "drawn")
    with pytest.raises(ArtifactError, match="experts are not in their order; make it again"):
        read_bundle_file(file, geometry, identity)


MODELS: dict[str, Callable[[Path], Path]] = {
    "Q4_0": lambda folder: test_gguf_mixtures.quantized("Q4_0", folder),
    "Q4_K_M": lambda folder: test_gguf_mixtures.quantized("Q4_K_M", folder),
    "three": test_gguf_mixtures.three_formats,
    "mxfp4": make_mxfp4,
}


@pytest.fixture
def small_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert of a tiny model is several of them."""
    monkeypatch.setattr(geometries, "_EXPERT_BUNDLE_BYTES", 40_000)


@pytest.mark.usefixtures("small_bundles")
@pytest.mark.parametrize("name", ["three", "mxfp4"])
def test_rows_are_where_the_file_says(name: str, tmp_path: Path) -> None:
    """A bundle: K gate rows, K up rows; then some of its expert's down rows, whole ones."""
    path = MODELS[name](tmp_path)
    config = packed_config(path)
    geometry, checkpoint = BundleGeometry.of(config), Checkpoint(path)
    file = pack_model(path, config)
    content = np.frombuffer(file.read_bytes(), np.uint8)
    assert content.size == geometry.file_bytes
    every = [np.arange(size, dtype=np.int32) for size in config.ffn_sizes]
    weights = load_ffn(checkpoint, config, every, include_down_bias=False)
    with TensorReader(checkpoint) as reader:
        down = read_down_outputs(reader, config, every)
        gates, ups = read_gates(reader, config, weights)
    count, at = geometry.bundle_neurons, geometry.first_byte
    for layer, spec in enumerate(config.layers):
        assert at == geometry.span(layer)[0]
        for block, size in enumerate(spec.ffn.block_sizes):
            first_bytes, down_bytes = geometry.part_bytes(layer, block)
            assert first_bytes % 512 == down_bytes % 512 == 0
            num_bundles, _, (row, _, _), height = geometry.blocks[layer][block]
            assert num_bundles > 1
            shape = num_bundles, first_bytes + down_bytes
            bundles = content[at : at + shape[0] * shape[1]].reshape(shape)
            at += bundles.size
            for rows, begin in ((gates, 0), (ups, count * row)):
                found = bundles[:, begin : begin + count * row].reshape(-1, row)
                assert found[:size].tobytes() == rows.matrix(layer, block).tobytes()
                assert not found[size:].any()
            wanted = down.matrix(layer, block)
            outputs = bundles[:, first_bytes:][:, : height * wanted.shape[1]]
            outputs = np.ascontiguousarray(outputs).reshape(-1, wanted.shape[1])
            assert outputs[: len(wanted)].tobytes() == wanted.tobytes()
            assert not outputs[len(wanted) :].any()
    if name == "three":  # of formats that have as many bytes in memory as in the file
        blocks = [*chain(*geometry.blocks)]
        padded = 2 * 512 * geometry.num_bundles + geometry.bundle_bytes * len(blocks)
        stored = [t for t in GGUFReader(path).tensors if "ffn_" in t.name and t.n_bytes > 1 << 14]
        assert len(stored) == 3 * (2 + 2 * 2)
        assert 0 <= geometry.data_bytes - sum(int(t.n_bytes) for t in stored) < padded
    tables = read_bundle_file(file, geometry, ModelIdentity.of(path))
    lengths = [length for length in tables.norms.reshape(-1) if length > 0]
    np.testing.assert_array_equal(lengths, down_lengths(down))
    assert damaged_bundles(tables) == []


@pytest.mark.usefixtures("small_bundles")
@pytest.mark.parametrize(
    ("make", "whole", "damaged"),
    [
        (make_relu, "neurons are whole", "1 neurons are damaged, the first is neuron 3 of layer 0"),
        (MODELS["Q4_0"], "bundles are whole", "1 bundles are damaged, the first is bundle 3"),
    ],
)
def test_the_command(
    make: Callable[[Path], Path],
    whole: str,
    damaged: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And a plan measures reads, also where blocks have bundles of their own numbers."""
    path = make(tmp_path)
    assert main(["pack", str(path)]) == main(["pack", str(path), "--verify"]) == 0
    config = packed_config(path)
    geometry = BundleGeometry.of(config)
    assert whole in capsys.readouterr().out
    (file,) = tmp_path.glob("**/bundles-*.bin")
    disk = offload_plan.measured_disk(file, config)
    assert disk.bytes_per_s > 0 and disk.most_bytes_per_s > 0
    content = file.read_bytes()
    for at in (0, geometry.gate_bytes + 7):  # of each part
        spoilt = bytearray(content)
        spoilt[geometry.first_byte + 3 * geometry.bundle_bytes + at] ^= 1
        file.write_bytes(spoilt)
        assert main(["pack", str(path), "--verify"]) == 1
        assert damaged in capsys.readouterr().err
    assert main(["pack", str(path)]) == main(["pack", str(path), "--verify"]) == 0


def test_files_of_other_cuts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a row a neuron is another file, beside this one."""
    path = MODELS["Q4_0"](tmp_path)
    config = packed_config(path)
    file, identity = pack_model(path, config), ModelIdentity.of(path)
    other = pack_model(path, read_model(path))
    assert file.name != other.name and file.exists() and other.exists()
    geometry = BundleGeometry.of(config)
    (first, *rest), *layers = geometry.blocks
    changed = ((first._replace(outputs=first.outputs - 1), *rest), *layers)
    with pytest.raises(ArtifactError, match="another format or version; make it again"):
        read_bundle_file(file, replace(geometry, blocks=changed), identity)
    read_bundle_file(file, geometry, identity)


def least_of(system: SystemConfig, config: ModelConfig) -> SystemConfig:
    """The system with the least on storage that the budget line names."""
    with pytest.raises(MemoryBudgetError) as caught:
        storage_within(None, system, config, 0)
    least = int(str(caught.value).split("(")[1].split(" bytes")[0])
    return replace(system, storage=storage_within(None, system, config, least))


@pytest.mark.usefixtures("small_bundles")
@pytest.mark.parametrize(
    ("name", "services", "pieces"),
    [("Q4_K_M", 2, 1), ("mxfp4", 2, 2)],
)
def test_slots_take_what_is_promised(name: str, services: int, pieces: int, tmp_path: Path) -> None:
    path = MODELS[name](tmp_path)
    options = SystemOptions(context_length=64, num_threads=2, num_cpu_actors=services)
    config = read_model(path)
    system, config = in_memory(choose_system(path, config, options), config)
    assert system.down_transposed and system.num_cpu_actors == services
    pack_model(path, config)
    system = least_of(replace(system, expert_pieces=pieces), config)
    geometry, taken = BundleGeometry.of(config), 0
    assert system.storage is not None
    file = read_bundle_file(Path(system.storage.path), geometry, ModelIdentity.of(path))
    for spec in service_specs(system, config)[1:]:
        share, ids = offloaded_share(spec, config), spec.neuron_ids or []
        weights = load_ffn_biases(Checkpoint(path), config, ids, spec.has_down_bias)
        layers = [layer.ffn for layer in config.layers]
        weights.stripes = shard_stripes(
            weights.starts, weights.neuron_ids, config, spec.stripes, of_outputs=True
        )
        runs = runs_of_stripes(config, spec.stripes)
        store = ExpertStore(file, layers, weights, share, 1, runs=runs)
        try:
            taken += store.stored.outputs.rows.nbytes
        finally:
            store.close()
    promised = bytes_in_memory(config, system.storage) + geometry.more_bytes
    tables = 48 * system.storage.num_up_downs  # of the rows' owners, counted beside them
    assert 0.8 * (promised - tables) < taken <= promised


def test_a_system_beyond_memory_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if processes and buffers of reads, beside which this model is small, took nothing."""
    path = MODELS["Q4_K_M"](tmp_path)
    options = SystemOptions(context_length=64, num_cpu_actors=1)
    whole, config = prepare_system(path, options)
    monkeypatch.setattr(accounts, "more_process_bytes", lambda system, config: 0)
    monkeypatch.setattr(
        accounts,
        "offloaded_ffn_bytes",
        lambda system, config, kept: bytes_in_memory(config, kept),
    )
    total = account(whole, config).total_bytes
    for mode in ("dense", "exact"):
        asked = replace(options, cpu_memory_bytes=total - 1, mode=mode)
        system, stored = prepare_system(path, asked)
        assert system.storage is not None and system.storage.path.endswith("-outputs.bin")
        assert system.down_transposed and stored.block_formats == config.block_formats


def test_a_model_that_was_changed_in_place_has_no_bundles(model: Model) -> None:
    """Not those of its old FFN: neither whole ones, nor what an interrupted run has left."""
    old = model.write()
    weights = model.path / "model.safetensors"
    name = next(name for name in Checkpoint(model.path).names() if "1.mlp.down" in name)
    change_in_place(weights, SafetensorsFile(weights).entries[name].end - 2)
    with pytest.raises(ArtifactError, match="or weights differ; make it again"):
        model.read()
    model.file.rename(model.part)
    identity = ModelIdentity.of(model.path)
    begun = header_block(model.geometry, identity, "drawn", None)
    assert begun != old[:BLOCK_BYTES]
    new = model.write()
    start = model.geometry.first_byte
    assert new[start:] != old[start:] and damaged_bundles(model.read()) == []
