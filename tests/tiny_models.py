"""Tiny random models of every supported variant, written by transformers itself.

Weights, norms and biases are random and large enough that a mistake in any of them shows clearly in
the logits.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.kept import copy_kept, digest_of
from tests.patched_models import bailing_tensors

if TYPE_CHECKING:  # they take seconds to import
    import torch
    from transformers import PreTrainedModel

    from tests.patched_models import Tensors

VOCAB_SIZE = 101
MAX_POSITIONS = 128
_NORMS_OF_ONE_MORE = (  # than their weights, but for delta nets' own
    *("gemma2", "gemma3_text", "nemotron"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"),
)
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
_CONFIGS = {
    "Gemma3": "Gemma3TextConfig",
    "Gemma4": "Gemma4TextConfig",
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
}
_GEMMA: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 20,
    "query_pre_attn_scalar": 31,
    "sliding_window": 7,
    "hidden_act": "gelu_pytorch_tanh",  # as published, and not read
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


_GEMMA4: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 7,
    "final_logit_softcapping": 30.0,
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": False,  # so that answers are not one token again and again
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
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
    "default": {"rope_type": "default", "rope_theta": 100.0},
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

_KINDS = ("sliding_attention", "full_attention")
_OLMO3: dict[str, Any] = {
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "num_hidden_layers": 5,
    "sliding_window": 9,
}
_GRANITE4: dict[str, Any] = {
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "layer_types": ["full_attention"] * 3,
    "shared_intermediate_size": 76,
    "attention_multiplier": 0.3,
    "mamba_n_heads": 8,
    "tie_word_embeddings": True,
}


_GRANITE4_H: dict[str, Any] = {
    **_GRANITE4,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
}


_NEMOTRON_H: dict[str, Any] = {
    "num_hidden_layers": None,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "hidden_act": None,
    "layers_block_type": [
        *("linear_attention", "mlp", "linear_attention", "full_attention", "mlp"),
        *("linear_attention", "linear_attention", "mlp"),
    ],
    "mamba_num_heads": 8,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "ssm_state_size": 12,
}


def _sections(*sizes: int) -> dict[str, Any]:
    """A rope of models with pictures: which pairs turn with which of three positions."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sizes)}


def _with_pictures(kind: str, text: str, **changes: Any) -> PreTrainedModel:
    """A model of pictures and texts, whose text model is of `text`'s configuration."""
    import transformers

    own = {"num_key_value_heads": 2, "hidden_act": "silu", "tie_word_embeddings": False} | changes
    inner = getattr(transformers, f"{text}Config")(**(_LLAMA_SIZES | _TOKENS | own))
    tied = own["tie_word_embeddings"]
    config = getattr(transformers, f"{kind}Config")(
        text_config=inner.to_dict(), vision_config=_VISION[kind], tie_word_embeddings=tied
    )
    model: PreTrainedModel = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    return model


_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
    "deepstack_visual_indexes": [],
}
_GLM_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
    "image_size": 28,
}
_VISION: dict[str, dict[str, Any]] = {
    "Mistral3": {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 32,
        "patch_size": 16,
    },
    "Qwen2_5_VL": _QWEN_VISION,
    "Qwen3VL": _QWEN_VISION,
    "Qwen3VLMoe": _QWEN_VISION,
    "Qwen3_5": {key: value for key, value in _QWEN_VISION.items() if "deepstack" not in key},
    "Glm4v": _GLM_VISION,
    "Glm4vMoe": _GLM_VISION,
    "InternVL": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": [32, 32],
        "patch_size": [16, 16],
    },
}
_DELTA: dict[str, Any] = {
    **_WIDER,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.4,
    },
}

