"""Weights quantized while they load: which, how, and how many bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hotcold.actors.setup.preflight import read_model
from hotcold.model.config.build import read_config
from hotcold.model.config.families import tensor_names
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import row_bytes
from hotcold.model.errors import CheckpointError, HotcoldError, UsageError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import load_attention
from hotcold.model.weights.check import stored_config
from hotcold.model.weights.embedding import load_embedding, load_head
from hotcold.model.weights.ffn import load_ffn
from hotcold.model.weights.sizes import attention_bytes, ffn_bytes, head_bytes
from hotcold.numba_kernels.formats import MXFP4, Q4, Q4_1, Q8
from hotcold.numba_kernels.load.convert import to_float32
from hotcold.placement.solver.cost import RowBytes
from tests.quantized_models import GROUP_BYTES, laid_out, make_model
from tests.tiny_models import make_tiny


def all_ids(config: ModelConfig) -> list[np.ndarray]:
    return [np.arange(config.ffn_size, dtype=np.int32)] * config.num_layers


def floats(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return to_float32(checkpoint.array(name))


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
    """And their bytes are known before they are loaded."""
    path = make_model(model, tmp_path, dtype="bfloat16")
    checkpoint, seen = Checkpoint(path), list[int]()
    config = stored_config(checkpoint, read_config(path), name)
    assert config.dtype == name
    attention = load_attention(checkpoint, config, dtype=name)
    head = load_head(checkpoint, config, dtype=name)
    ffn = load_ffn(
        checkpoint, config, all_ids(config), include_down_bias=True, dtype=name,
        on_bytes=seen.append,
    )  # fmt: skip
    for loaded, size in (
        (attention, attention_bytes(config)),
        (head, head_bytes(config)),
        (ffn, ffn_bytes(config, config.num_neurons)),
    ):
        arrays = {kind: a for kind, a in vars(loaded).items() if kind not in ("starts", "stripes")}
        assert sum(array.nbytes for array in arrays.values()) == size
    gate_bytes = config.num_neurons * row_bytes(config, config.hidden_size, "gate")
    rows = (3 if config.has_gate else 2) * gate_bytes
    assert rows <= sum(seen) <= rows * 1.2
    assert RowBytes.of(config).first == config.hidden_size // 32 * GROUP_BYTES[name]
    plain = load_attention(checkpoint, read_config(path))
    names = tensor_names(config)
    for layer in range(config.num_layers):
        own = names.of_layer(layer)
        part = ffn.part(layer)
        for found, expected in [
            (attention.qkv.matrix(layer), to_float32(plain.qkv.matrix(layer))),
            (attention.out[layer], floats(checkpoint, f"{own.out}.weight")),
            (ffn.gate[part], floats(checkpoint, f"{own.gate}.weight")),
            (ffn.down[part], floats(checkpoint, f"{own.down}.weight").T),
        ]:
            assert found.dtype == dtype
            np.testing.assert_array_equal(rows_of(found), laid_out(expected, name))
        if config.has_gate:
            up = floats(checkpoint, f"{own.up}.weight")
            np.testing.assert_array_equal(rows_of(ffn.up[part]), laid_out(up, name))
    is_tied = not checkpoint.has("lm_head.weight")
    tokens = floats(checkpoint, f"{names.tokens if is_tied else 'lm_head'}.weight")
    np.testing.assert_array_equal(rows_of(head.head), laid_out(tokens, name))
    assert load_embedding(checkpoint, config).tokens.dtype == np.int16
    for array in (*plain.vectors[:2], plain.vectors.qkv_bias, head.final_norm_weight):
        assert array.dtype == np.float32
    np.testing.assert_array_equal(attention.vectors.norm_weight, plain.vectors.norm_weight)
    np.testing.assert_array_equal(attention.vectors.qkv_bias, plain.vectors.qkv_bias)


def edited(path: Path, name: str, value: float) -> Path:
    """The model with one weight of a tensor changed, in float32."""
    tensors = {key: t.float() for key, t in load_file(path / "model.safetensors").items()}
    key = next(key for key in tensors if key.endswith(name))
    tensors[key].view(-1)[-1] = value
    save_file(tensors, path / "model.safetensors")
    return path


def load_all(path: Path, dtype: str = "") -> None:
    config, checkpoint = read_config(path), Checkpoint(path)
    load_attention(checkpoint, config, dtype=dtype)
    load_ffn(checkpoint, config, all_ids(config), include_down_bias=True, dtype=dtype)
    load_embedding(checkpoint, config)
    load_head(checkpoint, config, dtype=dtype)


def refused(error: type[HotcoldError], call: Callable[[], Any], *texts: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert "\n" not in str(caught.value)
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize("tensor", ["1.mlp.up_proj.weight", "1.mlp.down_proj.weight"])
@pytest.mark.parametrize("name", ["q8", "mxfp4"])
def test_bad_weights_are_named(tensor: str, name: str, tmp_path: Path) -> None:
    large = [] if name == "mxfp4" else [(1e7, "too large"), (1e9, "too")]
    for value, text in ((torch.nan, "NaN"), (-torch.inf, "NaN"), *large):
        path = edited(make_model("q-llama", tmp_path, dtype="float32"), tensor, value)
        refused(CheckpointError, partial(load_all, path, name), tensor, text)


def test_rows_that_are_no_whole_groups(tmp_path: Path) -> None:
    path = make_tiny("llama-relu", tmp_path)
    for call in (read_model, load_all):
        refused(UsageError, partial(call, path, "q8"), "--dtype q8", "rows of 48", "stored in")
    refused(UsageError, lambda: read_model(path, "q5"), "'q5'", "q8, q4_1, q4 or mxfp4")


def test_config_json_keeps_its_word(tmp_path: Path) -> None:
    """Without quantized tensors, what config.json calls quantized is quantized while it loads."""
    path = make_model("q-llama", tmp_path)
    values = json.loads((path / "config.json").read_text())
    about = {"quant_method": "hotcold", "bits": 4, "group_size": 32, "version": 1}
    (path / "config.json").write_text(json.dumps(values | {"quantization_config": about}))
    assert read_model(path).dtype == "q4"
    assert load_head(Checkpoint(path), read_config(path)).head.dtype == Q4
