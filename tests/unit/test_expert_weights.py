"""Loaded neurons of mixtures: subsets, formats, GGUF's layouts, and files that are wrong."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hotcold.model.config.build import read_config
from hotcold.model.config.weight_formats import requested_dtype
from hotcold.model.errors import CheckpointError, ConfigError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import load_attention
from hotcold.model.weights.check import check_tensors, stored_config
from hotcold.model.weights.ffn import FfnWeights, load_ffn, load_rows, read_ffn
from hotcold.model.weights.quantized_checkpoint import write_quantized
from hotcold.model.weights.sizes import ffn_bytes, num_parameters
from hotcold.model.weights.tensor_reader import TensorReader
from tests.tiny_models import MIXTURES, Variant, make_tiny
from tests.unit.test_mixtures import FILES, write_gguf

Tensors = dict[str, np.ndarray]
ROWS = ("gate", "up", "down", "gate_bias", "up_bias")


def shuffled(sizes: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """About half of the neurons, in any order within their block, of some blocks none."""
    found, first = [], 0
    for block, size in enumerate(sizes):
        own = rng.permutation(size)[: 0 if block == 1 else size // 2 + 1]
        found.append(first + own)
        first += size
    return np.concatenate(found).astype(np.int32)


def everything(config: Any) -> list[np.ndarray]:
    return [np.arange(size, dtype=np.int32) for size in config.ffn_sizes]


def all_rows(path: Path, dtype: str = "") -> FfnWeights:
    config = read_config(path)
    return load_ffn(
        Checkpoint(path), config, everything(config), include_down_bias=True, dtype=dtype
    )


def counted_bytes(weights: FfnWeights) -> int:
    arrays = [getattr(weights, name) for name in (*ROWS, "down_bias", "neuron_ids")]
    outer = weights.predictors.outer  # without the gaps between its matrices
    arrays += [outer.matrix(*at) for at in np.ndindex(*outer.places.shape[:2])]
    return sum(array.nbytes for array in (*arrays, weights.predictors.inner))


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        ("qwen3-moe-dense", "float32"),
        ("granite-moe-shared", "float16"),
        ("gpt-oss", "bfloat16"),
        ("turbosparse-mixtral", "float32"),
    ],
)
def test_any_subset_of_neurons(variant: str, dtype: str, tmp_path: Path) -> None:
    make_tiny(variant, tmp_path, dtype)
    config, checkpoint = read_config(tmp_path), Checkpoint(tmp_path)
    check_tensors(checkpoint, config)
    whole, rng = all_rows(tmp_path), np.random.default_rng(3)
    ids = [shuffled(layer.ffn.block_sizes, rng) for layer in config.layers]
    some = load_ffn(checkpoint, config, ids, include_down_bias=True)
    for layer, own in enumerate(ids):
        part, every = some.part(layer), whole.part(layer)
        assert np.array_equal(some.neuron_ids[part], own)
        for name in ROWS:
            rows, of_all = getattr(some, name), getattr(whole, name)
            assert np.array_equal(rows[part], of_all[every][own] if of_all.size else rows[part])
        sizes = np.cumsum(config.layers[layer].ffn.block_sizes)
        counts = np.bincount(np.searchsorted(sizes, own, "right"), minlength=sizes.size)
        assert np.array_equal(np.diff(some.starts[layer])[: sizes.size], counts)
        for role in ("gate", "up"):
            found, own_bias = load_rows(checkpoint, config, layer, role)
            assert np.array_equal(found, getattr(whole, role)[every])
            assert np.array_equal(own_bias, getattr(whole, f"{role}_bias")[every])
    assert np.array_equal(some.down_bias, whole.down_bias)
    assert ffn_bytes(stored_config(checkpoint, config), config.num_neurons) == counted_bytes(whole)


@pytest.mark.parametrize(("case", "layout"), [("mixtral", "merged"), ("qwen2moe", "split")])
def test_a_gguf_file_of_another_layout_holds_the_checkpoints_rows(
    case: str, layout: str, tmp_path: Path
) -> None:
    """The usual one's logits are those of transformers: test_mixtures.py."""
    make_tiny(FILES[case][0], tmp_path)
    write_gguf(tmp_path, case, layout)
    path = tmp_path / "m.gguf"
    check_tensors(Checkpoint(path), read_config(path))
    found, expected = all_rows(path), all_rows(tmp_path)
    for name in (*ROWS, "down_bias", "starts"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    of_file, of_folder = (
        load_attention(Checkpoint(each), read_config(each)).routers for each in (path, tmp_path)
    )
    assert all(map(np.array_equal, of_file, of_folder))


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
    found, expected = all_rows(copy), all_rows(original, "q8")
    for name in (*ROWS, "down_bias", "starts"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))
    routers = [load_attention(Checkpoint(path), config).routers for path in (copy, original)]
    assert all(np.array_equal(a, b) for a, b in zip(*routers, strict=True))


@pytest.mark.parametrize(("variant", "dtype"), [("gpt-oss", ""), ("qwen3-moe", "q8")])
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
        weights = all_rows(tmp_path, dtype)
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
    with pytest.raises(CheckpointError) as error:
        all_rows(tmp_path)
        load_attention(checkpoint, config)
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
    with pytest.raises((CheckpointError, ConfigError)) as error:
        check_tensors(Checkpoint(path), read_config(path))
        all_rows(path)
    assert said in str(error.value) and len(str(error.value).splitlines()) == 1


def test_predictors_are_counted_in_each_service(tmp_path: Path) -> None:
    make_tiny("turbosparse-mixtral", tmp_path)
    checkpoint, config = Checkpoint(tmp_path), read_config(tmp_path)
    counted = 0
    for service in range(2):
        own = [ids[service::2] for ids in everything(config)]
        counted += counted_bytes(load_ffn(checkpoint, config, own, include_down_bias=False))
    stored, num_neurons = stored_config(checkpoint, config), config.num_neurons
    assert ffn_bytes(stored, num_neurons, 2) == counted > ffn_bytes(stored, num_neurons)


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
