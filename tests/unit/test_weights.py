"""Weights in kernel layout: as stored, cast and quantized; one line for each wrong file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.account import account
from hotcold.actors.setup.preflight import prepare_system, read_model
from hotcold.model.config.build import read_config
from hotcold.model.config.families import tensor_names
from hotcold.model.config.weight_formats import row_bytes
from hotcold.model.errors import CheckpointError, HotcoldError, MemoryBudgetError, UsageError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import AttentionWeights, load_attention
from hotcold.model.weights.check import check_tensors, stored_config
from hotcold.model.weights.embedding import HeadWeights, load_embedding, load_head
from hotcold.model.weights.ffn import FfnWeights, load_ffn
from hotcold.model.weights.sizes import attention_bytes, ffn_bytes, head_bytes, weight_bytes
from hotcold.numba_kernels.formats import MXFP4, Q4, Q4_1, Q8
from hotcold.numba_kernels.load.convert import from_float32, to_float32
from hotcold.placement.solver.cost import RowBytes
from tests.e2e.commands import run_main
from tests.gguf_files import small_llama
from tests.quantized_models import GROUP_BYTES, laid_out, make_model
from tests.tiny_models import make_tiny

Edit = Callable[[torch.Tensor], torch.Tensor | None]
WEIGHTS = "model.safetensors"


class Loaded(NamedTuple):
    """All that services load, but for the embedding; and the bytes that were told meanwhile."""

    attention: AttentionWeights
    head: HeadWeights
    ffn: FfnWeights
    told: list[int]


def loaded(path: Path, dtype: str = "", ids: Sequence[np.ndarray] | None = None) -> Loaded:
    config, checkpoint, told = read_config(path), Checkpoint(path), list[int]()
    every = [np.arange(size, dtype=np.int32) for size in config.ffn_sizes]
    how: dict[str, Any] = {"dtype": dtype, "on_bytes": told.append}
    found = Loaded(
        load_attention(checkpoint, config, **how),
        load_head(checkpoint, config, **how),
        load_ffn(checkpoint, config, every if ids is None else ids, include_down_bias=True, **how),
        told,
    )
    load_embedding(checkpoint, config)
    return found


def require_sizes(found: Loaded, path: Path, dtype: str = "") -> None:
    """They are known before anything is loaded."""
    config = stored_config(Checkpoint(path), read_config(path), dtype)
    sizes = attention_bytes(config), head_bytes(config), ffn_bytes(config, len(found.ffn.gate))
    for weights, size in zip(found[:3], sizes, strict=True):
        arrays = {n: a for n, a in vars(weights).items() if n not in ("starts", "stripes")}
        assert sum(array.nbytes for array in arrays.values()) == size
    assert sum(found.told) > 0 and min(found.told) > 0


def edited(path: Path, changes: dict[str, Edit]) -> Path:
    """Change tensors of a model, by the ends of their names; None leaves one out."""
    tensors = load_file(path / WEIGHTS)
    for end, edit in changes.items():
        for name in [name for name in tensors if name.endswith(end)]:
            changed = edit(tensors.pop(name))
            if changed is not None:
                tensors[name] = changed.contiguous()
    save_file(tensors, path / WEIGHTS)
    return path


def change_config(path: Path, **changes: Any) -> None:
    """Change keys of config.json; None leaves one out."""
    file = path / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: each for key, each in values.items() if each is not None}))


def last(value: float) -> Edit:
    """The last number becomes `value`."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.float()
        tensor.view(-1)[-1] = value
        return tensor

    return change


Errors = type[HotcoldError] | tuple[type[HotcoldError], ...]


def refused(error: Errors, call: Callable[[], Any], *texts: str) -> str:
    with pytest.raises(error) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    for text in texts:
        assert text in line
    return line


def refused_by_headers(path: Path, *texts: str) -> None:
    """The line that loading ends in is known before any weight is read, too."""
    line = refused(CheckpointError, partial(loaded, path), *texts)
    check = partial(check_tensors, Checkpoint(path), read_config(path))
    assert refused(CheckpointError, check) == line


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_stored_dtype_counts(dtype: str, tmp_path: Path) -> None:
    path = make_tiny("falcon-bias", tmp_path, dtype=dtype)
    for said in (None, "float16", "float32"):
        change_config(path, dtype=None, torch_dtype=said)
        assert stored_config(Checkpoint(path), read_config(path)).dtype == dtype


