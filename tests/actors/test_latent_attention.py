"""Multi-head latent attention in the formats of files and caches, beside the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup import gpu_share
from hotcold.actors.setup.preflight import prepare_system
from hotcold.model.config.build import read_config
from hotcold.model.errors import UsageError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import load_attention
from hotcold.model.weights.check import stored_config
from hotcold.model.weights.sizes import attention_bytes, kv_cache_bytes, position_bytes
from tests.actors.in_process import InProcessSystem
from tests.reference import reference_logits
from tests.tiny_models import MIXTURES, VOCAB_SIZE, Variant, make_tiny
from tests.unit import test_mixtures
from tests.unit.test_mixtures import FILES, write_gguf

IDS = np.random.default_rng(5).integers(0, VOCAB_SIZE, 100)
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 3,  # no router, which would choose other experts
}
KEYS = {
    "leading_dense_block_count": 3,
    "attention.q_lora_rank": 64,
    "attention.kv_lora_rank": 64,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 32,
    "rope.dimension_count": 16,
}
KINDS = {
    "attn_q_b": "Q4_0",
    "attn_k_b": "Q8_0",
    "attn_v_b": "Q5_0",
    "attn_kv_b": "Q4_0",
    "attn_q_a.": "Q4_K",
    "attn_kv_a_mqa": "Q6_K",
    "attn_output": "Q8_0",
}


def wide_file(folder: Path, layout: str) -> Path:
    """A GGUF file whose attention is quantized, each matrix in another format."""
    name, arch, pairs_rows, keys = FILES["deepseek2"]
    made = MIXTURES[name]
    variant = Variant(made.func, *made.args, **(made.keywords | SIZES))
    files = {"deepseek2": (name, arch, pairs_rows, keys | KEYS)}
    with (
        mock.patch.dict(MIXTURES, {name: variant}),
        mock.patch.object(test_mixtures, "FILES", files),
    ):
        make_tiny(name, folder)
        write_gguf(folder, "deepseek2", layout, kinds=KINDS)
    return folder / "m.gguf"


def typical_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The median of differences, as a share of the largest logit."""
    return float(np.median(np.abs(found - expected)) / np.abs(expected).max())


@pytest.mark.sweep(kv_dtype=["q8"])
@pytest.mark.parametrize(
    ("layout", "kv_dtype", "bound"),
    [("stacked", "q8", 0.12), ("split", "float16", 0.05), ("stacked", "float32", 0.05)],
)
def test_formats(layout: str, kv_dtype: str, bound: float, tmp_path: Path) -> None:
    """To the rounding of activations to 8 bits, which grows from layer to layer; the same bits in
    steps of any size."""
    path = wide_file(tmp_path, layout)
    expected = reference_logits(path, IDS)
    with InProcessSystem(path, 1, 2, kv_dtype=kv_dtype, max_tokens=100) as system:
        alone = system.logits("dense", IDS, [1])
        assert typical_difference(alone, expected) < bound
        assert np.array_equal(system.logits("dense", IDS, [2, 8, 3, 7]), alone)
        prompt = system.logits("dense", IDS, [100])
        assert typical_difference(prompt, expected) < bound
        assert np.array_equal(system.logits("dense", IDS, [33, 34, 33]), prompt)


@pytest.mark.parametrize("layout", ["stacked", "split", "safetensors"])
def test_bytes_are_counted_as_they_are_taken(layout: str, tmp_path: Path) -> None:
    path = wide_file(tmp_path, layout)
    path = tmp_path if layout == "safetensors" else path
    checkpoint, config = Checkpoint(path), read_config(path)
    stored, weights = stored_config(checkpoint, config), load_attention(checkpoint, config)
    found = weights.vectors.nbytes + weights.qkv.nbytes + weights.out.nbytes + weights.latent.nbytes
    found += weights.routers.nbytes
    assert attention_bytes(stored) == found


def test_a_position_takes_one_row(tmp_path: Path) -> None:
    """Of the latent vector and the rotated part, for keys and values of all heads."""
    config = read_config(make_tiny("deepseek-v3", tmp_path))
    assert position_bytes(config.layers[0], "float16") == 2 * (28 + 8)
    with InProcessSystem(tmp_path, kv_dtype="float16") as system:
        service: Any = system.services[0]
        num_bytes = sum(pages.nbytes for _, pages in service.cache_pages)
    assert num_bytes == kv_cache_bytes(config, 128, "float16")


def test_a_gpu_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_share, "first_gpu", lambda: ("a GPU", 8 << 30))
    path = make_tiny("glm4-moe-lite", tmp_path)
    assert prepare_system(path, SystemOptions())[0].device == "cpu"
    with pytest.raises(UsageError, match="latent attention runs on the CPU only"):
        prepare_system(path, replace(SystemOptions(), device="cuda"))
