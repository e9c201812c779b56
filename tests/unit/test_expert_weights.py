"""Loaded neurons of mixtures, beside the same tensors read from the file by their names alone."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hotcold.model.config.build import read_config
from hotcold.model.config.weight_formats import requested_dtype
from hotcold.model.errors import CheckpointError, ConfigError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import load_attention
from hotcold.model.weights.check import check_tensors, stored_config
from hotcold.model.weights.ffn import (
    FfnWeights,
    ffn_layers,
    load_ffn,
    load_ffn_biases,
    load_gate,
    load_up,
    read_ffn,
)
from hotcold.model.weights.quantized_checkpoint import write_quantized
from hotcold.model.weights.sizes import attention_bytes, ffn_bytes, num_parameters
from hotcold.model.weights.tensor_reader import TensorReader
from hotcold.numba_kernels.load.convert import to_float32
from tests.tiny_models import MIXTURES, Variant, make_tiny
from tests.unit.test_mixtures import FILES, write_gguf

Tensors = dict[str, np.ndarray]
# gate, up (I, d) and down (d, I) of a block, and their biases or ().
Block = tuple[np.ndarray, ...]


_NAMES = ("gate_proj", "up_proj", "down_proj")


def blocks_of(tensors: Tensors, variant: str, layer: int) -> list[Block]:
    """A layer's blocks by the tensors' names, which are spelled out here."""
    prefix = f"model.layers.{layer}."
    own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

    def named(
        form: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> Block:
        return tuple(own[f"{form}.{name}.weight"] for name in names)

    def each(
        form: str, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    ) -> list[Block]:
        count = sum(n.startswith(f"{form}.") and n.endswith(f".{names[0]}.weight") for n in own)
        return [tuple(own[f"{form}.{e}.{name}.weight"] for name in names) for e in range(count)]

    if "mlp.gate_proj.weight" in own:
        return [named("mlp")]
    if variant.startswith(("qwen", "olmoe", "glm")):
        found = each("mlp.experts")
        shared = next(
            (n.split(".gate_proj")[0] for n in own if ".shared_exp" in n and "gate_proj" in n), ""
        )
        return [*found, named(shared)] if shared else found
    if variant.startswith(("mixtral", "turbo")):
        return each("block_sparse_moe.experts", ("w1", "w3", "w2"))
    if variant.startswith("small"):
        return each("block_sparse_moe.experts", ("gate", "up", "down"))
    if variant.startswith("granite"):
        both, down = (own[f"block_sparse_moe.{n}_linear.weight"] for n in ("input", "output"))
        half = both.shape[1] // 2
        found = [(b[:half], b[half:], d) for b, d in zip(both, down, strict=True)]
        if "shared_mlp.input_linear.weight" in own:
            both = own["shared_mlp.input_linear.weight"]
            half = len(both) // 2
            found.append((both[:half], both[half:], own["shared_mlp.output_linear.weight"]))
        return found
    assert variant.startswith("gpt-oss")
    parts = (own[f"mlp.experts.{n}"] for n in
             ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"))  # fmt: skip
    return [
        (b[:, ::2].T, b[:, 1::2].T, d.T, bias[::2], bias[1::2], out)
        for b, d, bias, out in zip(*parts, strict=True)
    ]


ROUTERS = {
    "mixtral": "block_sparse_moe.gate.weight",
    "turbo": "block_sparse_moe.gate.weight",
    "small": "block_sparse_moe.primary_router.weight",
    "granite": "block_sparse_moe.router.layer.weight",
    "gpt-oss": "mlp.router.weight",
}


def require_equal(
    weights: FfnWeights, ids: list[np.ndarray], tensors: Tensors, variant: str
) -> None:
    """Compare all rows and biases of the neurons `ids`, to the bit."""
    for layer, own in enumerate(ids):
        blocks = blocks_of(tensors, variant, layer)
        gate, up = (np.concatenate([block[i] for block in blocks]) for i in (0, 1))
        down = np.concatenate([block[2].T for block in blocks])
        part = weights.part(layer)
        assert np.array_equal(weights.neuron_ids[part], own)
        assert np.array_equal(to_float32(weights.gate[part]), gate[own])
        assert np.array_equal(to_float32(weights.up[part]), up[own])
        assert np.array_equal(to_float32(weights.down[part]), down[own])
        ends = np.append(0, np.cumsum([len(block[0]) for block in blocks]))
        counts = [((own >= a) & (own < b)).sum() for a, b in pairwise(ends)]
        assert np.array_equal(np.diff(weights.starts[layer])[: len(blocks)], counts)
        assert (np.diff(weights.starts[layer])[len(blocks) :] == 0).all()
        if len(blocks[0]) > 3:
            gates, ups = (np.concatenate([block[i] for block in blocks]) for i in (3, 4))
            assert np.array_equal(weights.gate_bias[part], gates[own])
            assert np.array_equal(weights.up_bias[part], ups[own])
            downs = np.stack([block[5] for block in blocks])
            assert np.array_equal(weights.down_bias[layer], downs)
        else:
            assert not weights.gate_bias.size and not weights.down_bias.size


def shuffled(sizes: list[int], rng: np.random.Generator) -> np.ndarray:
    """About half of the neurons, in any order within their block, of some blocks none."""
    found, first = [], 0
    for block, size in enumerate(sizes):
        own = rng.permutation(size)[: 0 if block == 1 else size // 2 + 1]
        found.append(first + own)
        first += size
    return np.concatenate(found).astype(np.int32)


def everything(config: Any) -> list[np.ndarray]:
    return [np.arange(size, dtype=np.int32) for size in config.ffn_sizes]


@pytest.mark.parametrize("variant", MIXTURES)
def test_rows_are_the_checkpoints(variant: str, tmp_path: Path) -> None:
    make_tiny(variant, tmp_path)
    tensors, checkpoint = load_file(tmp_path / "model.safetensors"), Checkpoint(tmp_path)
    config = read_config(tmp_path)
    check_tensors(checkpoint, config)
    rng = np.random.default_rng(3)
    some = [shuffled(list(layer.ffn.block_sizes), rng) for layer in config.layers]
    for ids in (everything(config), some):
        weights = load_ffn(checkpoint, config, ids, include_down_bias=True)
        require_equal(weights, ids, tensors, variant)
        require_rows_alone(checkpoint, config, ids, weights)
    whole = load_ffn(checkpoint, config, everything(config), include_down_bias=True)
    for layer in range(config.num_layers):
        part = whole.part(layer)
        for load, rows, bias in (
            (load_gate, whole.gate, whole.gate_bias),
            (load_up, whole.up, whole.up_bias),
        ):
            found, own_bias = load(checkpoint, config, layer)
            assert np.array_equal(found, rows[part]) and np.array_equal(own_bias, bias[part])
    stored, weights = stored_config(checkpoint, config), whole
    arrays = (weights.gate, weights.up, weights.down, weights.gate_bias, weights.up_bias)
    counted = sum(array.nbytes for array in (*arrays, weights.down_bias, weights.neuron_ids))
    outer = whole.predictors.outer
    counted += whole.predictors.inner.nbytes  # and outer's without gaps
    counted += sum(outer.matrix(*at).nbytes for at in np.ndindex(*outer.places.shape[:2]))
    assert ffn_bytes(stored, len(weights.neuron_ids)) == counted


@pytest.mark.parametrize("num_services", [2, 3])
def test_predictors_are_counted_in_each_service(num_services: int, tmp_path: Path) -> None:
    make_tiny("turbosparse-mixtral", tmp_path)
    checkpoint, config = Checkpoint(tmp_path), read_config(tmp_path)
    counted = num_neurons = 0
    for service in range(num_services):
        own = [ids[service::num_services] for ids in everything(config)]
        weights = load_ffn(checkpoint, config, own, include_down_bias=False)
        outer = weights.predictors.outer
        rows = (weights.gate, weights.up, weights.down, weights.predictors.inner)
        counted += sum(array.nbytes for array in (*rows, weights.neuron_ids))
        counted += sum(outer.matrix(*at).nbytes for at in np.ndindex(*outer.places.shape[:2]))
        num_neurons += weights.neuron_ids.size
    stored = stored_config(checkpoint, config)
    assert ffn_bytes(stored, num_neurons, num_services) == counted > ffn_bytes(stored, num_neurons)


def require_rows_alone(
    checkpoint: Checkpoint, config: Any, ids: list[np.ndarray], whole: FfnWeights
) -> None:
    """Layer after layer, as a GPU and bundles get them, the rows are the same."""
    with TensorReader(checkpoint) as reader:
        for layer, one in enumerate(ffn_layers(reader, config, ids)):
            part = whole.part(layer)
            for name in ("gate", "up", "down", "gate_bias", "up_bias"):
                whole_rows, own = getattr(whole, name), getattr(one, name)
                assert np.array_equal(own, whole_rows[part] if whole_rows.size else own)
            assert np.array_equal(one.down_bias[layer], whole.down_bias[layer])


def test_experts_in_several_files(tmp_path: Path) -> None:
    """A layer's experts are where the index says."""
    make_tiny("qwen2-moe", tmp_path, shards=5)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 3
    tensors = {name: rows for file in files for name, rows in load_file(file).items()}
    config, checkpoint = read_config(tmp_path), Checkpoint(tmp_path)
    weights = load_ffn(checkpoint, config, everything(config), include_down_bias=True)
    require_equal(weights, everything(config), tensors, "qwen2-moe")


