"""Every architecture of GGUF files that is read, against transformers' model of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from hotcold.model.config.build import read_config
from hotcold.model.config.families import GGUF_ARCHITECTURES
from hotcold.model.errors import CheckpointError, ConfigError
from tests.gguf_files import LlamaFile, left_out, small_llama
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
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4,
}
_YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 4,
}
_GEMMA4: dict[str, Any] = {
    "sliding_window": 4,
    "global_head_dim": 24,
    "vocab_size_per_layer_input": 101,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
_GEMMA4_KEYS: dict[str, Any] = {
    "attention.sliding_window": 4,
    "attention.sliding_window_pattern": [True, True, False] * 2,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
    "rope.dimension_count": 24,
    "rope.dimension_count_swa": 16,
    "rope.freq_base": 1000000.0,
    "rope.freq_base_swa": 10000.0,
    "final_logit_softcapping": 30.0,
}
# The rope of layers without a window: three of twelve pairs are rotated.
_GEMMA4_ROPE = {"rope_freqs.weight": np.array([1.0] * 3 + [1e30] * 9, np.float32)}
# Files of the E models also have keys and values that no layer reads; Ollama's what pictures take.
_OF_PICTURES = {
    f"{name}.weight": np.ones((4, 4), np.float32) for name in ("v.blk.0.attn_q", "mm.a")
}
GEMMA4_EXTRA = (
    _GEMMA4_ROPE
    | _OF_PICTURES
    | {
        f"blk.{layer}.attn_{name}.weight": np.ones((32, 32), np.float32)
        for layer in (3, 4, 5)
        for name in ("k", "v")
    }
)
# class, what its configuration changes, how its file is written, keys beside the common ones, the
# architecture's name left out.
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
            "attention.sliding_window": 4,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
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
        {"attention.sliding_window": 4, "rope.freq_base": 1000000.0},
    ),
    "gemma4": (
        "Gemma4Text",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 32,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
        {
            "pairs_rows": False,
            "sizes": {"head_dim": 24, "intermediate_size": [64] * 3 + [128] * 3},
        },
        _GEMMA4_KEYS
        | {
            "embedding_length_per_layer_input": 32,
            "attention.shared_kv_layers": 3,
        },
    ),
    "granitehybrid": (
        "GraniteMoeHybrid",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2,
            "shared_intermediate_size": 40,
            "num_local_experts": 0,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 12,
            "head_dim": 8,
        },
        {},
        {
            "expert_shared_feed_forward_length": 40,
            "attention.scale": 1.0,
            "attention.head_count_kv": [0, 2, 0] * 2,
            "rope.scaling.finetuned": False,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 12,
            "ssm.group_count": 2,
            "ssm.inner_size": 64,
            "ssm.time_step_rank": 8,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "head_dim": 8,
            "layer_types": ["conv", "conv", "full_attention"] * 2,
            "block_auto_adjust_ff_dim": False,
            "rope_parameters": _ROPE,
        },
        {"pairs_rows": False},
        {
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.head_count_kv": [0, 0, 2] * 2,
            "shortconv.l_cache": 3,
        },
    ),
    "qwen35": (
        "Qwen3_5Text",
        {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
            "layer_types": [*(["linear_attention"] * 3), "full_attention"] * 2,
            "num_hidden_layers": 8,
        },
        {"pairs_rows": False, "adds_one": True},
        {
            "attention.recurrent_layers": ([True] * 3 + [False]) * 2,
            "rope.dimension_count": 8,
            "rope.dimension_sections": [2, 1, 1, 0],
            "ssm.conv_kernel": 4,
            "ssm.state_size": 8,
            "ssm.group_count": 2,
            "ssm.time_step_rank": 6,
            "ssm.inner_size": 48,
        },
    ),
    "phi3": (
        "Phi3",
        {"head_dim": 8, "sliding_window": 5},
        {"pairs_rows": False},
        {"attention.sliding_window": 5},
    ),
    "olmo2": ("Olmo2", {"head_dim": 8}, {"pairs_rows": False}, {}),
    "olmo2-windows": (
        "Olmo3",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "rope_parameters": {"full_attention": _YARN, "sliding_attention": _ROPE},
        },
        {"pairs_rows": False, "arch": "olmo2"},
        {
            "attention.sliding_window": 4,
            "attention.sliding_window_pattern": [True, True, True, False, True, True],
            **_YARN_KEYS,
            "rope.scaling.yarn_attn_factor": 0.1 * math.log(4) + 1,
        },
    ),
    "granite": (
        "Granite",
        {
            "head_dim": 8,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.5,
        },
        {},
        {
            "embedding_scale": 3.0,
            "residual_scale": 0.4,
            "attention.scale": 0.2,
            "logit_scale": 2.5,
            "rope.scaling.finetuned": True,
        },
    ),
    "mistral3": (
        "Ministral3",
        {
            "rope_parameters": {
                **_YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.4,
            }
        },
        {},
        {
            **_YARN_KEYS,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.4,
        },
    ),
    "mistral3-plain": ("Mistral", {"sliding_window": None}, {"arch": "mistral3"}, {}),
    "qwen2vl": ("Qwen2", {}, {"pairs_rows": False}, {"rope.dimension_sections": [3, 3, 2, 0]}),
    "qwen3vl": (
        "Qwen3",
        {},
        {"pairs_rows": False},
        {"rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 3},
    ),
    "seed_oss": ("SeedOss", {"attention_out_bias": True}, {"pairs_rows": False}, {}),
    "hunyuan-dense": ("HunYuanDenseV1", {}, {"pairs_rows": False}, {}),
    "exaone4": (
        "Exaone4",
        {"head_dim": 8, "sliding_window": 4},
        {"pairs_rows": False},
        {
            "attention.sliding_window": 4,
            "attention.sliding_window_pattern": [True, True, True, False, True, True],
        },
    ),
    "exaone4-full": (
        "Exaone4",
        {"head_dim": 8, "sliding_window": None, "layer_types": ["full_attention"] * 6},
        {"pairs_rows": False, "arch": "exaone4"},
        {},
    ),
    "glm4": ("Glm4", {}, {"pairs_rows": False}, {"rope.dimension_count": 8}),
    "glm4-halves": (
        "Glm4",
        {},
        {"pairs_rows": False, "arch": "glm4", "halves": 8},
        {"rope.dimension_count": 8, "rope.dimension_sections": [2, 1, 1, 0]},
    ),
    "ernie4_5": ("Ernie4_5", {"rope_parameters": _ROPE}, {"pairs_rows": False}, {}),
    "smollm3": ("SmolLM3", {"head_dim": 8, "rope_parameters": _ROPE}, {}, {}),
    "arcee": ("Arcee", {}, {}, {}),
    "command-r": (
        "Cohere",
        {"head_dim": 8, "rope_parameters": _ROPE},
        {"pairs_rows": False},
        {"attention.layer_norm_epsilon": 1e-5, "logit_scale": 0.0625},
    ),
    "cohere2": (
        "Cohere2",
        {"head_dim": 8, "rope_parameters": _ROPE, "sliding_window": 4, "logit_scale": 0.25},
        {"pairs_rows": False},
        {
            "attention.layer_norm_epsilon": 1e-5,
            "attention.sliding_window": 4,
            "logit_scale": 0.25,
        },
    ),
    "starcoder2": (
        "Starcoder2",
        {"head_dim": 8, "rope_parameters": _ROPE},
        {"pairs_rows": False},
        {"attention.layer_norm_epsilon": 1e-5},
    ),
    "nemotron": (
        "Nemotron",
        {"norm_eps": 1e-5},
        {"pairs_rows": False, "adds_one": True},
        {"attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 8},
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
    values = SIZES | config.to_dict() | how.get("sizes", {})
    arch = how.get("arch", arch)
    keys = {f"{arch}.{key}": value for key, value in keys.items()}
    how = how | {"keys": keys, "arch": arch}
    how.pop("sizes", None)
    is_fused = how.pop("fused", False)
    file = LlamaFile(values, tensors, extra=dict(extra or {}), **how)
    if is_fused:
        fuse_qkv(file)
    file.write(path)
    return logits


def fuse_qkv(file: LlamaFile) -> None:
    """As the converter's --fuse-qkv: q's, k's and v's rows in one tensor, where a layer has all."""
    for name in [name for name in file.tensors if "q_proj." in name]:
        parts = [name.replace("q_proj", f"{part}_proj") for part in "qkv"]
        if all(part in file.tensors for part in parts):
            rows = [file.in_file(part, file.tensors.pop(part)) for part in parts]
            layer, suffix = name.split(".")[2], name.rpartition(".")[2]
            file.extra[f"blk.{layer}.attn_qkv.{suffix}"] = np.concatenate(rows)


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
    archs = {how.get("arch", name) for name, (_, _, how, _) in CASES.items()}
    assert {*archs, "falcon", "bamboo", "minicpm", *mixtures} == GGUF_ARCHITECTURES.keys()


@pytest.mark.parametrize("arch", CASES)
def test_logits_are_transformers(arch: str, tmp_path: Path) -> None:
    path, extra = tmp_path / "m.gguf", GEMMA4_EXTRA if arch == "gemma4" else {}
    require_same_logits(path, made(CASES[arch], path, arch, extra))
    assert not left_out(path)


@pytest.mark.parametrize("arch", ["llama", "seed_oss", "gemma4", "qwen35"])
def test_fused_q_k_and_v(arch: str, tmp_path: Path) -> None:
    """Pairs of rows, biases, layers without k and v, gates and recurrent layers."""
    path, (kind, changes, how, keys) = tmp_path / "m.gguf", CASES[arch]
    extra = GEMMA4_EXTRA if arch == "gemma4" else {}
    require_same_logits(path, made((kind, changes, how | {"fused": True}, keys), path, arch, extra))
    assert not left_out(path)


def test_fused_rows_that_are_not_q_k_and_v(tmp_path: Path) -> None:
    draft = small_llama()
    names = {one.name: one.name.replace("attn_q.", "attn_qkv.") for one in draft.tensors}
    tensors = tuple(replace(one, name=names[one.name]) for one in draft.tensors)
    (tmp_path / "m.gguf").write_bytes(replace(draft, tensors=tensors).content())
    with pytest.raises(CheckpointError, match="32 rows, of which 32 are queries"):
        read_config(tmp_path / "m.gguf")


# Of a layer's experts, with the converter's names.
_GEMMA4_EXPERTS = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}


def test_a_gemma_4_with_experts(tmp_path: Path) -> None:
    """The 26B-A4B: an FFN and experts in each layer."""
    import transformers

    experts = {"num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 32}
    changes = _GEMMA4 | experts | {"enable_moe_block": True}
    config = transformers.Gemma4TextConfig(**(SIZES | changes))
    logits, tensors = random_model("Gemma4", config)
    del tensors["lm_head.weight"]
    extra = dict(_GEMMA4_ROPE)
    for layer in range(6):
        for name, theirs in _GEMMA4_EXPERTS.items():
            extra[f"blk.{layer}.{theirs}"] = tensors.pop(f"model.layers.{layer}.{name}")
    lengths = {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 32}
    keys = {f"gemma4.{key}": value for key, value in (_GEMMA4_KEYS | lengths).items()}
    values = SIZES | config.to_dict() | {"head_dim": 24}
    path = tmp_path / "m.gguf"
    LlamaFile(values, tensors, keys=keys, extra=extra, arch="gemma4", pairs_rows=False).write(path)
    require_same_logits(path, logits)


def test_a_gemma_4_whose_values_are_keys(tmp_path: Path) -> None:
    """The 12B and 31B: layers without a window have no v, and another number of KV heads."""
    changes = _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    sizes = {"head_dim": 24, "num_key_value_heads": [2, 2, 1] * 2}
    how = {"pairs_rows": False, "sizes": sizes}
    case, path = ("Gemma4Text", changes, how, _GEMMA4_KEYS), tmp_path / "m.gguf"
    require_same_logits(path, made(case, path, "gemma4", _GEMMA4_ROPE))
    assert not left_out(path)
    made(("Gemma4Text", changes, how, _GEMMA4_KEYS | {"attention.value_length_swa": 8}), path,
         "gemma4", _GEMMA4_ROPE)  # fmt: skip
    with pytest.raises(CheckpointError, match="value_length_swa"):
        read_config(path)


def test_keys_of_layers_that_a_granite_4_lacks(tmp_path: Path) -> None:
    """The converter writes them for models without recurrent layers, too."""
    path, (kind, changes, how, keys) = tmp_path / "m.gguf", CASES["granite"]
    own = {"expert_shared_feed_forward_length": 64, "ssm.conv_kernel": 4, "ssm.state_size": 256,
           "ssm.group_count": 1, "ssm.inner_size": 512, "ssm.time_step_rank": 8}  # fmt: skip
    require_same_logits(path, made((kind, changes, how, keys | own), path, "granite"))
    assert not left_out(path)


@pytest.mark.parametrize("keys", [{}, {"rope.scaling.attn_factor": 1.25}])
def test_lists_of_factors_of_the_rope(keys: dict[str, float], tmp_path: Path) -> None:
    """Cosines and sines are multiplied with attn_factor; without it, as the context says."""
    short, long = [1.0 + i / 8 for i in range(4)], [2.0 + i for i in range(4)]
    scaling = {"short_factor": short, "long_factor": long, "rope_type": "longrope"}
    own = {"attention_factor": 1.25} if keys else {}
    rope = scaling | own | {"rope_theta": 10000.0, "original_max_position_embeddings": 8}
    changes = {"head_dim": 8, "rope_parameters": rope, "original_max_position_embeddings": 8}
    keys = {"rope.scaling.original_context_length": 8} | keys
    extra = {
        f"rope_factors_{name}.weight": np.array(factors, np.float32)
        for name, factors in (("short", short), ("long", long))
    }
    case = ("Phi3", changes, {"pairs_rows": False}, keys)
    require_same_logits(tmp_path / "m.gguf", made(case, tmp_path / "m.gguf", "phi3", extra))


def test_a_llama_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    """llama.cpp has no architecture of Mistral's, and leaves the window out."""
    path, keys = tmp_path / "m.gguf", {"attention.sliding_window": 4}
    require_same_logits(path, made(("Mistral", {"sliding_window": 4}, {}, keys), path, "llama"))
    assert read_config(path).windows == (4,) * SIZES["num_hidden_layers"]
