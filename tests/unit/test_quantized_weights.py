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

from hotcold.actors.processes.service_actor import ServiceActor
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.setup.account import account
from hotcold.actors.setup.preflight import SystemOptions, prepare_system, read_model
from hotcold.actors.setup.shards import service_specs
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
from tests.quantized_models import GROUP_BYTES, MODELS, dequantized, laid_out, make_model
from tests.reference import reference_logits
from tests.tiny_models import make_tiny

DTYPES = [("q8", Q8), ("q4", Q4), ("q4_1", Q4_1), ("mxfp4", MXFP4)]


def all_ids(config: ModelConfig) -> list[np.ndarray]:
    return [np.arange(config.ffn_size, dtype=np.int32)] * config.num_layers


def floats(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return to_float32(checkpoint.array(name))


def rows_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_matrices_are_quantized_row_by_row(
    model: str, name: str, dtype: np.dtype, tmp_path: Path
) -> None:
    path = make_model(model, tmp_path, dtype="bfloat16")
    config, checkpoint = read_config(path), Checkpoint(path)
    attention = load_attention(checkpoint, config, dtype=name)
    ffn = load_ffn(checkpoint, config, all_ids(config), include_down_bias=True, dtype=name)
    head = load_head(checkpoint, config, dtype=name)
    plain = load_attention(checkpoint, config)
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


@pytest.mark.parametrize("name", ["q8", "q4_1", "q4", "mxfp4"])
@pytest.mark.parametrize("model", ["q-llama", "q-falcon-grouped"])
def test_any_subset_of_neurons(model: str, name: str, tmp_path: Path) -> None:
    path = make_model(model, tmp_path)
    config, checkpoint = read_config(path), Checkpoint(path)
    whole = load_ffn(checkpoint, config, all_ids(config), include_down_bias=True, dtype=name)
    rng = np.random.default_rng(0)
    ids = [rng.permutation(config.ffn_size)[: 7 * n].astype(np.int32) for n in range(2)]
    ids += [np.array([5], np.int32)] * (config.num_layers - 2)
    part = load_ffn(checkpoint, config, ids, include_down_bias=False, dtype=name)
    for layer, layer_ids in enumerate(ids):
        rows = part.part(layer)
        for kind in ("gate", "up", "down"):
            expected = getattr(whole, kind)
            if expected.size:
                expected = expected[layer_ids + layer * config.ffn_size]
                np.testing.assert_array_equal(getattr(part, kind)[rows], expected, err_msg=kind)


@pytest.mark.parametrize("name", ["q8", "q4_1", "q4", "mxfp4"])
@pytest.mark.parametrize("model", MODELS)
def test_bytes_are_known_before_loading(model: str, name: str, tmp_path: Path) -> None:
    path = make_model(model, tmp_path)
    checkpoint = Checkpoint(path)
    config = stored_config(checkpoint, read_config(path), name)
    assert config.dtype == name
    seen: list[int] = []
    ids = all_ids(config)
    for found, size in [
        (load_attention(checkpoint, config, dtype=name), attention_bytes(config)),
        (load_head(checkpoint, config, dtype=name), head_bytes(config)),
        (
            load_ffn(
                checkpoint, config, ids, include_down_bias=True, dtype=name, on_bytes=seen.append
            ),
            ffn_bytes(config, config.num_neurons),
        ),
    ]:
        arrays = {
            kind: value for kind, value in vars(found).items() if kind not in ("starts", "lanes")
        }
        assert sum(array.nbytes for array in arrays.values()) == size
    num_matrices = 3 if config.has_gate else 2
    rows = (
        num_matrices
        * config.ffn_size
        * config.num_layers
        * row_bytes(config, config.hidden_size, "gate")
    )
    assert rows <= sum(seen) <= rows * 1.2
    assert RowBytes.of(config).first == config.hidden_size // 32 * GROUP_BYTES[name]


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


@pytest.mark.parametrize(
    "tensor", ["1.self_attn.k_proj.weight", "1.mlp.up_proj.weight", "1.mlp.down_proj.weight"]
)
@pytest.mark.parametrize("name", ["q8", "q4_1", "q4", "mxfp4"])
def test_bad_weights_are_named(tensor: str, name: str, tmp_path: Path) -> None:
    large = [] if name == "mxfp4" else [(1e7, "too large"), (1e9, "too")]
    for value, text in ((torch.nan, "NaN"), (-torch.inf, "NaN"), *large):
        path = edited(make_model("q-llama", tmp_path, dtype="float32"), tensor, value)
        refused(CheckpointError, partial(load_all, path, name), tensor, text)


@pytest.mark.parametrize("name", ["q8", "q4_1", "q4", "mxfp4"])
def test_rows_that_are_no_whole_groups(name: str, tmp_path: Path) -> None:
    path = make_tiny("llama-relu", tmp_path)
    texts = (f"--dtype {name}", "rows of 48", "stored in")
    refused(UsageError, lambda: read_model(path, name), *texts)
    refused(UsageError, lambda: load_all(path, name), *texts)
    refused(UsageError, lambda: read_model(path, "q5"), "'q5'", "q8, q4_1, q4 or mxfp4")


def test_an_attention_of_another_width(tmp_path: Path) -> None:
    """hidden_size is whole groups, the heads together are not."""
    import tests.tiny_models as tiny

    tiny.VARIANTS["q-odd-heads"] = tiny.Variant(tiny._llama, hidden_size=64, head_dim=20)
    try:
        path = make_tiny("q-odd-heads", tmp_path)
    finally:
        del tiny.VARIANTS["q-odd-heads"]
    refused(UsageError, lambda: read_model(path, "q8"), "rows of 80")


@pytest.mark.parametrize("name", ["q8", "q4_1", "q4", "mxfp4"])
@pytest.mark.parametrize("model", MODELS)
def test_the_reference_runs_dequantized_weights(model: str, name: str, tmp_path: Path) -> None:
    """Quantized logits are those of the same model with its matrices rounded by gguf."""
    path = make_model(model, tmp_path / "a", dtype="float32")
    ids = np.random.default_rng(5).integers(0, 101, 12)
    found = reference_logits(path, ids, name)
    rounded = make_model(model, tmp_path / "b", dtype="float32")
    tensors = load_file(rounded / "model.safetensors")
    is_tied = not any(key.endswith("lm_head.weight") for key in tensors)
    if is_tied:  # a head of its own beside the embeddings, which stay as they are
        tokens = next(t for key, t in tensors.items() if "embed_tokens" in key or "word_emb" in key)
        tensors["lm_head.weight"] = tokens.clone()
    for key, tensor in tensors.items():
        is_table = any(part in key for part in ("embed", "project_"))
        if tensor.dim() == 2 and not is_table:
            is_down = any(part in key for part in ("down_proj", "fc2", "4h_to_h"))
            values = tensor.T if is_down else tensor
            back = torch.from_numpy(dequantized(values.contiguous().numpy(), name))
            tensors[key] = (back.T if is_down else back).contiguous()
    save_file(tensors, rounded / "model.safetensors")
    np.testing.assert_allclose(found, reference_logits(rounded, ids), rtol=1e-12, atol=1e-12)
    plain = reference_logits(path, ids)
    assert np.abs(found - plain).max() > 1e-4 * np.abs(plain).max()


def test_a_system_is_told_the_dtype(tmp_path: Path) -> None:
    path = make_model("q-opt", tmp_path, dtype="float32")
    system, config = prepare_system(path, SystemOptions(weight_dtype="q4", num_threads=1))
    assert (system.weight_dtype, config.dtype, system.kv_dtype) == ("q4", "q4", "float16")
    plain, stored = prepare_system(path, SystemOptions(num_threads=1))
    assert (plain.weight_dtype, stored.dtype) == ("", "float32")
    weights = account(plain, stored).ffn_bytes / account(system, config).ffn_bytes
    assert weights == pytest.approx(4 / (18 / 32), rel=0.15)
    for spec in service_specs(system, config):
        assert spec.system.weight_dtype == "q4"
        host = ServiceActor(spec)
        host.load()
        arrays = vars(host._require_service())["arrays"]
        kinds = ("qkv", "out", "head") if spec.index == 0 else ("gate", "down")
        matrices = [getattr(arrays, kind) for kind in kinds]
        assert all(getattr(matrix, "first", matrix).dtype == Q4 for matrix in matrices)
        assert host.loaded_bytes() > 0
    for spec in service_specs(SystemConfig(str(path)), stored):
        assert spec.system.weight_dtype == ""


def test_config_json_keeps_its_word(tmp_path: Path) -> None:
    """Without quantized tensors, what config.json calls quantized is quantized while it loads."""
    path = make_model("q-llama", tmp_path)
    values = json.loads((path / "config.json").read_text())
    about = {"quant_method": "hotcold", "bits": 4, "group_size": 32, "version": 1}
    (path / "config.json").write_text(json.dumps(values | {"quantization_config": about}))
    assert read_model(path).dtype == "q4"
    assert load_head(Checkpoint(path), read_config(path)).head.dtype == Q4
