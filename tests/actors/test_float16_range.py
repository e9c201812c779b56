"""Numbers beyond 65504, where float16 ends: told in the KV cache, right in a GPU's prompts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hotcold.actors.attention.attention_service import AttentionService
from hotcold.actors.protocol.failures import NotFiniteError
from tests.actors.cuda_in_process import CudaInProcess, a_third
from tests.actors.in_process import InProcessSystem
from tests.actors.test_prefill_loops import IDS
from tests.quantized_models import make_model
from tests.reference import reference_logits, relative_difference


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_a_key_beyond_float16_is_noticed(num_tokens: int, tmp_path: Path) -> None:
    """Its score with every query is minus infinity, so an infinite key would weigh nothing."""
    path = make_model("q-llama", tmp_path)
    with InProcessSystem(path, num_slots=2, max_tokens=128, kv_dtype="float16") as system:
        engine, attention = system.engine("exact"), system.services[0]
        assert isinstance(attention, AttentionService)
        engine.step(IDS[:1].tolist(), [0], [0])
        spec = system.config.layers[0].attention
        (weights,) = attention.arrays.qkv.parts(0)
        heads = weights[: (spec.num_heads + spec.num_kv_heads) * spec.head_dim]
        slowest = heads[spec.head_dim // 2 - 1 :: spec.head_dim]  # of the items that are rotated
        signs = np.where(np.arange(weights.shape[1]) % 2, 1, -1)
        slowest[: spec.num_heads] = (-60000 * signs).astype(np.float16).view(np.uint16)
        slowest[spec.num_heads :] = (60000 * signs).astype(np.float16).view(np.uint16)
        places = range(1, 1 + num_tokens)
        with pytest.raises(NotFiniteError, match=r"in layer 0.*float16 KV cache too narrow"):
            engine.step(IDS[1 : 1 + num_tokens].tolist(), places, [0] * num_tokens)


def test_a_gpus_prompts_have_numbers_beyond_float16(tmp_path: Path) -> None:
    """Of the input of down projections, as models in bfloat16 have them."""
    path = make_model("q-llama", tmp_path)
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if "gate_proj" in name or "up_proj" in name:
            tensors[name] = tensors[name] * np.float16(600)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    ids = IDS[:40]
    expected = reference_logits(path, ids)
    with CudaInProcess(path, hot=a_third) as system:
        found = system.logits("dense", ids, [40])
    with InProcessSystem(path) as system:
        beside = system.logits("dense", ids, [40])
    assert relative_difference(found, expected) < 0.03
    assert relative_difference(beside, expected) < 0.03
