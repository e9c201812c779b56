"""Weights in kernel layout: subsets, dtypes, and one line for each disagreement with the config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hotcold.model.config.build import read_config
from hotcold.model.errors import CheckpointError, MemoryBudgetError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import load_attention
from hotcold.model.weights.check import check_tensors, stored_config
from hotcold.model.weights.embedding import load_embedding, load_head
from hotcold.model.weights.ffn import load_ffn
from hotcold.model.weights.memory import aligned_empty, available_bytes
from hotcold.model.weights.sizes import attention_bytes, ffn_bytes, head_bytes, kv_cache_bytes
from hotcold.numba_kernels.load import loading
from hotcold.numba_kernels.load.convert import from_float32, to_float32
from tests.tiny_models import VARIANTS, make_tiny

Edit = Callable[[dict[str, torch.Tensor]], None]
BITS = [np.float32, np.uint16, np.int16]


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


@pytest.mark.parametrize("variant", VARIANTS)
def test_headers_of_good_models(variant: str, tmp_path: Path) -> None:
    path = make_tiny(variant, tmp_path)
    check_tensors(Checkpoint(path), read_config(path))


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


@pytest.mark.parametrize("variant", ["llama-mlp-bias", "opt-prenorm", "falcon-bias", "falcon-7b"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
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
    assert part.gate.dtype == {"float32": np.float32, "float16": np.uint16}.get(dtype, np.int16)
    for layer, layer_ids in enumerate(ids):
        rows = part.part(layer)
        rows_of_whole = layer_ids + layer * config.ffn_size
        np.testing.assert_array_equal(part.neuron_ids[rows], layer_ids)
        for name in ("gate", "up", "down", "gate_bias", "up_bias"):
            if getattr(whole, name).size:
                found, expected = getattr(part, name)[rows], getattr(whole, name)[rows_of_whole]
                np.testing.assert_array_equal(found, expected, err_msg=name)


def test_wrong_neuron_ids(tmp_path: Path) -> None:
    make_tiny("llama-relu", tmp_path)
    config, checkpoint = read_config(tmp_path), Checkpoint(tmp_path)
    good: list[np.ndarray] = [np.arange(3, dtype=np.int32)] * 3
    wrong: Any = ([], good[:2], [*good[:2], np.arange(3)], [*good[:2], np.array([88], np.int32)])
    for bad in wrong:
        with pytest.raises(ValueError, match="neuron ids"):
            load_ffn(checkpoint, config, bad, include_down_bias=True)


@pytest.mark.parametrize("variant", VARIANTS)
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
            name: value for name, value in vars(found).items() if name not in ("starts", "lanes")
        }
        assert sum(array.nbytes for array in arrays.values()) == size
    assert sum(seen) > 0 and min(seen) > 0
    rows, dim = 2 * 7 * config.num_layers * config.num_kv_heads, config.head_dim
    row_bytes = {"float32": 4 * dim, "float16": 2 * dim, "q8": dim + 4 * -(-dim // 32)}
    for kv_dtype, num_bytes in row_bytes.items():
        assert kv_cache_bytes(config, 7, kv_dtype) == rows * num_bytes


def test_embedding_is_mapped_and_looked_up(tmp_path: Path) -> None:
    make_tiny("opt-postnorm", tmp_path)
    embedding = load_embedding(Checkpoint(tmp_path), read_config(tmp_path))
    assert not embedding.tokens.flags.owndata and not embedding.tokens.flags.writeable
    found = embedding.lookup(np.array([3, 100]), np.array([0, 127]))
    expected = embedding.tokens[[3, 100]] @ embedding.project_in.T + embedding.positions[[2, 129]]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    for ids, positions in (([101], [0]), ([-1], [0]), ([0], [128]), ([0], [-3])):
        with pytest.raises(ValueError, match="do not lie in"):
            embedding.lookup(np.array(ids), np.array(positions))


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


def converted(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype)


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
    for value in (torch.nan, torch.inf, -torch.inf):
        text = refused(edited(tmp_path, "llama-mlp-bias", swap(name, poisoned(value))))
        assert short in text and "NaN" in text
    text = refused_by_headers(edited(tmp_path, "llama-mlp-bias", swap(name, lambda t: t[:-1])))
    assert short in text and "shape" in text
    text = refused_by_headers(edited(tmp_path, "llama-mlp-bias", swap(name, lambda t: None)))
    assert short in text and "missing" in text
    for other in (torch.float64, torch.int32):
        path = edited(tmp_path, "llama-mlp-bias", swap(name, converted(other)))
        assert short in refused_by_headers(path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_infinite_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    def poison(tensor: torch.Tensor) -> torch.Tensor:
        return poisoned(torch.inf)(tensor).to(dtype)

    assert "up_proj" in refused(edited(tmp_path, "llama-relu", swap(TENSORS[7], poison)))


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


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (300, 133), (0, 4)])
def test_copies(
    dtype: Any,
    offset: int,
    shape: tuple[int, int],
) -> None:
    rng = np.random.default_rng(0)
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    values = from_float32(rng.normal(size=shape).astype(np.float32), np.dtype(dtype))
    raw = np.zeros(num_bytes + offset, np.uint8)
    raw[offset:] = np.frombuffer(values.tobytes(), np.uint8)
    raw.flags.writeable = False
    src = raw[offset:].view(dtype).reshape(shape)  # unaligned and read-only, as in a mapped file
    wide = np.zeros((shape[0], shape[1] + 3), dtype)
    assert loading.copy_rows(src, wide[:, : shape[1]])
    np.testing.assert_array_equal(wide[:, : shape[1]], values)
    assert not wide[:, shape[1] :].any()
    rows = rng.integers(0, max(1, shape[0]), shape[0] // 2).astype(np.int32)
    found = np.zeros((rows.size, shape[1]), dtype)
    assert loading.gather_rows(src, rows, found)
    np.testing.assert_array_equal(found, values[rows])
    columns = rng.integers(0, shape[1], 70).astype(np.int32)
    found = np.zeros((70, shape[0] + 1), dtype)[:, : shape[0]]
    assert loading.gather_columns(src, columns, found)
    np.testing.assert_array_equal(found, values.T[columns])
    assert loading.all_finite(src)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_copies_see_values_that_are_not_finite(dtype: Any, bad: float) -> None:
    values = np.full((9, 40), 3e38 if dtype != np.uint16 else 6e4, np.float32)
    values[4, 17] = bad
    src = from_float32(values, np.dtype(dtype))
    ids = np.arange(9, dtype=np.int32)
    assert not loading.copy_rows(src, np.empty_like(src))
    assert not loading.all_finite(src) and loading.all_finite(src[:4])
    assert not loading.gather_rows(src, ids, np.empty_like(src))
    assert loading.gather_rows(src, ids[5:], np.empty_like(src[5:]))
    columns = np.array([17], np.int32)
    assert not loading.gather_columns(src, columns, np.empty((1, 9), dtype))
    assert loading.gather_columns(src, columns + 1, np.empty((1, 9), dtype))


def test_copies_refuse_mismatches() -> None:
    src, ids = np.zeros((4, 6), np.uint16), np.array([0, 3], np.int32)
    for call in (
        lambda: loading.copy_rows(src, np.zeros((4, 5), np.uint16)),
        lambda: loading.copy_rows(src, np.zeros((4, 6), np.int16)),
        lambda: loading.copy_rows(src.T, np.zeros((6, 4), np.uint16)),
        lambda: loading.copy_rows(src.astype(np.float64), np.zeros((4, 6))),
        lambda: loading.gather_rows(src, ids + 1, np.zeros((2, 6), np.uint16)),
        lambda: loading.gather_rows(src, ids - 1, np.zeros((2, 6), np.uint16)),
        lambda: loading.gather_rows(src, ids.astype(np.int64), np.zeros((2, 6), np.uint16)),
        lambda: loading.gather_columns(src, ids + 3, np.zeros((2, 4), np.uint16)),
        lambda: loading.gather_columns(src, ids, np.zeros((2, 6), np.uint16)),
    ):
        with pytest.raises(ValueError):
            call()


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


def test_memory() -> None:
    array = aligned_empty((3, 5), np.uint16)
    assert array.ctypes.data % (2 << 20) == 0 and array.flags.c_contiguous
    array[:] = 7
    assert aligned_empty((0, 5), np.float32).shape == (0, 5)
    assert aligned_empty((1 << 21,), np.uint8, alignment=4096).ctypes.data % 4096 == 0
    assert 1 << 20 < available_bytes() < 1 << 50
    with pytest.raises(MemoryBudgetError, match="GB"):
        aligned_empty((1 << 62,), np.uint8)
