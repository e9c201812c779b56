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
    load_gate,
    load_up,
    read_ffn,
)
from hotcold.model.weights.quantized_checkpoint import write_quantized
from hotcold.model.weights.sizes import ffn_bytes, num_parameters
from hotcold.model.weights.tensor_reader import TensorReader
from hotcold.numba_kernels.load.convert import to_float32
from tests.tiny_models import MIXTURES, Variant, make_tiny
from tests.unit.test_mixtures import FILES, write_gguf

Tensors = dict[str, np.ndarray]
# gate, up (I, d) and down (d, I) of a block, and their biases or ().
Block = tuple[np.ndarray, ...]


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


@pytest.mark.parametrize("variant", ["qwen2-moe", "granite-moe", "gpt-oss"])
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
@pytest.mark.parametrize("variant", ["granite-moe-shared", "gpt-oss"])
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
@pytest.mark.parametrize("variant", ["gpt-oss", "qwen3-moe"])
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
    "one more expert": ("qwen3-moe", _and(f"{QWEN}experts.7.gate_proj.weight",
                                          f"{QWEN}experts.6.gate_proj.weight"),
                        "mlp.experts.7.gate_proj.weight' is not part of the model"),
    "router with NaN": ("mixtral", _put(f"{GRANITE}gate.weight", _nan), "has NaN or infinite"),
    "stack with NaN": ("granite-moe", _put(f"{GRANITE}input_linear.weight", _nan),
                       "input_linear.weight' has NaN or infinite"),
    "fewer stacked": ("granite-moe", _put(f"{GRANITE}output_linear.weight", lambda rows: rows[1:]),
                      "output_linear.weight' has shape [5, 48, 40]"),
    "shared, not named": ("granite-moe", lambda tensors: tensors.update(
                              {f"{LAYER}shared_mlp.input_linear.weight": np.ones((8, 48), "f4")}),
                          "shared_mlp.input_linear.weight' is not part of the model"),
    "no selection bias": ("glm4-moe", _without(f"{QWEN}gate.e_score_correction_bias"),
                          "e_score_correction_bias' is missing"),
    "experts in a dense layer": ("qwen3-moe-dense", lambda tensors: tensors.update(
                                     {name.replace("layers.0", "layers.1"): rows
                                      for name, rows in list(tensors.items())
                                      if "layers.0.mlp.experts" in name}),
                                 "layers.1.mlp.experts.0.gate_proj.weight' is not part"),
    "no sinks": ("gpt-oss", _without(f"{LAYER}self_attn.sinks"), "self_attn.sinks' is missing"),
    "predictor of other ranks": ("turbosparse-mixtral",
                                 _put(f"{GRANITE}experts.3.predictor.fc1.weight", lambda r: r[1:]),
                                 "fc2.weight' has shape [40, 12], the model's configuration asks"),
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
    "one more expert": ("mixtral", "split", _and(f"{B}ffn_up.5.weight", f"{B}ffn_up.4.weight"), {},
                        "tensor 'blk.1.ffn_up.5.weight' has no place in the model"),
    "half of gate and up": ("mixtral", "merged", _put(f"{B}ffn_gate_up_exps.weight",
                                                      lambda rows: rows[:, :40]), {},
                            "'blk.1.ffn_gate_up_exps.weight' has shape [5, 40, 48]"),
    "NaN": ("mixtral", "merged", _put(f"{B}ffn_gate_up_exps.weight", _nan), {},
            "'blk.1.ffn_gate_up_exps.weight' has NaN or infinite"),
    "too many used": ("mixtral", "stacked", lambda tensors: None, {"expert_used_count": 6},
                      "num_experts_per_tok is 6"),
    "experts in a dense layer": ("glm4moe", "stacked", _and("blk.0.ffn_gate_exps.weight",
                                                            "blk.2.ffn_gate_exps.weight"), {},
                                 "'blk.0.ffn_gate_exps.weight' is not part of the model"),
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


@pytest.mark.parametrize(
    ("kinds", "gate"),
    [
        ({"_exps": "Q4_0"}, "q4"),
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


@pytest.mark.parametrize("num_services", [2])
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