_LFM2: dict[str, Any] = {
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}

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
    "gemma4": Variant(
        _relative,
        "Gemma4",
        **_GEMMA4,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
    "gemma4-e": Variant(
        _relative,
        "Gemma4",
        **(_GEMMA4 | {"hidden_size_per_layer_input": 32}),
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
    ),
    "phi3": Variant(_relative, "Phi3", num_key_value_heads=2, hidden_act="silu"),
    "phi3-windows": Variant(
        _relative, "Phi3", sliding_window=11, rope_parameters=_ROPES["longrope"]
    ),
    "olmo2": Variant(_relative, "Olmo2", num_key_value_heads=2, hidden_act="silu"),
    "olmo3": Variant(
        _relative, "Olmo3", **_OLMO3, rope_parameters=dict.fromkeys(_KINDS, _ROPES["default"])
    ),
    "olmo3-yarn": Variant(
        _relative,
        "Olmo3",
        **_OLMO3,
        rope_parameters=dict(zip(_KINDS, (_ROPES["default"], _ROPES["yarn"]), strict=True)),
    ),
    "granite": Variant(
        _relative,
        "Granite",
        num_key_value_heads=2,
        hidden_act="silu",
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=2.5,
    ),
    "granite4": Variant(_relative, "GraniteMoeHybrid", **_GRANITE4, num_local_experts=0),
    "granite4-rope": Variant(
        _relative,
        "GraniteMoeHybrid",
        **_GRANITE4,
        num_local_experts=0,
        position_embedding_type="rope",
        residual_multiplier=0.3,
    ),
    "granite4-h": Variant(
        _relative, "GraniteMoeHybrid", **_GRANITE4_H, num_local_experts=0, residual_multiplier=0.4
    ),
    "cohere": Variant(_relative, "Cohere", num_key_value_heads=2, hidden_act="silu"),
    "cohere2": Variant(
        _relative,
        "Cohere2",
        num_key_value_heads=2,
        hidden_act="silu",
        num_hidden_layers=5,
        sliding_window=9,
        logit_scale=0.25,
    ),
    "starcoder2": Variant(
        _relative,
        "Starcoder2",
        num_key_value_heads=2,
        hidden_act="gelu_pytorch_tanh",
        sliding_window=9,
    ),
    "nemotron-h": Variant(_relative, "NemotronH", **_NEMOTRON_H),
    "glm4": Variant(_relative, "Glm4", **_WIDER),
    "ernie4.5": Variant(_relative, "Ernie4_5", **_WIDER, use_bias=True),
    "seed-oss": Variant(_relative, "SeedOss", **_WIDER, attention_out_bias=True),
    "hunyuan": Variant(_relative, "HunYuanDenseV1", **_WIDER, tie_word_embeddings=True),
    "hunyuan-alpha": Variant(
        _relative,
        "HunYuanDenseV1",
        **_WIDER,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 5.0, "factor": 1.0},
    ),
    "exaone4": Variant(
        _relative,
        "Exaone4",
        num_key_value_heads=2,
        sliding_window=None,
        layer_types=["full_attention"] * 3,
    ),
    "exaone4-windows": Variant(
        _relative, "Exaone4", num_key_value_heads=2, num_hidden_layers=5, sliding_window=9
    ),
    "ministral3": Variant(
        _relative,
        "Ministral3",
        **_WIDER,
        tie_word_embeddings=True,
        rope_parameters={
            **_ROPES["yarn"],
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.4,
        },
    ),
    "mistral3": Variant(_with_pictures, "Mistral3", "Mistral", sliding_window=7),
    "qwen2.5-vl": Variant(
        _with_pictures, "Qwen2_5_VL", "Qwen2_5_VLText", rope_parameters=_sections(2, 2, 2)
    ),
    "glm4v": Variant(
        _with_pictures,
        "Glm4v",
        "Glm4vText",
        rope_parameters=_sections(1, 1, 1) | {"partial_rotary_factor": 0.5},
    ),
    "internvl": Variant(_with_pictures, "InternVL", "Qwen2"),
    "qwen3-vl": Variant(
        _with_pictures,
        "Qwen3VL",
        "Qwen3VLText",
        head_dim=20,
        tie_word_embeddings=True,
        rope_parameters=_sections(4, 3, 3),
    ),
    "smollm3": Variant(
        _relative, "SmolLM3", num_key_value_heads=2, hidden_act="silu", num_hidden_layers=5
    ),
    "qwen3.5": Variant(_relative, "Qwen3_5", **_DELTA, tie_word_embeddings=True),
    "qwen3.5-vision": Variant(
        _with_pictures,
        "Qwen3_5",
        "Qwen3_5Text",
        **(_DELTA | {"rope_parameters": {**_sections(2, 1, 1), "partial_rotary_factor": 0.4}}),
    ),
    "lfm2": Variant(
        _relative, "Lfm2", **_LFM2, intermediate_size=120, block_multiple_of=8, conv_L_cache=4
    ),
    "qwen3.5-first-full": Variant(
        _relative,
        "Qwen3_5",
        **(_DELTA | {"linear_conv_kernel_dim": 3, "linear_num_value_heads": 2}),
        layer_types=[
            "full_attention",
            "linear_attention",
            "full_attention",
            "linear_attention",
        ],
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
_ERNIE_MOE: dict[str, Any] = {
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "moe_intermediate_size": 24,
    "moe_num_experts": 7,
    "moe_k": 3,
}
_GLM_MOE: dict[str, Any] = {
    **_MIXTURE,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "head_dim": 20,
    "num_hidden_layers": 4,
    "routed_scaling_factor": 1.7,
    "partial_rotary_factor": 0.5,
}
_ROUTED: dict[str, Any] = {
    **_MIXTURE,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "head_dim": 20,
    "num_hidden_layers": 5,
}


def _bailing2(**changes: Any) -> PreTrainedModel:
    """GLM-4.5 with Ling 2's names, and with q, k and v in one tensor."""
    model = _published(
        _relative("Glm4Moe", **(_GLM_MOE | changes)),
        model_type="bailing_moe",
        architectures=["BailingMoeV2ForCausalLM"],
        num_shared_experts=1,
        score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )
    model.published_names = bailing_tensors
    return model


_DEEPSEEK: dict[str, Any] = {
    **_MIXTURE,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "kv_lora_rank": 28,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
}
_V2: dict[str, Any] = {
    "rope_parameters": {**_ROPES["yarn"], "mscale": 0.7, "mscale_all_dim": 0.7},
    "routed_scaling_factor": 1.3,
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
    "qwen3-next": Variant(
        _relative, "Qwen3Next", **(_QWEN_MOE | _DELTA), shared_expert_intermediate_size=36
    ),
    "qwen3-next-dense": Variant(
        _relative,
        "Qwen3Next",
        **(_QWEN_MOE | _DELTA),
        shared_expert_intermediate_size=36,
        mlp_only_layers=[1, 3],
        norm_topk_prob=False,
    ),
    "qwen3.5-moe": Variant(
        _relative, "Qwen3_5Moe", **(_QWEN_MOE | _DELTA), shared_expert_intermediate_size=36
    ),
    "lfm2-moe": Variant(
        _relative,
        "Lfm2Moe",
        **(_QWEN_MOE | _LFM2),
        num_dense_layers=1,
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
    "granite4-moe": Variant(
        _relative,
        "GraniteMoeHybrid",
        **(_GRANITE4 | {"intermediate_size": 40, "num_experts_per_tok": 3}),
        num_local_experts=6,
        position_embedding_type="rope",
    ),
    "granite4-h-moe": Variant(
        _relative,
        "GraniteMoeHybrid",
        **(_GRANITE4_H | {"intermediate_size": 40, "num_experts_per_tok": 3, "mamba_n_groups": 1}),
        num_local_experts=6,
    ),
    "nemotron-h-moe": Variant(
        _relative,
        "NemotronH",
        **(
            _NEMOTRON_H
            | {
                "layers_block_type": [
                    *("linear_attention", "moe", "linear_attention", "full_attention", "moe"),
                    *("linear_attention", "linear_attention", "moe"),
                ]
            }
        ),
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=36,
        routed_scaling_factor=1.7,
    ),
    "ernie4.5-moe": Variant(_relative, "Ernie4_5_Moe", **_ERNIE_MOE),
    "ernie4.5-moe-steps": Variant(
        _relative,
        "Ernie4_5_Moe",
        **_ERNIE_MOE,
        num_hidden_layers=6,
        moe_layer_start_index=2,
        moe_layer_end_index=4,
        moe_layer_interval=2,
        moe_num_shared_experts=0,
    ),
    "qwen3-vl-moe": Variant(
        _with_pictures,
        "Qwen3VLMoe",
        "Qwen3VLMoeText",
        **_QWEN_MOE,
        norm_topk_prob=True,
        rope_parameters=_sections(2, 2, 2),
    ),
    "glm4v-moe": Variant(
        _with_pictures,
        "Glm4vMoe",
        "Glm4vMoeText",
        **{key: size for key, size in _GLM_MOE.items() if key != "partial_rotary_factor"},
        rope_parameters=_sections(2, 2, 1) | {"partial_rotary_factor": 0.5},
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
    "dots1": Variant(
        _relative,
        "Dots1",
        **_ROUTED,
        sliding_window=70,
        max_window_layers=2,
        norm_topk_prob=True,
        first_k_dense_replace=1,
        n_shared_experts=2,
    ),
    "solar-open": Variant(_relative, "SolarOpen", **_ROUTED, n_shared_experts=1),
    "hy3": Variant(
        _relative,
        "HYV3",
        **{key: size for key, size in _ROUTED.items() if key != "n_routed_experts"},
        num_experts=8,
    ),
    "exaone-moe": Variant(
        _relative,
        "ExaoneMoe",
        **{key: size for key, size in _ROUTED.items() if key != "n_routed_experts"},
        num_experts=8,
        sliding_window=9,
    ),
    "hunyuan-moe": Variant(
        _relative, "HunYuanMoEV1", **(_MIXTURE | _WIDER), num_experts=7, moe_topk=3
    ),
    "bailing2": Variant(_bailing2, attention_bias=False, use_qk_norm=True, n_group=4, topk_group=2),
    "deepseek-v2": Variant(_relative, "DeepseekV2", **_DEEPSEEK, **_V2, q_lora_rank=None),
    "deepseek-v2-rank": Variant(
        _relative,
        "DeepseekV2",
        **_DEEPSEEK,
        **_V2,
        q_lora_rank=20,
        first_k_dense_replace=1,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
    ),
    "deepseek-v3": Variant(
        _relative,
        "DeepseekV3",
        **_DEEPSEEK,
        q_lora_rank=20,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.7,
        rope_parameters={**_ROPES["yarn"], "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek-v3-halves": Variant(
        _relative,
        "DeepseekV3",
        **_DEEPSEEK,
        q_lora_rank=20,
        n_group=1,
        topk_group=1,
        rope_interleave=False,
        first_k_dense_replace=0,
    ),
    "minimax-m2": Variant(
        _relative, "MiniMaxM2", **_MIXTURE, num_local_experts=7, head_dim=20, rotary_dim=10
    ),
    "mistral4": Variant(
        _relative,
        "Mistral4",
        **_DEEPSEEK,
        q_lora_rank=20,
        rope_parameters={
            **_ROPES["yarn"],
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.4,
        },
    ),
    "glm4-moe-lite": Variant(_relative, "Glm4MoeLite", **_DEEPSEEK, q_lora_rank=20),
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
    "gemma4-a4b": Variant(
        _relative,
        "Gemma4",
        **_GEMMA4,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=7,
        top_k_experts=3,
        moe_intermediate_size=24,
    ),
}

# Variants that no GPU has kernels for (`only_on_cpu`).
ON_THE_CPU = {
    *("turbosparse-mixtral", "gemma4", "gemma4-e", "gemma4-a4b", "hunyuan", "hunyuan-alpha"),
    "hunyuan-moe",
    *("deepseek-v2", "deepseek-v2-rank", "deepseek-v3", "deepseek-v3-halves"),
    *("mistral4", "glm4-moe-lite", "lfm2", "lfm2-moe", "granite4-h", "granite4-h-moe"),
    *("nemotron-h", "nemotron-h-moe"),
    *("qwen3-next", "qwen3-next-dense"),
    *("qwen3.5", "qwen3.5-vision", "qwen3.5-first-full", "qwen3.5-moe"),
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
            is_norm &= "linear_attn" not in name
            parameter.copy_(_random_like(name, parameter) - offset * is_norm)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
            if name.endswith("layer_scalar"):
                buffer.copy_(0.8 + 0.4 * torch.rand_like(buffer))
    model = model.to(getattr(torch, dtype))
    num_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    shard_bytes = num_bytes + 1 if shards == 1 else -(-num_bytes // shards)
    model.save_pretrained(directory, max_shard_size=shard_bytes)
    if published := getattr(model, "published_config", None):
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | published))
    if rename := getattr(model, "published_names", None):
        _rewrite(directory / "model.safetensors", rename)
    if tensors := getattr(model, "published_tensors", None):
        _replace_ffn(directory / "model.safetensors", tensors)


def _rewrite(file: Path, change: Callable[[Tensors], Tensors]) -> None:
    from safetensors.torch import load_file, save_file

    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def _replace_ffn(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    _rewrite(file, lambda found: {n: t for n, t in found.items() if ".mlp." not in n} | tensors)


def _random_like(name: str, parameter: torch.Tensor) -> torch.Tensor:
    import torch

    if parameter.dim() == 2:
        is_table = "embed" in name or "lm_head" in name
        return torch.randn_like(parameter) * (0.4 if is_table else 1.5 / parameter.shape[1] ** 0.5)
    if parameter.dim() == 3:  # experts
        return torch.randn_like(parameter) * (1.5 / parameter.shape[2] ** 0.5)
    if name.endswith("bias"):
        return torch.randn_like(parameter) * 0.3
    if name.endswith("A_log"):  # a state that lasts, and one that does not
        return torch.rand_like(parameter) * 5 - 4
    return 1 + torch.randn_like(parameter) * 0.3