TENSORS = [
    *(f"layers.1.self_attn.{name}_proj.weight" for name in "qvo"),
    *(f"layers.1.{name}_layernorm.weight" for name in ("input", "post_attention")),
    *(f"layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"layers.1.mlp.{name}_proj.bias" for name in ("gate", "down")),
    "model.norm.weight",
    "embed_tokens.weight",
    "lm_head.weight",
]


@pytest.mark.parametrize("name", TENSORS)
def test_every_tensor_is_checked(name: str, tmp_path: Path) -> None:
    def wrong(edit: Edit) -> Path:
        return edited(make_tiny("llama-mlp-bias", tmp_path), {name: edit})

    short = name.removeprefix("model.")
    bad = (torch.nan, torch.inf, -torch.inf)[TENSORS.index(name) % 3]
    refused(CheckpointError, partial(loaded, wrong(last(bad))), short, "NaN")
    refused_by_headers(wrong(lambda tensor: tensor[:-1]), short, "shape")
    refused_by_headers(wrong(lambda tensor: None), short, "missing")
    refused_by_headers(wrong(lambda tensor: tensor.double()), short)


def test_config_that_leaves_tensors_out(tmp_path: Path) -> None:
    for variant, key, value, named in (
        ("llama-relu", "num_hidden_layers", 2, "layers.2"),
        ("llama-attention-bias", "attention_bias", False, "q_proj.bias"),
        ("llama-mlp-bias", "mlp_bias", False, "gate_proj.bias"),
        ("opt-prenorm", "_remove_final_layer_norm", True, "final_layer_norm"),
    ):
        path = make_tiny(variant, tmp_path / variant)
        change_config(path, **{key: value})
        refused_by_headers(path, named)


def test_mixed_dtypes_follow_the_first_layer(tmp_path: Path) -> None:
    path, checkpoint = make_tiny("llama-relu", tmp_path, dtype="bfloat16"), Checkpoint(tmp_path)
    halves = {name: torch.Tensor.half for name in checkpoint.names() if "layers.0" in name}
    edited(path, halves)
    found, checkpoint = loaded(path), Checkpoint(path)
    assert found.attention.qkv.arrays[0].dtype == np.uint16
    expected = to_float32(checkpoint.array("layers.2.self_attn.o_proj.weight"))
    np.testing.assert_allclose(to_float32(found.attention.out.matrix(2)), expected, rtol=1e-3)
    assert found.head.head.dtype == np.int16


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


def rows_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize(
    ("model", "name", "dtype"),
    [
        ("q-llama-tied", "q8", Q8),
        ("q-llama", "q4", Q4),
        ("q-opt-postnorm", "q4_1", Q4_1),
        ("q-falcon-grouped", "mxfp4", MXFP4),
    ],
)
def test_matrices_are_quantized_row_by_row(
    model: str, name: str, dtype: np.dtype, tmp_path: Path
) -> None:
    path = make_model(model, tmp_path, dtype="bfloat16")
    checkpoint, config = Checkpoint(path), stored_config(Checkpoint(path), read_config(path), name)
    found, plain = loaded(path, name), loaded(path)
    require_sizes(found, path, name)
    gates = config.num_neurons * row_bytes(config, config.hidden_size, "gate")
    assert sum(found.told) >= (3 if config.has_gate else 2) * gates
    assert RowBytes.of(config).first == config.hidden_size // 32 * GROUP_BYTES[name]
    names = tensor_names(config)

    def stored(name: str) -> np.ndarray:
        return to_float32(checkpoint.array(f"{name}.weight"))

    def require(rows: np.ndarray, expected: np.ndarray) -> None:
        assert rows.dtype == dtype
        np.testing.assert_array_equal(rows_of(rows), laid_out(expected, name))

    for layer in range(config.num_layers):
        own, part = names.of_layer(layer), found.ffn.part(layer)
        qkv = to_float32(plain.attention.qkv.matrix(layer))
        require(found.attention.qkv.matrix(layer), qkv)
        require(found.attention.out.matrix(layer), stored(own.out))
        require(found.ffn.gate[part], stored(own.gate))
        require(found.ffn.down[part], stored(own.down).T)
        if config.has_gate:
            require(found.ffn.up[part], stored(own.up))
    require(
        found.head.head, stored("lm_head" if checkpoint.has("lm_head.weight") else names.tokens)
    )
    assert load_embedding(checkpoint, config).tokens.dtype == np.int16
    vectors = found.attention.vectors, plain.attention.vectors
    for one, other in zip(*((v.norm_weight, v.qkv_bias) for v in vectors), strict=True):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, other)


