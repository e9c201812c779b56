"""--dtype f16 and bf16: float weights in 16 bits while they load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hotcold.actors.setup.preflight import SystemOptions, prepare_system, read_model
from hotcold.jobs.cli import main
from hotcold.model.config.build import read_config
from hotcold.model.errors import CheckpointError, MemoryBudgetError, UsageError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import load_attention
from hotcold.model.weights.embedding import load_embedding, load_head
from hotcold.model.weights.ffn import load_ffn
from hotcold.model.weights.sizes import weight_bytes
from tests.gguf_files import small_llama
from tests.tiny_models import make_tiny
from tests.unit.test_quantized_weights import edited, load_all, refused

TORCH = {"f16": torch.float16, "bf16": torch.bfloat16}
NUMPY = {"f16": np.uint16, "bf16": np.int16}


def loaded(path: Path, dtype: str, ids: list[np.ndarray]) -> list[Any]:
    config, checkpoint = read_config(path), Checkpoint(path)
    return [
        load_attention(checkpoint, config, dtype=dtype),
        load_ffn(checkpoint, config, ids, include_down_bias=True, dtype=dtype),
        load_head(checkpoint, config, dtype=dtype),
    ]


@pytest.mark.parametrize("name", ["f16", "bf16"])
@pytest.mark.parametrize("model", ["llama-gqa", "opt-prenorm"])
def test_matrices_are_those_of_the_model_in_16_bits(model: str, name: str, tmp_path: Path) -> None:
    path, rounded = make_tiny(model, tmp_path / "a"), make_tiny(model, tmp_path / "b")
    tensors = load_file(rounded / "model.safetensors")
    halves = {key: tensor.to(TORCH[name]).contiguous() for key, tensor in tensors.items()}
    save_file(halves, rounded / "model.safetensors")
    config = read_config(path)
    every_other = [np.arange(0, config.ffn_size, 2, dtype=np.int32)] * config.num_layers
    for cast, stored in zip(
        loaded(path, name, every_other), loaded(rounded, "", every_other), strict=True
    ):
        for key, array in vars(cast).items():
            if isinstance(array, np.ndarray) and array.ndim > 1 and array.dtype == NUMPY[name]:
                np.testing.assert_array_equal(array, getattr(stored, key), err_msg=key)
        kinds = {array.dtype for array in vars(cast).values() if isinstance(array, np.ndarray)}
        assert np.dtype(NUMPY[name]) in kinds  # matrices; vectors are float32 in both
    assert load_embedding(Checkpoint(path), config).tokens.dtype == np.float32


def test_a_system_takes_half_the_memory(tmp_path: Path) -> None:
    path = make_tiny("llama-gqa", tmp_path)
    plain = prepare_system(path, SystemOptions())
    cast = prepare_system(path, SystemOptions(weight_dtype="bf16"))
    assert (plain[1].dtype, cast[1].dtype) == ("float32", "bfloat16")
    assert (plain[0].kv_dtype, cast[0].kv_dtype) == ("float32", "float16")
    assert weight_bytes(cast[1]) < 0.6 * weight_bytes(plain[1])
    with pytest.raises(MemoryBudgetError, match="--dtype f16"):
        need = 1.01 * weight_bytes(cast[1])
        from hotcold.actors.setup.account import account

        total = account(*cast).total_bytes
        prepare_system(path, SystemOptions(cpu_memory_bytes=int(max(need, total))))


def test_what_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    for tensor in ("1.self_attn.k_proj.weight", "1.mlp.up_proj.weight", "1.mlp.down_proj.weight"):
        path = edited(make_tiny("llama-gqa", tmp_path / tensor), tensor, 65520.0)
        refused(CheckpointError, lambda p=path: load_all(p, "f16"), tensor, "--dtype bf16")  # type: ignore[misc]
        load_all(path, "bf16")
        load_all(edited(path, tensor, 65519.0), "f16")  # rounds to the largest, 65504
        nan = edited(path, tensor, float("nan"))
        refused(CheckpointError, lambda p=nan: load_all(p, "f16"), tensor, "NaN")  # type: ignore[misc]


def test_what_is_quantized_is_not_cast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(small_llama().content())
    read_model(file, "f16")  # its tensors are floats
    path = make_tiny("llama-gqa", tmp_path / "m")
    refused(
        UsageError, lambda: read_model(path, "f32"), "'f32'", "f16, bf16, q8, q4_1, q4 or mxfp4"
    )
    assert main(["show", str(path)]) == 0
    assert "with --dtype f16" in capsys.readouterr().out
