"""Tiny random models of every supported variant, written by transformers itself.

Weights, norms and biases are random and large enough that a mistake in any of them shows clearly in
the logits.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.kept import copy_kept, digest_of

if TYPE_CHECKING:  # they take seconds to import
    import torch
    from transformers import PreTrainedModel

VOCAB_SIZE = 101
MAX_POSITIONS = 128
_NORMS_OF_ONE_MORE = ("gemma2", "gemma3_text", "nemotron")  # than their weights
Variant = functools.partial  # of a function that makes a model, with what it changes of its config


_LLAMA_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "hidden_act": "relu",
}


def _llama(**changes: Any) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**(_LLAMA_SIZES | changes)))


def _opt(**changes: Any) -> PreTrainedModel:
    from transformers import OPTConfig, OPTForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "ffn_dim": 92,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_POSITIONS,
        "word_embed_proj_dim": 48,
    }
    return OPTForCausalLM(OPTConfig(**(sizes | changes)))


def _falcon(**changes: Any) -> PreTrainedModel:
    from transformers import FalconConfig, FalconForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "ffn_hidden_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "max_position_embeddings": MAX_POSITIONS,
        "activation": "relu",
        "attention_dropout": 0.0,
    }
    return FalconForCausalLM(FalconConfig(**(sizes | changes)))


_WIDER: dict[str, Any] = {"num_key_value_heads": 2, "hidden_act": "silu", "head_dim": 20}


def _relative(kind: str, **sizes: Any) -> PreTrainedModel:
    """A model of a family that is much like Llama, by the name of its class."""
    import transformers

    config_class = getattr(transformers, _CONFIGS.get(kind, f"{kind}Config"))
    config = config_class(**(_LLAMA_SIZES | _TOKENS | sizes))
    model: PreTrainedModel = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model


_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
_CONFIGS = {"Gemma3": "Gemma3TextConfig"}
_GEMMA: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 20,
    "query_pre_attn_scalar": 31,
    "sliding_window": 7,
    "hidden_act": "gelu_pytorch_tanh",  # as published, and not read
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


def _published(model: PreTrainedModel, **config_json: Any) -> PreTrainedModel:
    """A model whose config.json is written with other values: those that its own code reads."""
    model.published_config = config_json
    return model


def _sparse_llama(**changes: Any) -> PreTrainedModel:
    return _published(
        _relative("Llama", **changes),
        model_type="sparsellama",
        architectures=["SparseLlamaForCausalLM"],
        hidden_act="fatrelu",
        hidden_act_param=0.6,
    )


def _bamboo(**changes: Any) -> PreTrainedModel:
    return _published(
        _relative("Mistral", **changes),
        model_type="bamboo",
        architectures=["BambooForCausalLM"],
    )


def _minicpm(**changes: Any) -> PreTrainedModel:
    return _published(
        _relative("Llama", tie_word_embeddings=True, **changes),
        model_type="minicpm",
        architectures=["MiniCPMForCausalLM"],
        hidden_act="fatrelu",
        hidden_act_param=0.5,
        scale_emb=3,
        scale_depth=1.4,
        dim_model_base=16,
    )


_ROPES: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
        "long_factor": [2.0, 2.5, 3.0, 4.0, 6.0, 9.0],
        "original_max_position_embeddings": 200,
    },
}
_GROUPED: dict[str, Any] = {"new_decoder_architecture": True, "num_kv_heads": 2}

VARIANTS: dict[str, Variant] = {
    "llama-relu": Variant(_llama),
    "llama-silu": Variant(_llama, hidden_act="silu"),
    "llama-gqa": Variant(_llama, num_key_value_heads=2),
    "llama-tied": Variant(_llama, tie_word_embeddings=True),
    "llama-attention-bias": Variant(_llama, attention_bias=True, num_key_value_heads=2),
    "llama-mlp-bias": Variant(_llama, mlp_bias=True),
    "llama-rope-llama3": Variant(_llama, rope_parameters=_ROPES["llama3"]),
    "llama-head-dim": Variant(_llama, head_dim=20, num_key_value_heads=1),
    "opt-prenorm": Variant(_opt),
    "opt-postnorm": Variant(_opt, do_layer_norm_before=False, word_embed_proj_dim=32),
    "opt-nobias": Variant(_opt, enable_bias=False, layer_norm_elementwise_affine=False),
    "falcon-7b": Variant(_falcon, activation="gelu"),
    "falcon-relu": Variant(_falcon),
    "falcon-grouped": Variant(_falcon, **_GROUPED),
    "falcon-grouped-1norm": Variant(_falcon, **_GROUPED, num_ln_in_parallel_attn=1),
    "falcon-gelu": Variant(_falcon, **_GROUPED, activation="gelu", tie_word_embeddings=False),
    "falcon-bias": Variant(_falcon, **_GROUPED, bias=True),
    "mistral": Variant(_relative, "Mistral", num_key_value_heads=2, sliding_window=7),
    "qwen2": Variant(_relative, "Qwen2", num_key_value_heads=2, hidden_act="silu"),
    "qwen3": Variant(_relative, "Qwen3", **_WIDER, tie_word_embeddings=True),
    "qwen3-windows": Variant(
        _relative,
        "Qwen3",
        **_WIDER,
        use_sliding_window=True,
        sliding_window=33,
        max_window_layers=2,
    ),
    "arcee": Variant(
        _relative, "Arcee", **(_WIDER | {"hidden_act": "relu2", "rope_parameters": _ROPES["yarn"]})
    ),
    "nemotron": Variant(_relative, "Nemotron", **(_WIDER | {"hidden_act": "relu2"})),
    "prosparse": Variant(_sparse_llama),
    "bamboo": Variant(_bamboo, num_key_value_heads=2, sliding_window=9),
    "minicpm": Variant(_minicpm),
    "gemma2": Variant(_relative, "Gemma2", **_GEMMA, attn_logit_softcapping=3.0),
    "gemma3": Variant(_relative, "Gemma3", **_GEMMA, num_hidden_layers=7),
    "phi3": Variant(_relative, "Phi3", num_key_value_heads=2, hidden_act="silu"),
    "phi3-windows": Variant(
        _relative, "Phi3", sliding_window=11, rope_parameters=_ROPES["longrope"]
    ),
    "olmo2": Variant(_relative, "Olmo2", num_key_value_heads=2, hidden_act="silu"),
    "smollm3": Variant(
        _relative, "SmolLM3", num_key_value_heads=2, hidden_act="silu", num_hidden_layers=5
    ),
    "falcon-sequential": Variant(_falcon, parallel_attn=False, multi_query=False, bias=True),
}

_MIXTURE: dict[str, Any] = {
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "intermediate_size": 40,
    "num_experts_per_tok": 3,
}
_QWEN_MOE: dict[str, Any] = {**_MIXTURE, "moe_intermediate_size": 24, "num_experts": 7}
_GLM_MOE: dict[str, Any] = {
    **_MIXTURE,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "head_dim": 20,
    "num_hidden_layers": 4,
    "routed_scaling_factor": 1.7,
    "partial_rotary_factor": 0.5,
}
_GPT_OSS: dict[str, Any] = {
    **_MIXTURE,
    "num_local_experts": 5,
    "head_dim": 20,
    "sliding_window": 9,
    "num_hidden_layers": 4,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}


def _with_experts(
    kind: str, block: str, modules: dict[str, tuple[int, int]], router: str, **config_json: Any
) -> PreTrainedModel:
    """A model of `kind` with experts in place of its FFN; `tests.patched_models` computes them.

    modules: of each expert in `block`, with rows and columns.
    """
    import torch

    config = {**config_json}
    experts = config.pop("experts")
    base = config.pop("base", {})
    model = _published(_relative(kind, num_key_value_heads=2, **base), **config)
    tensors = {}
    for layer in range(model.config.num_hidden_layers):
        prefix = f"model.layers.{layer}.{block}"
        tensors[f"{prefix}.{router}.weight"] = torch.empty(experts, 48)
        for expert in range(experts):
            for name, shape in modules.items():
                tensors[f"{prefix}.experts.{expert}.{name}.weight"] = torch.empty(shape)
    model.published_tensors = {name: _random_like(name, t) for name, t in tensors.items()}
    return model


def _smallthinker(num_hidden_layers: int, **config_json: Any) -> PreTrainedModel:
    """Its layers have a window, or rope, or both, as SmolLM3's."""
    windowed = config_json.get("sliding_window_layout", [0] * num_hidden_layers)
    rotated = config_json.get("rope_layout", [1] * num_hidden_layers)
    base = {
        "num_hidden_layers": num_hidden_layers,
        "head_dim": 20,
        "tie_word_embeddings": True,
        "use_sliding_window": any(windowed),
        "sliding_window": 9 if any(windowed) else None,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windowed],
        "no_rope_layers": rotated,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1500000.0},
    }
    return _with_experts(
        "SmolLM3",
        "block_sparse_moe",
        {"gate": (24, 48), "up": (24, 48), "down": (48, 24)},
        "primary_router",
        base=base,
        experts=6,
        model_type="smallthinker",
        architectures=["SmallThinkerForCausalLM"],
        moe_num_primary_experts=6,
        moe_num_active_primary_experts=2,
        moe_ffn_hidden_size=24,
        moe_enable_early_router=True,
        sliding_window_size=9,
        intermediate_size=None,
        sliding_window=None,
        layer_types=None,
        no_rope_layers=None,
        **config_json,
    )