def arrays_of(weights: Any) -> dict[str, np.ndarray]:
    found = {key: getattr(value, "arrays", [value])[0] for key, value in vars(weights).items()}
    return {key: value for key, value in found.items() if isinstance(value, np.ndarray)}


@pytest.mark.parametrize(("model", "name"), [("llama-gqa", "f16"), ("opt-prenorm", "bf16")])
def test_matrices_in_16_bits_are_those_of_the_cast_model(
    model: str, name: str, tmp_path: Path
) -> None:
    kind, dtype = {"f16": (torch.float16, np.uint16), "bf16": (torch.bfloat16, np.int16)}[name]
    path, rounded = make_tiny(model, tmp_path / "a"), make_tiny(model, tmp_path / "b")
    edited(rounded, {"": lambda tensor: tensor.to(kind)})
    every_other = [np.arange(0, size, 2, dtype=np.int32) for size in read_config(path).ffn_sizes]
    for cast, stored in zip(
        loaded(path, name, every_other)[:3], loaded(rounded, "", every_other)[:3], strict=True
    ):
        arrays, others = arrays_of(cast), arrays_of(stored)
        assert np.dtype(dtype) in {array.dtype for array in arrays.values()}
        for key, array in arrays.items():
            if array.dtype == dtype:  # vectors are float32 in both
                np.testing.assert_array_equal(array, others[key], err_msg=key)
    assert load_embedding(Checkpoint(path), read_config(path)).tokens.dtype == np.float32


def test_a_system_in_16_bits_takes_half_the_memory(tmp_path: Path) -> None:
    path = make_tiny("llama-gqa", tmp_path)
    plain = prepare_system(path, SystemOptions())
    cast = prepare_system(path, SystemOptions(weight_dtype="bf16"))
    assert (plain[1].dtype, cast[1].dtype) == ("float32", "bfloat16")
    assert (plain[0].kv_dtype, cast[0].kv_dtype) == ("float32", "float16")
    assert weight_bytes(cast[1]) < 0.6 * weight_bytes(plain[1])
    need = max(1.01 * weight_bytes(cast[1]), account(*cast).total_bytes)
    with pytest.raises(MemoryBudgetError, match="--dtype f16"):
        prepare_system(path, SystemOptions(cpu_memory_bytes=int(need)))


@pytest.mark.parametrize("tensor", ["self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"])
def test_what_a_format_cannot_hold_is_refused(tensor: str, tmp_path: Path) -> None:
    tensor = f"layers.1.{tensor}.weight"
    for dtype, value, *texts in (
        ("f16", 65520.0, "--dtype bf16"),
        ("f16", torch.nan, "NaN"),
        ("q8", torch.nan, "NaN"),
        ("q8", 1e7, "too large"),
        ("q8", 1e9, "too"),
        ("mxfp4", -torch.inf, "NaN"),
    ):
        path = edited(make_model("q-llama", tmp_path, dtype="float32"), {tensor: last(value)})
        refused(CheckpointError, partial(loaded, path, dtype), tensor, *texts)
        if dtype == "f16" and value == 65520.0:
            loaded(path, "bf16")
            loaded(edited(path, {tensor: last(65519.0)}), "f16")  # rounds to the largest, 65504


def test_formats_that_a_model_cannot_have(tmp_path: Path) -> None:
    path = make_tiny("llama-relu", tmp_path / "m")
    for call in (read_model, loaded):
        refused(UsageError, partial(call, path, "q8"), "--dtype q8", "rows of 48", "stored in")
    for other in ("q5", "f32"):
        texts = (f"'{other}'", "f16, bf16, q8, q4_1, q4 or mxfp4")
        refused(UsageError, partial(read_model, path, other), *texts)
    assert "with --dtype f16" in run_main("show", path).out
    file = tmp_path / "m.gguf"
    file.write_bytes(small_llama().content())
    read_model(file, "f16")  # its tensors are floats


def test_config_json_keeps_its_word(tmp_path: Path) -> None:
    """Without quantized tensors, what config.json calls quantized is quantized while it loads."""
    path = make_model("q-llama", tmp_path)
    about = {"quant_method": "hotcold", "bits": 4, "group_size": 32, "version": 1}
    change_config(path, quantization_config=about)
    assert read_model(path).dtype == "q4"
    assert loaded(path).head.head.dtype == Q4
