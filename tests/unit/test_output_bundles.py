"""Bundle files of mixtures whose down rows are an output each: content, sizes, runs that stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.cpu.expert_store import ExpertStore
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.protocol.stripes import runs_of_stripes, shard_stripes
from hotcold.actors.setup import storage
from hotcold.actors.setup.account import Account, account
from hotcold.actors.setup.choose import choose_system
from hotcold.actors.setup.preflight import in_memory, packed_config, prepare_system, read_model
from hotcold.actors.setup.shards import service_specs
from hotcold.actors.setup.storage import offloaded_share, pack_model, storage_within
from hotcold.actors.setup.storage_shares import bytes_in_memory
from hotcold.jobs.cli import main
from hotcold.jobs.support import offload_plan
from hotcold.model.bundles import geometry as geometries
from hotcold.model.bundles.bundle_file import damaged_bundles, read_bundle_file
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError, MemoryBudgetError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.down_outputs import down_lengths, read_down_outputs
from hotcold.model.weights.ffn import load_ffn, load_ffn_biases
from hotcold.model.weights.tensor_reader import TensorReader
from tests.actors import test_gguf_mixtures
from tests.mxfp4_models import make_mxfp4

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
    count, row = geometry.bundle_neurons, geometry.gate_row_bytes
    at = geometry.first_byte
    for layer, spec in enumerate(config.layers):
        first_bytes, down_bytes = geometry.part_bytes(layer)
        assert first_bytes % 512 == down_bytes % 512 == 0 and at == geometry.span(layer)[0]
        for block, size in enumerate(spec.ffn.block_sizes):
            num_bundles, height = geometry.down_blocks[layer][block][:2]
            assert num_bundles > 1
            shape = num_bundles, first_bytes + down_bytes
            bundles = content[at : at + shape[0] * shape[1]].reshape(shape)
            at += bundles.size
            own = slice(*weights.starts[layer, block : block + 2])
            for rows, begin in ((weights.gate, 0), (weights.up, count * row)):
                found = bundles[:, begin : begin + count * row].reshape(-1, row)
                assert found[:size].tobytes() == rows[own].tobytes()
                assert not found[size:].any()
            wanted = down.matrix(layer, block)
            outputs = bundles[:, first_bytes:][:, : height * wanted.shape[1]]
            outputs = np.ascontiguousarray(outputs).reshape(-1, wanted.shape[1])
            assert outputs[: len(wanted)].tobytes() == wanted.tobytes()
            assert not outputs[len(wanted) :].any()
    tables = read_bundle_file(file, geometry, ModelIdentity.of(path))
    lengths = [length for length in tables.norms.reshape(-1) if length > 0]
    np.testing.assert_array_equal(lengths, down_lengths(down))
    assert damaged_bundles(tables) == []


@pytest.mark.usefixtures("small_bundles")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a plan measures reads of a file whose blocks have bundles of their own numbers, too."""
    path = MODELS["Q4_0"](tmp_path)
    assert main(["pack", str(path)]) == 0
    assert main(["pack", str(path), "--verify"]) == 0
    config = packed_config(path)
    geometry = BundleGeometry.of(config)
    assert f"all {geometry.num_bundles} bundles are whole" in capsys.readouterr().out
    (file,) = tmp_path.glob("**/bundles-q4-outputs.bin")
    disk = offload_plan.measured_disk(file, config)
    assert disk.bytes_per_s > 0 and disk.most_bytes_per_s > 0
    content = file.read_bytes()
    for at in (0, geometry.gate_bytes + 7):  # of each part
        damaged = bytearray(content)
        damaged[geometry.first_byte + 3 * geometry.bundle_bytes + at] ^= 1
        file.write_bytes(damaged)
        assert main(["pack", str(path), "--verify"]) == 1
        assert "1 bundles are damaged, the first is bundle 3" in capsys.readouterr().err


def test_files_of_other_cuts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a row a neuron is another file, beside this one."""
    path = MODELS["Q4_0"](tmp_path)
    config = packed_config(path)
    file, identity = pack_model(path, config), ModelIdentity.of(path)
    other = pack_model(path, read_model(path))
    assert file.name != other.name and file.exists() and other.exists()
    geometry = BundleGeometry.of(config)
    (first, *rest), *layers = geometry.down_blocks
    changed = ((first._replace(rows=first.rows - 1), *rest), *layers)
    with pytest.raises(ArtifactError, match="another format or version; make it again"):
        read_bundle_file(file, replace(geometry, down_blocks=changed), identity)
    read_bundle_file(file, geometry, identity)


def least_of(system: SystemConfig, config: ModelConfig) -> SystemConfig:
    """The system with the least on storage that the budget line names."""
    need = Account(0, 0, config.num_neurons * 10_000, 0, 0, 0)
    with pytest.raises(MemoryBudgetError) as caught:
        storage_within(None, need, system, config, 0)
    least = int(str(caught.value).split("(")[1].split(" bytes")[0])
    return replace(system, storage=storage_within(None, need, system, config, least))


@pytest.mark.usefixtures("small_bundles")
@pytest.mark.parametrize(
    ("name", "services", "pieces"),
    [("Q4_K_M", 2, 1), ("mxfp4", 2, 2)],
)
def test_slots_take_what_is_promised(name: str, services: int, pieces: int, tmp_path: Path) -> None:
    path = MODELS[name](tmp_path)
    options = SystemOptions(context_length=64, num_threads=2, num_cpu_actors=services)
    config = read_model(path)
    system, config = in_memory(path, choose_system(path, config, options), config)
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
            arrays = store.arrays
            taken += arrays.gate.nbytes + arrays.up.nbytes + store.stored.outputs.rows.nbytes
        finally:
            store.close()
    promised = bytes_in_memory(config, system.storage) + geometry.more_down_bytes
    tables = 48 * system.storage.num_up_downs  # of the rows' owners, counted beside them
    assert 0.8 * (promised - tables) < taken <= promised


def test_a_system_beyond_memory_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if processes and buffers of reads, beside which this model is small, took nothing."""
    path = MODELS["Q4_K_M"](tmp_path)
    options = SystemOptions(context_length=64, num_cpu_actors=1)
    whole, config = prepare_system(path, options)
    monkeypatch.setattr(storage, "more_process_bytes", lambda system, config: 0)
    monkeypatch.setattr(
        storage,
        "offloaded_ffn_bytes",
        lambda system, config, kept: bytes_in_memory(config, kept),
    )
    total = account(whole, config).total_bytes
    for mode in ("dense", "exact"):
        asked = replace(options, cpu_memory_bytes=total - 1, mode=mode)
        system, stored = prepare_system(path, asked)
        assert system.storage is not None and system.storage.path.endswith("-outputs.bin")
        assert system.down_transposed and stored.down_formats == config.down_formats