def _turbosparse_mixtral() -> PreTrainedModel:
    return _with_experts(
        "Mistral",
        "block_sparse_moe",
        {
            "w1": (40, 48),
            "w3": (40, 48),
            "w2": (48, 40),
            "predictor.fc1": (12, 48),
            "predictor.fc2": (40, 12),
        },
        "gate",
        base={"intermediate_size": 40, "sliding_window": None},
        experts=5,
        model_type="turbosparsemixtral",
        architectures=["TurboSparseMixtralForCausalLM"],
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=None,
    )


# Mixtures of experts: apart from VARIANTS while no kernels compute them.
MIXTURES: dict[str, Variant] = {
    "qwen2-moe": Variant(_relative, "Qwen2Moe", **_QWEN_MOE, shared_expert_intermediate_size=36),
    "qwen2-moe-windows": Variant(
        _relative,
        "Qwen2Moe",
        **_QWEN_MOE,
        shared_expert_intermediate_size=36,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=2,
        norm_topk_prob=True,
        decoder_sparse_step=2,
    ),
    "qwen3-moe": Variant(_relative, "Qwen3Moe", **_QWEN_MOE, norm_topk_prob=True, head_dim=20),
    "qwen3-moe-dense": Variant(_relative, "Qwen3Moe", **_QWEN_MOE, mlp_only_layers=[1]),
    "olmoe": Variant(_relative, "Olmoe", **_MIXTURE, num_experts=7),
    "mixtral": Variant(_relative, "Mixtral", **_MIXTURE, num_local_experts=5),
    "granite-moe": Variant(
        _relative,
        "GraniteMoe",
        **_MIXTURE,
        num_local_experts=6,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=2.5,
    ),
    "granite-moe-shared": Variant(
        _relative,
        "GraniteMoeShared",
        **_MIXTURE,
        num_local_experts=6,
        shared_intermediate_size=28,
        attention_multiplier=0.3,
    ),
    "glm4-moe": Variant(_relative, "Glm4Moe", **_GLM_MOE, attention_bias=True),
    "glm4-moe-groups": Variant(
        _relative,
        "Glm4Moe",
        **_GLM_MOE,
        n_group=4,
        topk_group=2,
        use_qk_norm=True,
        n_shared_experts=2,
        first_k_dense_replace=2,
    ),
    "gpt-oss": Variant(_relative, "GptOss", **_GPT_OSS, swiglu_limit=0.8),
    "gpt-oss-plain": Variant(_relative, "GptOss", **_GPT_OSS, attention_bias=False),
    "gpt-oss-one-expert": Variant(
        _relative, "GptOss", **(_GPT_OSS | {"num_local_experts": 1, "num_experts_per_tok": 1})
    ),
    "smallthinker": Variant(_smallthinker, 3),
    "smallthinker-windows": Variant(
        _smallthinker,
        5,
        rope_layout=[0, 1, 1, 1, 0],
        sliding_window_layout=[0, 1, 1, 1, 0],
        moe_primary_router_apply_softmax=True,
    ),
    "turbosparse-mixtral": Variant(_turbosparse_mixtral),
}


