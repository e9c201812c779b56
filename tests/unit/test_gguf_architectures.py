"""Every architecture of GGUF files that is read, against transformers' model of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.config.gguf.architectures import ARCHITECTURES
from model.errors import HotcoldError
from model.reference import reference_logits
from tests.gguf_files import UINT32, LlamaFile, small_llama

IDS = [3, 7, 1, 90, 55, 20, 3, 3, 64, 17, 5]
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# class, what its configuration changes, how its file is written, keys beside the common ones.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {}, {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, {"pairs_rows": False}, {}),
    "qwen3": ("Qwen3", {}, {"pairs_rows": False}, {}),
    "gemma2": (
        "Gemma2",
        {"sliding_window": 4, "query_pre_attn_scalar": 16},
        {"pairs_rows": False, "adds_one": True},
        {
            "gemma2.attention.sliding_window": 4,
            "gemma2.attn_logit_softcapping": 50.0,
            "gemma2.final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "sliding_window": 4,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
                "sliding_attention": _ROPE,
            },
        },
        {"pairs_rows": False, "adds_one": True},
        {"gemma3.attention.sliding_window": 4, "gemma3.rope.freq_base": 1000000.0},
    ),
    "phi3": (
        "Phi3",
        {"head_dim": 8, "sliding_window": 5},
        {"pairs_rows": False},
        {"phi3.attention.sliding_window": 5},
    ),
    "olmo2": ("Olmo2", {"head_dim": 8}, {"pairs_rows": False}, {}),
    "smollm3": ("SmolLM3", {"head_dim": 8, "rope_parameters": _ROPE}, {}, {}),
    "arcee": ("Arcee", {}, {}, {}),
    "nemotron": (
        "Nemotron",
        {"norm_eps": 1e-5},
        {"pairs_rows": False, "adds_one": True},
        {"nemotron.attention.layer_norm_epsilon": 1e-5, "nemotron.rope.dimension_count": 8},
    ),
}


def made(arch: str, path: Path) -> np.ndarray:
    """Write a random model as a file; returns transformers' logits of it."""
    import torch
    import transformers

    name, changes, how, keys = CASES[arch]
    config = getattr(transformers, f"{name}Config")(**(SIZES | changes))
    torch.manual_seed(3)
    class_name = f"{name.removesuffix('Text')}ForCausalLM"
    model = getattr(transformers, class_name)._from_config(config, attn_implementation="eager")
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        logits = model(torch.tensor([IDS])).logits[0].numpy()
    tensors = {key: value.numpy() for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    values = SIZES | config.to_dict()
    LlamaFile(values, tensors, keys=keys, arch=arch, **how).write(path)
    return logits


def test_every_architecture_is_compared() -> None:
    assert set(CASES) == set(ARCHITECTURES)


@pytest.mark.parametrize("arch", CASES)
def test_logits_are_transformers(arch: str, tmp_path: Path) -> None:
    wanted = made(arch, tmp_path / "tiny.gguf")
    found = reference_logits(tmp_path / "tiny.gguf", IDS)
    assert np.abs(found - wanted).max() < 1e-4 * max(1.0, float(np.abs(wanted).max()))
    assert np.abs(wanted).max() > 0.1


def test_a_window_that_the_architecture_has_not_is_refused(tmp_path: Path) -> None:
    draft = small_llama().with_key("llama.attention.sliding_window", UINT32, 16)
    (tmp_path / "a.gguf").write_bytes(draft.content())
    with pytest.raises(HotcoldError, match="sliding"):
        reference_logits(tmp_path / "a.gguf", [1])