def test_predictors_are_the_checkpoints(tmp_path: Path) -> None:
    make_tiny("turbosparse-mixtral", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    form = "model.layers.{}.block_sparse_moe.experts.{}.predictor.fc{}.weight"
    for expert in range(5):  # layers' predictors are of different sizes
        tensors[form.format(1, expert, 1)] = np.tile(tensors[form.format(1, expert, 1)], (2, 1))
        tensors[form.format(1, expert, 2)] = np.tile(tensors[form.format(1, expert, 2)], (1, 2))
    save_file(tensors, file, metadata={"format": "pt"})
    config, checkpoint = read_config(tmp_path), Checkpoint(tmp_path)
    check_tensors(checkpoint, config)
    rng = np.random.default_rng(3)
    some = [shuffled(list(layer.ffn.block_sizes), rng) for layer in config.layers]
    for ids in (everything(config), some):
        weights = load_ffn(checkpoint, config, ids, include_down_bias=True)
        inner, starts, outer = weights.predictors
        biases = load_ffn_biases(checkpoint, config, ids, include_down_bias=True)
        assert np.array_equal(biases.predictors.inner, inner)
        for layer, expert in np.ndindex(3, 5):
            own = ids[layer][ids[layer] // 40 == expert] % 40
            part = slice(*starts[layer, expert : expert + 2])
            first, second = (tensors[form.format(layer, expert, i)] for i in (1, 2))
            assert np.array_equal(inner[part], first if len(own) else first[:0])
            if len(own):
                assert np.array_equal(outer.matrix(layer, expert), second[own])
    assert not load_ffn(*_dense(tmp_path / "dense"), include_down_bias=True).predictors.inner.size


def _dense(path: Path) -> tuple[Checkpoint, Any, list[np.ndarray]]:
    config = read_config(make_tiny("mixtral", path))
    return Checkpoint(path), config, everything(config)


@pytest.mark.parametrize("variant", MIXTURES)
def test_routers_and_sinks_are_the_checkpoints(variant: str, tmp_path: Path) -> None:
    make_tiny(variant, tmp_path)
    tensors, config = load_file(tmp_path / "model.safetensors"), read_config(tmp_path)
    attention = load_attention(Checkpoint(tmp_path), config)
    require_routers(attention.routers, tensors, variant, config.num_layers)
    for layer in range(config.num_layers):
        sinks = tensors.get(f"model.layers.{layer}.self_attn.sinks", np.empty(0, np.float32))
        assert np.array_equal(attention.vectors.sinks[layer], sinks)
    assert (attention.vectors.sinks.size > 0) == variant.startswith("gpt-oss")
    counted = sum(array.nbytes for array in vars(attention).values())
    assert attention_bytes(stored_config(Checkpoint(tmp_path), config)) == counted


def require_routers(routers: Any, tensors: Tensors, variant: str, num_layers: int) -> None:
    form = next(
        (name for start, name in ROUTERS.items() if variant.startswith(start)), "mlp.gate.weight"
    )
    for layer in range(num_layers):
        rows = tensors.get(f"model.layers.{layer}.{form}", np.empty((0, 48), np.float32))
        part = slice(routers.starts[layer], routers.starts[layer + 1])
        assert np.array_equal(routers.rows[part], rows)
        for values, name in (
            (routers.bias, "mlp.router.bias"),
            (routers.selection_bias, "mlp.gate.e_score_correction_bias"),
        ):
            stored = tensors.get(f"model.layers.{layer}.{name}", np.empty(0, np.float32))
            assert np.array_equal(values[part], stored)
        gate = tensors.get(f"model.layers.{layer}.mlp.shared_expert_gate.weight")
        if gate is not None:
            assert np.array_equal(routers.shared[layer], gate[0])


@pytest.mark.parametrize("layout", ["stacked", "merged", "split"])
@pytest.mark.parametrize("case", FILES)
def test_rows_of_gguf_are_the_checkpoints(case: str, layout: str, tmp_path: Path) -> None:
    variant = FILES[case][0]
    if layout != "stacked" and variant.startswith("gpt-oss"):
        pytest.skip("its files have no other layout")
    make_tiny(variant, tmp_path)
    write_gguf(tmp_path, case, layout)
    path = tmp_path / "m.gguf"
    config, checkpoint = read_config(path), Checkpoint(path)
    check_tensors(checkpoint, config)
    rng = np.random.default_rng(3)
    some = [shuffled(list(layer.ffn.block_sizes), rng) for layer in config.layers]
    tensors = load_file(tmp_path / "model.safetensors")
    for ids in (everything(config), some):
        weights = load_ffn(checkpoint, config, ids, include_down_bias=True)
        require_equal(weights, ids, tensors, variant)
    attention = load_attention(checkpoint, config)
    require_routers(attention.routers, tensors, variant, config.num_layers)


def wide(variant: str, path: Path, **others: Any) -> Path:
    """With rows of whole groups and blocks, or other sizes, of those that it has."""
    made = MIXTURES[variant]
    sizes = {"hidden_size": 256, "moe_intermediate_size": 64, "intermediate_size": 96}
    sizes |= {"shared_expert_intermediate_size": 32, "head_dim": 16} | others
    name = f"{variant}-wide"
    changed = {
        key: value for key, value in sizes.items() if key in made.keywords or "hidden" in key
    }
    variants = {name: Variant(made.func, *made.args, **(made.keywords | changed))}
    with mock.patch.dict(MIXTURES, variants):
        return make_tiny(name, path)


@pytest.mark.parametrize("dtype", ["q8", "q4", "f16"])
@pytest.mark.parametrize("variant", ["qwen2-moe", "granite-moe", "mixtral"])
def test_rows_are_quantized_as_others(variant: str, dtype: str, tmp_path: Path) -> None:
    """As the same rows in a dense model are: each is quantized alone."""
    wide(variant, tmp_path)
    config, tensors = read_config(tmp_path), load_file(tmp_path / "model.safetensors")
    loaded = load_ffn(Checkpoint(tmp_path), config, everything(config), include_down_bias=True,
                      dtype=dtype)  # fmt: skip
    step = {"q8": 1 / 127, "q4": 1 / 7, "f16": 2.0**-10}[dtype]
    for layer in range(config.num_layers):
        blocks = blocks_of(tensors, variant, layer)
        part = loaded.part(layer)
        for rows, index in ((loaded.gate, 0), (loaded.up, 1), (loaded.down, 2)):
            expected = np.concatenate([b[2].T if index == 2 else b[index] for b in blocks])
            found = to_float32(rows[part])
            largest = np.abs(expected).max(axis=1, keepdims=True)
            assert (np.abs(found - expected) <= largest * step).all()
            assert not np.array_equal(found, expected)


@pytest.mark.parametrize("variant", ["qwen2-moe", "granite-moe", "gpt-oss", "glm4-moe-groups"])
def test_a_quantized_copy_has_the_rows_of_dtype(variant: str, tmp_path: Path) -> None:
    original, copy = wide(variant, tmp_path / "original"), tmp_path / "copy"
    write_quantized(original, copy, "q8")
    config = read_config(copy)
    check_tensors(Checkpoint(copy), config)
    assert stored_config(Checkpoint(copy), config).dtype_of("down") == "q8"
    ids = everything(config)
    found = load_ffn(Checkpoint(copy), config, ids, include_down_bias=True)
    expected = load_ffn(Checkpoint(original), config, ids, include_down_bias=True, dtype="q8")
    for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias", "starts"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))
    routers = [load_attention(Checkpoint(path), config).routers for path in (copy, original)]
    assert all(np.array_equal(a, b) for a, b in zip(*routers, strict=True))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("variant", ["qwen2-moe", "granite-moe-shared", "gpt-oss"])
def test_halves_are_kept_to_the_bit(variant: str, dtype: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file as load_torch

    make_tiny(variant, tmp_path, dtype)
    config = read_config(tmp_path)
    weights = load_ffn(Checkpoint(tmp_path), config, everything(config), include_down_bias=True)
    assert weights.gate.dtype.itemsize == weights.down.dtype.itemsize == 2
    tensors = {n: t.float().numpy() for n, t in load_torch(tmp_path / "model.safetensors").items()}
    require_equal(weights, everything(config), tensors, variant)
    require_routers(
        load_attention(Checkpoint(tmp_path), config).routers, tensors, variant, config.num_layers
    )


@pytest.mark.parametrize("dtype", ["", "q8"])
@pytest.mark.parametrize("variant", ["gpt-oss", "granite-moe", "qwen3-moe"])
def test_no_tensor_is_held_twice(variant: str, dtype: str, tmp_path: Path) -> None:
    """Beside the rows themselves little is allocated; mapped files are not counted."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 512}
    experts = dict.fromkeys(("num_local_experts", "num_experts"), 12)
    wide(variant, tmp_path, **sizes, **experts, num_hidden_layers=2)
    config = read_config(tmp_path)
    ids = everything(config)
    with TensorReader(Checkpoint(tmp_path), dtype=requested_dtype(dtype), max_rows=1) as reader:
        read_ffn(reader, config, ids, include_down_bias=True)  # compiles
    tracemalloc.start()
    try:
        weights = load_ffn(Checkpoint(tmp_path), config, ids, include_down_bias=True, dtype=dtype)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    expert = 2 * 4 * 512 * 512  # the bytes of its gate and up
    assert weights.gate.nbytes > (3 if dtype else 10) * expert
    # Threads quantize columns from 2 MiB each.
    assert peak < (4 * expert if dtype else expert)


Change = Callable[[Tensors], Any]


def _put(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda tensors: tensors.update({name: np.ascontiguousarray(change(tensors[name]))})


def _without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def _and(name: str, like: str) -> Change:
    return lambda tensors: tensors.update({name: tensors[like]})


def _nan(rows: np.ndarray) -> np.ndarray:
    rows = rows.copy()
    rows.flat[-1] = np.nan
    return rows


LAYER = "model.layers.1."
QWEN, GRANITE = f"{LAYER}mlp.", f"{LAYER}block_sparse_moe."
HOSTILE: dict[str, tuple[str, Change, str]] = {
    "no expert": ("qwen3-moe", _without(f"{QWEN}experts.4.up_proj.weight"),
                  "mlp.experts.4.up_proj.weight' is missing; download the complete model"),
    "no first expert": ("qwen3-moe", _without(f"{QWEN}experts.0.gate_proj.weight"),
                        "mlp.experts.0.gate_proj.weight' is missing"),
    "one more expert": ("qwen3-moe", _and(f"{QWEN}experts.7.gate_proj.weight",
                                          f"{QWEN}experts.6.gate_proj.weight"),
                        "mlp.experts.7.gate_proj.weight' is not part of the model"),
    "no router": ("mixtral", _without(f"{GRANITE}gate.weight"),
                  "block_sparse_moe.gate.weight' is missing"),
    "router of fewer": ("mixtral", _put(f"{GRANITE}gate.weight", lambda rows: rows[1:]),
                        "has shape [4, 48], the model's configuration asks for [5, 48]"),
    "router with NaN": ("mixtral", _put(f"{GRANITE}gate.weight", _nan), "has NaN or infinite"),
    "expert with NaN": ("mixtral", _put(f"{GRANITE}experts.4.w2.weight", _nan),
                        "experts.4.w2.weight' has NaN or infinite"),
    "stack with NaN": ("granite-moe", _put(f"{GRANITE}input_linear.weight", _nan),
                       "input_linear.weight' has NaN or infinite"),
    "narrow expert": ("mixtral", _put(f"{GRANITE}experts.2.w1.weight", lambda rows: rows[:, :40]),
                      "experts.2.w1.weight' has shape [40, 40]"),
    "fewer stacked": ("granite-moe", _put(f"{GRANITE}output_linear.weight", lambda rows: rows[1:]),
                      "output_linear.weight' has shape [5, 48, 40]"),
    "gate without up": ("granite-moe", _put(f"{GRANITE}input_linear.weight",
                                            lambda rows: rows[:, :40]),
                        "has shape [6, 40, 48], the model's configuration asks for [6, 80, 48]"),
    "no stack": ("granite-moe", _put(f"{GRANITE}input_linear.weight", lambda rows: rows[0]),
                 "has shape [80, 48]"),
    "shared, not named": ("granite-moe", lambda tensors: tensors.update(
                              {f"{LAYER}shared_mlp.input_linear.weight": np.ones((8, 48), "f4")}),
                          "shared_mlp.input_linear.weight' is not part of the model"),
    "no shared": ("qwen2-moe", _without(f"{QWEN}shared_expert.down_proj.weight"),
                  "shared_expert.down_proj.weight' is missing"),
    "wide shared": ("qwen2-moe", _put(f"{QWEN}shared_expert.up_proj.weight", lambda rows: rows[1:]),
                    "shared_expert.up_proj.weight' has shape [35, 48]"),
    "no shared gate": ("qwen2-moe", _without(f"{QWEN}shared_expert_gate.weight"),
                       "shared_expert_gate.weight' is missing"),
    "no selection bias": ("glm4-moe", _without(f"{QWEN}gate.e_score_correction_bias"),
                          "e_score_correction_bias' is missing"),
    "experts in a dense layer": ("qwen3-moe-dense", lambda tensors: tensors.update(
                                     {name.replace("layers.0", "layers.1"): rows
                                      for name, rows in list(tensors.items())
                                      if "layers.0.mlp.experts" in name}),
                                 "layers.1.mlp.experts.0.gate_proj.weight' is not part"),
    "no sinks": ("gpt-oss", _without(f"{LAYER}self_attn.sinks"), "self_attn.sinks' is missing"),
    "sinks of fewer": ("gpt-oss", _put(f"{LAYER}self_attn.sinks", lambda rows: rows[1:]),
                       "self_attn.sinks' has shape [3]"),
    "no predictor": ("turbosparse-mixtral", _without(f"{GRANITE}experts.3.predictor.fc2.weight"),
                     "experts.3.predictor.fc2.weight' is missing"),
    "predictor of other ranks": ("turbosparse-mixtral",
                                 _put(f"{GRANITE}experts.3.predictor.fc1.weight", lambda r: r[1:]),
                                 "fc2.weight' has shape [40, 12], the model's configuration asks"),
    "predictor of no rows": ("turbosparse-mixtral",
                             _put(f"{GRANITE}experts.3.predictor.fc1.weight", lambda r: r[:0]),
                             "fc1.weight' has shape [0, 48], and is no matrix"),
    "no bias": ("gpt-oss", _without(f"{QWEN}experts.down_proj_bias"),
                "experts.down_proj_bias' is missing"),
    "bias of gate alone": ("gpt-oss", _put(f"{QWEN}experts.gate_up_proj_bias",
                                           lambda rows: rows[:, ::2]),
                           "gate_up_proj_bias' has shape [5, 40]"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_wrong_file_is_told_in_one_line(case: str, tmp_path: Path) -> None:
    variant, change, said = HOSTILE[case]
    file = make_tiny(variant, tmp_path) / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    config, checkpoint = read_config(tmp_path), Checkpoint(tmp_path)

    def load_all() -> None:
        load_attention(checkpoint, config)
        load_ffn(checkpoint, config, everything(config), include_down_bias=True)

    with pytest.raises(CheckpointError) as error:
        load_all()
    assert said in str(error.value) and len(str(error.value).splitlines()) == 1
    if "NaN" not in case:  # names and shapes are found before anything is loaded
        with pytest.raises(CheckpointError) as early:
            check_tensors(checkpoint, config)
        assert str(early.value) == str(error.value)


B = "blk.1."
HOSTILE_GGUF: dict[str, tuple[str, str, Change, dict[str, Any], str]] = {
    "no stack": ("mixtral", "stacked", _without(f"{B}ffn_up_exps.weight"), {},
                 "tensor 'blk.1.ffn_up_exps.weight' is missing"),
    "no experts at all": ("mixtral", "stacked", lambda tensors: [
                              tensors.pop(name) for name in list(tensors) if B in name], {},
                          "tensor 'blk.1.ffn_gate_inp.weight' is missing"),
    "no expert": ("mixtral", "split", _without(f"{B}ffn_up.3.weight"), {},
                  "tensor 'blk.1.ffn_up.3.weight' is missing"),
    "one more expert": ("mixtral", "split", _and(f"{B}ffn_up.5.weight", f"{B}ffn_up.4.weight"), {},
                        "tensor 'blk.1.ffn_up.5.weight' has no place in the model"),
    "a matrix": ("mixtral", "stacked", _put(f"{B}ffn_gate_exps.weight", lambda rows: rows[0]), {},
                 "'blk.1.ffn_gate_exps.weight' has shape [40, 48], the model's configuration asks"),
    "fewer": ("mixtral", "stacked", _put(f"{B}ffn_down_exps.weight", lambda rows: rows[1:]), {},
              "'blk.1.ffn_down_exps.weight' has shape [4, 48, 40]"),
    "half of gate and up": ("mixtral", "merged", _put(f"{B}ffn_gate_up_exps.weight",
                                                      lambda rows: rows[:, :40]), {},
                            "'blk.1.ffn_gate_up_exps.weight' has shape [5, 40, 48]"),
    "NaN": ("mixtral", "merged", _put(f"{B}ffn_gate_up_exps.weight", _nan), {},
            "'blk.1.ffn_gate_up_exps.weight' has NaN or infinite"),
    "other count": ("mixtral", "stacked", lambda tensors: None, {"expert_count": 6},
                    "has shape [5, 48], the model's configuration asks for [6, 48]"),
    "too many used": ("mixtral", "stacked", lambda tensors: None, {"expert_used_count": 6},
                      "num_experts_per_tok is 6"),
    "experts in a dense layer": ("glm4moe", "stacked", _and("blk.0.ffn_gate_exps.weight",
                                                            "blk.2.ffn_gate_exps.weight"), {},
                                 "'blk.0.ffn_gate_exps.weight' is not part of the model"),
    "shared, not named": ("granitemoe", "stacked", lambda tensors: tensors.update(
                              {f"{B}ffn_gate_shexp.weight": np.ones((8, 48), np.float32)}), {},
                          "'blk.1.ffn_gate_shexp.weight' is not part of the model"),
    "sinks of others": ("mixtral", "stacked", lambda tensors: tensors.update(
                            {f"{B}attn_sinks.weight": np.ones(4, np.float32)}), {},
                        "'blk.1.attn_sinks.weight' has no place in the model"),
    "bias of others": ("mixtral", "stacked", lambda tensors: tensors.update(
                           {f"{B}ffn_gate_exps.bias": np.ones((5, 40), np.float32)}), {},
                       "'blk.1.ffn_gate_exps.bias' is not part of the model"),
    "selection bias of others": ("qwen3moe", "stacked", lambda tensors: tensors.update(
                                     {f"{B}exp_probs_b.bias": np.ones(7, np.float32)}), {},
                                 "'blk.1.exp_probs_b.bias' is not part of the model"),
    "no sinks": ("gpt-oss", "stacked", _without(f"{B}attn_sinks.weight"), {},
                 "attn_sinks.weight' is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE_GGUF)
def test_a_wrong_gguf_file_is_told_in_one_line(case: str, tmp_path: Path) -> None:
    kind, layout, change, keys, said = HOSTILE_GGUF[case]
    make_tiny(FILES[kind][0], tmp_path)
    write_gguf(tmp_path, kind, layout, change=change, changed_keys=keys)
    path = tmp_path / "m.gguf"

    def load_all(loads: bool) -> None:
        config, checkpoint = read_config(path), Checkpoint(path)
        check_tensors(checkpoint, config)
        if loads:
            load_ffn(checkpoint, config, everything(config), include_down_bias=True)

    with pytest.raises((CheckpointError, ConfigError)) as error:
        load_all(case == "NaN")
    assert said in str(error.value) and len(str(error.value).splitlines()) == 1


def test_experts_of_a_gguf_file_keep_their_blocks(tmp_path: Path) -> None:
    """Stacked experts of ggml's blocks: to the bit as the gguf package reads them."""
    path = quantized_mixtral(tmp_path, {"_exps": "Q8_0"})
    config, checkpoint = read_config(path), Checkpoint(path)
    weights = load_ffn(checkpoint, config, everything(config), include_down_bias=True)
    assert stored_config(checkpoint, config).dtype_of("gate") == "q8"
    for layer in range(config.num_layers):
        part = weights.part(layer)
        for name, rows in (("gate", weights.gate), ("up", weights.up)):
            values = held(path, f"blk.{layer}.ffn_{name}_exps.weight")
            assert np.array_equal(to_float32(rows[part]), values.reshape(-1, values.shape[2]))
        down = held(path, f"blk.{layer}.ffn_down_exps.weight").swapaxes(1, 2)
        down = down.reshape(-1, down.shape[2])
        error = np.abs(to_float32(weights.down[part]) - down)
        assert (error <= np.abs(down).max(axis=1, keepdims=True) / 127).all()


@pytest.mark.parametrize(
    ("kinds", "gate"),
    [
        ({"_exps": "Q4_0"}, "q4"),
        ({"gate_exps": "Q4_0", "up_exps": "Q4_0", "down_exps": "Q8_0"}, "q4"),
        ({"gate_exps": "Q4_0", "up_exps": "Q8_0", "down_exps": "Q8_0"}, "q8"),
        ({"_exps": "Q4_K"}, "q4_k"),
    ],
)
def test_formats_of_experts(kinds: dict[str, str], gate: str, tmp_path: Path) -> None:
    path = quantized_mixtral(tmp_path, kinds)
    config, checkpoint = read_config(path), Checkpoint(path)
    assert stored_config(checkpoint, config).dtype_of("gate") == gate
    weights = load_ffn(checkpoint, config, everything(config), include_down_bias=True)
    for layer in range(config.num_layers):
        values = held(path, f"blk.{layer}.ffn_up_exps.weight")
        found = to_float32(weights.up[weights.part(layer)])
        assert np.allclose(found, values.reshape(found.shape), rtol=0, atol=1e-6)


def test_what_is_said_of_conversions(tmp_path: Path) -> None:
    """Of experts' tensors as of others: gates as stored, down too where it keeps its rows."""
    sizes = {"intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}
    wide("qwen2-moe", tmp_path, **sizes, shared_expert_intermediate_size=512)
    kinds = {"blk.0.ffn_down": "Q6_K", "_exps": "Q4_K", "shexp.weight": "Q4_K"}
    lengths = {"expert_feed_forward_length": 256, "expert_shared_feed_forward_length": 512}
    write_gguf(tmp_path, "qwen2moe", kinds=kinds, changed_keys=lengths)
    checkpoint = Checkpoint(tmp_path / "m.gguf")
    assert checkpoint.conversion_note(("down",)) == ""
    assert checkpoint.conversion_note() == "Q6_K, Q4_K: read as 8 bits a weight"
    found = num_parameters(checkpoint, read_config(tmp_path / "m.gguf"))
    assert found == num_parameters(Checkpoint(tmp_path), read_config(tmp_path))


def quantized_mixtral(folder: Path, kinds: dict[str, str]) -> Path:
    """A GGUF file whose experts are in these formats, by parts of their names."""
    made = MIXTURES["mixtral"]
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_local_experts": 5}
    variants = {"mixtral-blocks": Variant(made.func, *made.args, **(made.keywords | sizes))}
    with mock.patch.dict(MIXTURES, variants):
        make_tiny("mixtral-blocks", folder)
    write_gguf(folder, "mixtral", kinds=kinds)
    return folder / "m.gguf"


def held(path: Path, name: str) -> np.ndarray:
    """A tensor's values as the gguf package reads them: (experts, rows, columns) float32."""
    tensor = next(one for one in gguf.GGUFReader(path).tensors if one.name == name)
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)