def make_tiny(
    variant: str, path: str | Path, dtype: str = "float32", seed: int = 0, shards: int = 1
) -> Path:
    """Write the variant's config and random weights to `path`, which is returned.

    `dtype` is float32, float16 or bfloat16; about `shards` files are written where it is above 1.
    """
    made = (VARIANTS | MIXTURES)[variant]
    keywords = sorted(made.keywords.items())
    asked = (made.func.__name__, made.args, keywords, dtype, seed, shards)
    name = f"model-{digest_of(repr(asked))}"
    copy_kept(name, Path(path), lambda kept: _write(made, kept, dtype, seed, shards))
    return Path(path)


def _write(made: Variant, directory: Path, dtype: str, seed: int, shards: int) -> None:
    import torch

    torch.manual_seed(seed)
    model = made().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            offset = 1.0 if model.config.model_type in _NORMS_OF_ONE_MORE else 0.0
            is_norm = parameter.dim() == 1 and not name.endswith("bias")
            parameter.copy_(_random_like(name, parameter) - offset * is_norm)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    model = model.to(getattr(torch, dtype))
    num_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    shard_bytes = num_bytes + 1 if shards == 1 else -(-num_bytes // shards)
    model.save_pretrained(directory, max_shard_size=shard_bytes)
    if published := getattr(model, "published_config", None):
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | published))
    if tensors := getattr(model, "published_tensors", None):
        _replace_ffn(directory / "model.safetensors", tensors)


def _replace_ffn(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import load_file, save_file

    kept = {name: value for name, value in load_file(file).items() if ".mlp." not in name}
    save_file(kept | tensors, file, metadata={"format": "pt"})


def _random_like(name: str, parameter: torch.Tensor) -> torch.Tensor:
    import torch

    if parameter.dim() == 2:
        is_table = "embed" in name or "lm_head" in name
        return torch.randn_like(parameter) * (0.4 if is_table else 1.5 / parameter.shape[1] ** 0.5)
    if parameter.dim() == 3:  # experts
        return torch.randn_like(parameter) * (1.5 / parameter.shape[2] ** 0.5)
    if name.endswith("bias"):
        return torch.randn_like(parameter) * 0.3
    return 1 + torch.randn_like(parameter) * 0.3
