"""Every architecture of GGUF files that is read, against transformers' model of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from hotcold.model.config.build import read_config
from hotcold.model.config.gguf_architectures import ARCHITECTURES
from hotcold.model.errors import ConfigError
from tests.gguf_files import LlamaFile
from tests.reference import reference_logits
from tests.tiny_models import make_tiny
from tests.unit.test_mixtures import FILES

IDS = [3, 7, 1, 90, 55, 20, 3, 3, 64, 17, 5]
IDS_OF_TINY = [3, 7, 1, 40, 33, 20, 3]
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
Case = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
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


def random_model(name: str, config: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """transformers' logits of a random model of that class, and its tensors."""
    import torch
    import transformers

    torch.manual_seed(3)
    model_class = getattr(transformers, f"{name}ForCausalLM")
    model = model_class._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        logits = model(torch.tensor([IDS])).logits[0].numpy()
    return logits, {key: value.numpy() for key, value in model.state_dict().items()}


def made(
    case: Case, path: Path, arch: str, extra: dict[str, np.ndarray] | None = None
) -> np.ndarray:
    """Write a random model as a file; returns transformers' logits of it."""
    import transformers

    name, changes, how, keys = case
    config = getattr(transformers, f"{name}Config")(**(SIZES | changes))
    logits, tensors = random_model(name.removesuffix("Text"), config)
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    values = SIZES | config.to_dict()
    LlamaFile(values, tensors, keys=keys, extra=extra or {}, arch=arch, **how).write(path)
    return logits


def require_same_logits(path: Path, expected: np.ndarray) -> None:
    largest = float(np.abs(expected).max())
    assert largest > 0.1
    assert np.abs(reference_logits(path, IDS) - expected).max() < 1e-4 * max(1.0, largest)


def falcon(path: Path, powerinfer: bool) -> np.ndarray:
    """As `made`, of Falcon, whose q, k and v the converter takes apart."""
    import transformers

    config = transformers.FalconConfig(
        vocab_size=101, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_kv_heads=2, new_decoder_architecture=True, multi_query=False,
        ffn_hidden_size=64, activation="relu" if powerinfer else "gelu", alibi=False, bias=False,
    )  # fmt: skip
    logits, held = random_model("Falcon", config)
    tensors, extra = {}, {}
    for name, rows in held.items():
        if "query_key_value" in name:
            heads = rows.reshape(2, 4, 8, 32)
            parts = (heads[:, :-2], heads[:, -2:-1], heads[:, -1:])
            tensors[name] = np.concatenate([part.reshape(-1, 32) for part in parts])
        elif powerinfer and "dense_4h_to_h" in name:
            extra[f"blk.{name.split('.')[2]}.ffn_down_t.weight"] = np.ascontiguousarray(rows.T)
        elif name != "lm_head.weight":
            tensors[name] = rows
    sizes = {"num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8}
    keys = {"falcon.attention.layer_norm_epsilon": 1e-5}
    values = SIZES | {"num_hidden_layers": 2} | sizes
    LlamaFile(values, tensors, keys=keys, extra=extra, arch="falcon", pairs_rows=False).write(path)
    return logits


@pytest.mark.parametrize("powerinfer", [False, True])
def test_falcons_logits_are_transformers(powerinfer: bool, tmp_path: Path) -> None:
    require_same_logits(tmp_path / "m.gguf", falcon(tmp_path / "m.gguf", powerinfer))


def minicpm(folder: Path, **keys: Any) -> Path:
    """A MiniCPM of Hugging Face's kind, and beside it the file m.gguf that is made of it."""
    path = make_tiny("minicpm", folder / "hf")
    values = json.loads((path / "config.json").read_text())
    values["hidden_act"] = "silu"
    del values["hidden_act_param"]
    (path / "config.json").write_text(json.dumps(values))
    hidden, layers = values["hidden_size"], values["num_hidden_layers"]
    scales = {
        "minicpm.embedding_scale": float(values["scale_emb"]),
        "minicpm.residual_scale": values["scale_depth"] / layers**0.5,
        "minicpm.logit_scale": hidden / values["dim_model_base"],
    }
    tensors = load_file(path / "model.safetensors")
    sizes = {"head_dim": hidden // values["num_attention_heads"]}
    made = LlamaFile(values | sizes, tensors, keys=scales | keys, arch="minicpm")
    made.write(folder / "m.gguf")
    return path


def test_minicpms_scales_are_read(tmp_path: Path) -> None:
    """Against the family's own reading, which is compared with transformers elsewhere."""
    expected = reference_logits(minicpm(tmp_path), IDS_OF_TINY)
    found = reference_logits(tmp_path / "m.gguf", IDS_OF_TINY)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_minicpm_s_is_not_taken_for_another(tmp_path: Path) -> None:
    minicpm(tmp_path / "s", **{"general.name": "MiniCPM-S-1B-sft"})
    with pytest.raises(ConfigError, match="use its safetensors files"):
        read_config(tmp_path / "s" / "m.gguf")


def test_every_architecture_is_compared() -> None:
    """Bamboo is PowerInfer's alone (test_powerinfer_import.py); mixtures: test_mixtures.py."""
    mixtures = {arch for _, arch, _, _ in FILES.values()}
    assert {*CASES, "falcon", "bamboo", "minicpm", *mixtures} == ARCHITECTURES.keys()


@pytest.mark.parametrize("arch", CASES)
def test_logits_are_transformers(arch: str, tmp_path: Path) -> None:
    require_same_logits(tmp_path / "m.gguf", made(CASES[arch], tmp_path / "m.gguf", arch))


@pytest.mark.parametrize("keys", [{}, {"phi3.rope.scaling.attn_factor": 1.25}])
def test_lists_of_factors_of_the_rope(keys: dict[str, float], tmp_path: Path) -> None:
    """Cosines and sines are multiplied with attn_factor; without it, as the context says."""
    short, long = [1.0 + i / 8 for i in range(4)], [2.0 + i for i in range(4)]
    scaling = {"short_factor": short, "long_factor": long, "rope_type": "longrope"}
    own = {"attention_factor": 1.25} if keys else {}
    rope = scaling | own | {"rope_theta": 10000.0, "original_max_position_embeddings": 8}
    changes = {"head_dim": 8, "rope_parameters": rope, "original_max_position_embeddings": 8}
    keys = {"phi3.rope.scaling.original_context_length": 8} | keys
    extra = {
        f"rope_factors_{name}.weight": np.array(factors, np.float32)
        for name, factors in (("short", short), ("long", long))
    }
    case = ("Phi3", changes, {"pairs_rows": False}, keys)
    require_same_logits(tmp_path / "m.gguf", made(case, tmp_path / "m.gguf", "phi3", extra))


def test_a_llama_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    """llama.cpp has no architecture of Mistral's, and leaves the window out."""
    path, keys = tmp_path / "m.gguf", {"llama.attention.sliding_window": 4}
    require_same_logits(path, made(("Mistral", {"sliding_window": 4}, {}, keys), path, "llama"))
    assert read_config(path).windows == (4,) * SIZES["num_hidden_layers"]
