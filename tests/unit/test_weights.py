"""Weights in kernel layout: subsets, dtypes, and one line for each disagreement with the config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hotcold.model.config.build import read_config
from hotcold.model.errors import CheckpointError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import load_attention
from hotcold.model.weights.check import check_tensors, stored_config
from hotcold.model.weights.embedding import load_embedding, load_head
from hotcold.model.weights.ffn import load_ffn
from hotcold.model.weights.sizes import attention_bytes, ffn_bytes, head_bytes, kv_cache_bytes
from hotcold.numba_kernels.load.convert import from_float32, to_float32
from tests.tiny_models import make_tiny

Edit = Callable[[dict[str, torch.Tensor]], None]


def load_all(path: Path) -> None:
    config, checkpoint = read_config(path), Checkpoint(path)
    ids = [np.arange(config.ffn_size, dtype=np.int32)] * config.num_layers
    load_attention(checkpoint, config)
    load_ffn(checkpoint, config, ids, include_down_bias=True)
    load_embedding(checkpoint, config)
    load_head(checkpoint, config)


def edited(path: Path, variant: str, edit: Edit) -> Path:
    """Write a tiny model whose tensors `edit` has changed."""
    make_tiny(variant, path)
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")
    return path


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_all(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refused_by_headers(path: Path) -> str:
    """The line that loading ends in, which is also known before any weight is read."""
    with pytest.raises(CheckpointError) as caught:
        check_tensors(Checkpoint(path), read_config(path))
    assert str(caught.value) == refused(path)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_stored_dtype_counts(dtype: str, tmp_path: Path) -> None:
    path = make_tiny("falcon-bias", tmp_path, dtype=dtype)
    values = json.loads((path / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        values.pop(key, None)
    for said in ({}, {"torch_dtype": "float16"}, {"torch_dtype": "float32"}):
        (path / "config.json").write_text(json.dumps(values | said))
        config = read_config(path)
        assert stored_config(Checkpoint(path), config).dtype == dtype


@pytest.mark.parametrize(
    ("variant", "dtype"), [("llama-mlp-bias", "float16"), ("falcon-bias", "bfloat16")]
)
def test_any_subset_of_neurons(variant: str, dtype: str, tmp_path: Path) -> None:
    make_tiny(variant, tmp_path, dtype=dtype)
    config, checkpoint = read_config(tmp_path), Checkpoint(tmp_path)
    all_ids = [np.arange(config.ffn_size, dtype=np.int32)] * config.num_layers
    whole = load_ffn(checkpoint, config, all_ids, include_down_bias=True)
    rng = np.random.default_rng(0)
    ids = [rng.permutation(config.ffn_size)[: 5 * n].astype(np.int32) for n in range(len(all_ids))]
    part = load_ffn(checkpoint, config, ids, include_down_bias=False)
    assert part.starts[:, 1].tolist() == np.cumsum([one.size for one in ids]).tolist()
    assert part.down_bias.shape == (config.num_layers, 1, 0)
    assert part.gate.dtype == {"float16": np.uint16, "bfloat16": np.int16}[dtype]
    for layer, layer_ids in enumerate(ids):
        rows = part.part(layer)
        rows_of_whole = layer_ids + layer * config.ffn_size
        np.testing.assert_array_equal(part.neuron_ids[rows], layer_ids)
        for name in ("gate", "up", "down", "gate_bias", "up_bias"):
            if getattr(whole, name).size:
                found, expected = getattr(part, name)[rows], getattr(whole, name)[rows_of_whole]
                np.testing.assert_array_equal(found, expected, err_msg=name)


@pytest.mark.parametrize("variant", ["llama-mlp-bias", "opt-prenorm", "falcon-bias", "gemma3"])
def test_sizes_known_before_loading(variant: str, tmp_path: Path) -> None:
    make_tiny(variant, tmp_path, dtype="float16")
    config, checkpoint = read_config(tmp_path), Checkpoint(tmp_path)
    ids = [np.arange(10, dtype=np.int32)] * config.num_layers
    seen: list[int] = []
    for found, size in [
        (load_attention(checkpoint, config, on_bytes=seen.append), attention_bytes(config)),
        (load_head(checkpoint, config, on_bytes=seen.append), head_bytes(config)),
        (
            load_ffn(checkpoint, config, ids, include_down_bias=True, on_bytes=seen.append),
            ffn_bytes(config, 10 * config.num_layers),
        ),
    ]:
        arrays = {
            name: value for name, value in vars(found).items() if name not in ("starts", "stripes")
        }
        assert sum(array.nbytes for array in arrays.values()) == size
    assert sum(seen) > 0 and min(seen) > 0
    rows, dim = 2 * 7 * config.num_layers * config.num_kv_heads, config.head_dim
    row_bytes = {"float32": 4 * dim, "float16": 2 * dim, "q8": dim + 4 * -(-dim // 32)}
    for kv_dtype, num_bytes in row_bytes.items():
        assert kv_cache_bytes(config, 7, kv_dtype) == rows * num_bytes


def swap(name: str, value: Callable[[torch.Tensor], torch.Tensor | None]) -> Edit:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        changed = value(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed

    return edit


def poisoned(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def poison(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return poison


PER_LAYER = "model.layers.1."
TENSORS = [
    PER_LAYER + "self_attn.q_proj.weight",
    PER_LAYER + "self_attn.v_proj.weight",
    PER_LAYER + "self_attn.o_proj.weight",
    PER_LAYER + "input_layernorm.weight",
    PER_LAYER + "post_attention_layernorm.weight",
    PER_LAYER + "mlp.gate_proj.weight",
    PER_LAYER + "mlp.gate_proj.bias",
    PER_LAYER + "mlp.up_proj.weight",
    PER_LAYER + "mlp.down_proj.weight",
    PER_LAYER + "mlp.down_proj.bias",
    "model.norm.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
]


@pytest.mark.parametrize("name", TENSORS)
def test_every_tensor_is_checked(name: str, tmp_path: Path) -> None:
    short = name.removeprefix("model.")
    value = (torch.nan, torch.inf, -torch.inf)[TENSORS.index(name) % 3]
    text = refused(edited(tmp_path, "llama-mlp-bias", swap(name, poisoned(value))))
    assert short in text and "NaN" in text
    text = refused_by_headers(edited(tmp_path, "llama-mlp-bias", swap(name, lambda t: t[:-1])))
    assert short in text and "shape" in text
    text = refused_by_headers(edited(tmp_path, "llama-mlp-bias", swap(name, lambda t: None)))
    assert short in text and "missing" in text
    path = edited(tmp_path, "llama-mlp-bias", swap(name, lambda t: t.to(torch.float64)))
    assert short in refused_by_headers(path)


def test_config_that_leaves_tensors_out(tmp_path: Path) -> None:
    for variant, key, value, named in (
        ("llama-relu", "num_hidden_layers", 2, "layers.2"),
        ("llama-attention-bias", "attention_bias", False, "q_proj.bias"),
        ("llama-mlp-bias", "mlp_bias", False, "gate_proj.bias"),
        ("opt-prenorm", "_remove_final_layer_norm", True, "final_layer_norm"),
    ):
        path = make_tiny(variant, tmp_path / variant)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {key: value}))
        assert named in refused_by_headers(path)


def test_mixed_dtypes_follow_the_first_layer(tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name] = tensors[name].to(
                torch.float16 if "layers.0" in name else torch.bfloat16
            )

    edited(tmp_path, "llama-relu", edit)
    config, checkpoint = read_config(tmp_path), Checkpoint(tmp_path)
    weights = load_attention(checkpoint, config)
    assert weights.qkv.first.dtype == np.uint16
    expected = to_float32(checkpoint.array("layers.2.self_attn.o_proj.weight"))
    np.testing.assert_allclose(to_float32(weights.out[2]), expected, rtol=1e-3)
    assert load_head(checkpoint, config).head.dtype == np.int16


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_conversion_equals_torch(kind: torch.dtype) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    dtype = np.dtype(np.uint16 if kind == torch.float16 else np.int16)
    expected = torch.from_numpy(bits.view(np.int16)).view(kind).float()
    np.testing.assert_array_equal(to_float32(bits.view(dtype)), expected.numpy())
    values = (np.random.default_rng(0).normal(size=100_000) * 300).astype(np.float32)
    found = from_float32(values, dtype).view(np.int16)
    rounded = torch.from_numpy(values).to(kind).view(torch.int16).numpy()
    np.testing.assert_array_equal(found, rounded)
    finite = np.isfinite(expected.numpy())
    again = from_float32(expected.numpy()[finite], dtype)
    np.testing.assert_array_equal(again, bits.view(dtype)[finite])
