"""Tiny random models of every supported variant, written by transformers itself.

Weights, norms and biases are random and large enough that a mistake in any of them shows clearly in
the logits.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from copy import deepcopy
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
Sizes = dict[str, Any]

_COMMON: Sizes = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
}
_LLAMA: Sizes = {
    **_COMMON,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "hidden_act": "relu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
# Of configurations that are unlike Llama's.
_OTHERS: dict[str, Sizes] = {
    "OPT": {**_COMMON, "ffn_dim": 92, "num_hidden_layers": 3, "word_embed_proj_dim": 48},
    "Falcon": {
        **_COMMON,
        "ffn_hidden_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "activation": "relu",
        "attention_dropout": 0.0,
    },
}
_TEXT_CONFIGS = ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe")


def _relative(kind: str, **sizes: Any) -> PreTrainedModel:
    """A model of a family, by the name of its class; it is Llama's size but for `sizes`."""
    import transformers

    config_class = getattr(transformers, f"{kind}{'Text' * (kind in _TEXT_CONFIGS)}Config")
    config = config_class(**(_OTHERS.get(kind, _LLAMA) | sizes))
    model: PreTrainedModel = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model


_VISION: Sizes = {"hidden_size": 16, "intermediate_size": 16}
_TOWER: Sizes = {**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 48}
_QWEN_TOWER: Sizes = {**_TOWER, "deepstack_visual_indexes": []}
_VIT: Sizes = {**_VISION, "num_hidden_layers": 1, "num_attention_heads": 2}
_PIXTRAL: Sizes = {"model_type": "pixtral", "head_dim": 8, "image_size": 32, "patch_size": 16}
# The text's configuration, and that of what sees.
_PARTS: dict[str, tuple[str, Sizes]] = {
    "Mistral3": ("Mistral", {**_VIT, **_PIXTRAL}),
    "Qwen2_5_VL": ("Qwen2_5_VLText", _QWEN_TOWER),
    "Qwen3VL": ("Qwen3VLText", _QWEN_TOWER),
    "Qwen3VLMoe": ("Qwen3VLMoeText", _QWEN_TOWER),
    "Qwen3_5": ("Qwen3_5Text", _TOWER),
    "Glm4v": ("Glm4vText", {**_TOWER, "image_size": 28}),
    "Glm4vMoe": ("Glm4vMoeText", {**_TOWER, "image_size": 28}),
    "InternVL": ("Qwen2", {**_VIT, "image_size": [32, 32], "patch_size": [16, 16]}),
}


def _with_pictures(kind: str, **sizes: Any) -> PreTrainedModel:
    """A model of pictures and texts; `sizes` are of its text model."""
    import transformers

    text, vision = deepcopy(_PARTS[kind])
    own = {**_LLAMA, **_GROUPED, "tie_word_embeddings": False, **sizes}
    config = getattr(transformers, f"{kind}Config")(
        text_config=getattr(transformers, f"{text}Config")(**own).to_dict(),
        vision_config=vision,
        tie_word_embeddings=own["tie_word_embeddings"],
    )
    model: PreTrainedModel = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    return model


def _published(kind: str, config_json: Sizes, **sizes: Any) -> PreTrainedModel:
    """A model whose config.json is written with other values: those that its own code reads."""
    model = _relative(kind, **sizes)
    model.published_config = config_json
    return model


def _bailing2(config_json: Sizes, **sizes: Any) -> PreTrainedModel:
    """GLM-4.5 with Ling 2's names, and with q, k and v in one tensor."""
    model = _published("Glm4Moe", config_json, **sizes)
    model.published_names = bailing_tensors
    return model


def _with_experts(
    kind: str,
    router: str,
    num_experts: int,
    modules: dict[str, tuple[int, int]],
    config_json: Sizes,
    **sizes: Any,
) -> PreTrainedModel:
    """A model with experts in place of its FFN; `tests.patched_models` computes them.

    modules: of each expert, with rows and columns
    """
    import torch

    model = _published(kind, config_json, num_key_value_heads=2, **sizes)
    tensors = {}
    for layer in range(model.config.num_hidden_layers):
        prefix = f"model.layers.{layer}.block_sparse_moe"
        tensors[f"{prefix}.{router}.weight"] = torch.empty(num_experts, 48)
        for expert in range(num_experts):
            for name, shape in modules.items():
                tensors[f"{prefix}.experts.{expert}.{name}.weight"] = torch.empty(shape)
    model.published_tensors = {name: _random_like(name, t) for name, t in tensors.items()}
    return model


def _smallthinker(num_hidden_layers: int, **config_json: Any) -> PreTrainedModel:
    """Its layers have a window, or rope, or both, as SmolLM3's."""
    windowed = config_json.get("sliding_window_layout", [0] * num_hidden_layers)
    published: Sizes = {
        "model_type": "smallthinker",
        "architectures": ["SmallThinkerForCausalLM"],
        "moe_num_primary_experts": 6,
        "moe_num_active_primary_experts": 2,
        "moe_ffn_hidden_size": 24,
        "moe_enable_early_router": True,
        "sliding_window_size": 9,
        **dict.fromkeys(("intermediate_size", "sliding_window", "layer_types", "no_rope_layers")),
    }
    return _with_experts(
        "SmolLM3",
        "primary_router",
        6,
        {"gate": (24, 48), "up": (24, 48), "down": (48, 24)},
        published | config_json,
        num_hidden_layers=num_hidden_layers,
        head_dim=20,
        tie_word_embeddings=True,
        use_sliding_window=any(windowed),
        sliding_window=9 if any(windowed) else None,
        layer_types=["sliding_attention" if w else "full_attention" for w in windowed],
        no_rope_layers=config_json.get("rope_layout", [1] * num_hidden_layers),
        rope_parameters={"rope_type": "default", "rope_theta": 1500000.0},
    )


def _variant(kind: str, *groups: Sizes, make: Callable = _relative, **sizes: Any) -> Variant:
    """Of a kind: the sizes of all groups, of which a later one counts, and then these."""
    return Variant(make, kind, **functools.reduce(dict.__or__, [*groups, sizes]))


def _of_pictures(kind: str, *groups: Sizes, **sizes: Any) -> Variant:
    return _variant(kind, *groups, make=_with_pictures, **sizes)


_llama, _opt, _falcon = (Variant(_relative, kind) for kind in ("Llama", "OPT", "Falcon"))
_GROUPED: Sizes = {"num_key_value_heads": 2, "hidden_act": "silu"}
_WIDER: Sizes = {**_GROUPED, "head_dim": 20}
_ROPES: dict[str, Sizes] = {
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
_SCALED_YARN: Sizes = {**_ROPES["yarn"], "mscale": 1.0, "mscale_all_dim": 1.0}
_BY_LENGTH: Sizes = {"rope_parameters": {**_SCALED_YARN, "llama_4_scaling_beta": 0.4}}


def _rope(*sections: int, **changes: Any) -> Sizes:
    """The usual one; of models with pictures: which pairs turn with which of three positions."""
    own = {"mrope_section": list(sections)} if sections else {}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **own, **changes}}


_NEW_FALCON: Sizes = {"new_decoder_architecture": True, "num_kv_heads": 2}
_GEMMA: Sizes = {
    "num_key_value_heads": 2,
    "head_dim": 20,
    "query_pre_attn_scalar": 31,
    "sliding_window": 7,
    "hidden_act": "gelu_pytorch_tanh",  # as published, and not read
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_GEMMA4: Sizes = {
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
_KEYS_ARE_VALUES: Sizes = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_GRANITE: Sizes = {
    **_GROUPED,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.5,
}
_GRANITE4: Sizes = {
    **_GROUPED,
    "layer_types": ["full_attention"] * 3,
    "shared_intermediate_size": 76,
    "attention_multiplier": 0.3,
    "mamba_n_heads": 8,
    "tie_word_embeddings": True,
}
_GRANITE4_H: Sizes = {
    **_GRANITE4,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
}


def _nemotron_h(ffn: str) -> Sizes:
    blocks = {"M": "linear_attention", "*": "full_attention", "-": ffn}
    return {
        "num_hidden_layers": None,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "hidden_act": None,
        "layers_block_type": [blocks[one] for one in "M-M*-MM-"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 10,
        "n_groups": 2,
        "ssm_state_size": 12,
    }


_DELTA: Sizes = {
    **_WIDER,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    **_rope(partial_rotary_factor=0.4),
}
_LFM2: Sizes = {
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}

VARIANTS: dict[str, Variant] = {
    "llama-relu": Variant(_llama),
    "llama-silu": Variant(_llama, hidden_act="silu"),
    "llama-gqa": Variant(_llama, num_key_value_heads=2),
    "llama-attention-bias": Variant(_llama, attention_bias=True, num_key_value_heads=2),
    "llama-mlp-bias": Variant(_llama, mlp_bias=True),
    "llama-rope-llama3": Variant(_llama, rope_parameters=_ROPES["llama3"]),
    "opt-prenorm": Variant(_opt),
    "opt-postnorm": Variant(_opt, do_layer_norm_before=False, word_embed_proj_dim=32),
    "opt-nobias": Variant(_opt, enable_bias=False, layer_norm_elementwise_affine=False),
    "falcon-7b": Variant(_falcon, activation="gelu"),
    "falcon-relu": Variant(_falcon),
    "falcon-grouped": Variant(_falcon, **_NEW_FALCON),
    "falcon-grouped-1norm": Variant(_falcon, **_NEW_FALCON, num_ln_in_parallel_attn=1),
    "falcon-gelu": Variant(_falcon, **_NEW_FALCON, activation="gelu", tie_word_embeddings=False),
    "falcon-bias": Variant(_falcon, **_NEW_FALCON, bias=True),
    "mistral": _variant("Mistral", num_key_value_heads=2, sliding_window=7),
    "qwen2": _variant("Qwen2", _GROUPED),
    "qwen3": _variant("Qwen3", _WIDER, tie_word_embeddings=True),
    "qwen3-windows": _variant(
        "Qwen3", _WIDER, use_sliding_window=True, sliding_window=33, max_window_layers=2
    ),
    "arcee": _variant("Arcee", _WIDER, hidden_act="relu2", rope_parameters=_ROPES["yarn"]),
    "nemotron": _variant("Nemotron", _WIDER, hidden_act="relu2"),
    "prosparse": Variant(
        _published,
        "Llama",
        {
            "model_type": "sparsellama",
            "architectures": ["SparseLlamaForCausalLM"],
            "hidden_act": "fatrelu",
            "hidden_act_param": 0.6,
        },
    ),
    "bamboo": Variant(
        _published,
        "Mistral",
        {"model_type": "bamboo", "architectures": ["BambooForCausalLM"]},
        num_key_value_heads=2,
        sliding_window=9,
    ),
    "minicpm": Variant(
        _published,
        "Llama",
        {
            "model_type": "minicpm",
            "architectures": ["MiniCPMForCausalLM"],
            "hidden_act": "fatrelu",
            "hidden_act_param": 0.5,
            "scale_emb": 3,
            "scale_depth": 1.4,
            "dim_model_base": 16,
        },
        tie_word_embeddings=True,
    ),
    "gemma2": _variant("Gemma2", _GEMMA, attn_logit_softcapping=3.0),
    "gemma3": _variant("Gemma3", _GEMMA, num_hidden_layers=7),
    "gemma4": _variant("Gemma4", _GEMMA4, _KEYS_ARE_VALUES),
    "gemma4-e": _variant(
        "Gemma4",
        _GEMMA4,
        hidden_size_per_layer_input=32,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
    ),
    "phi3": _variant("Phi3", _GROUPED),
    "phi3-windows": _variant("Phi3", sliding_window=11, rope_parameters=_ROPES["longrope"]),
    "olmo2": _variant("Olmo2", _GROUPED),
    "olmo3": _variant(
        "Olmo3",
        _GROUPED,
        num_hidden_layers=5,
        sliding_window=9,
        rope_parameters={
            "sliding_attention": _ROPES["default"],
            "full_attention": _ROPES["yarn"],
        },
    ),
    "granite": _variant("Granite", _GRANITE),
    "granite4": _variant("GraniteMoeHybrid", _GRANITE4, num_local_experts=0),
    "granite4-h": _variant(
        "GraniteMoeHybrid", _GRANITE4_H, num_local_experts=0, residual_multiplier=0.4
    ),
    "cohere": _variant("Cohere", _GROUPED),
    "cohere2": _variant(
        "Cohere2", _GROUPED, num_hidden_layers=5, sliding_window=9, logit_scale=0.25
    ),
    "starcoder2": _variant(
        "Starcoder2", _GROUPED, hidden_act="gelu_pytorch_tanh", sliding_window=9
    ),
    "nemotron-h": _variant("NemotronH", _nemotron_h("mlp")),
    "glm4": _variant("Glm4", _WIDER),
    "ernie4.5": _variant("Ernie4_5", _WIDER, use_bias=True),
    "seed-oss": _variant("SeedOss", _WIDER, attention_out_bias=True),
    "hunyuan": _variant("HunYuanDenseV1", _WIDER, tie_word_embeddings=True),
    "hunyuan-alpha": _variant(
        "HunYuanDenseV1",
        _WIDER,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 5.0, "factor": 1.0},
    ),
    "exaone4": _variant(
        "Exaone4", num_key_value_heads=2, sliding_window=None, layer_types=["full_attention"] * 3
    ),
    "exaone4-windows": _variant(
        "Exaone4", num_key_value_heads=2, num_hidden_layers=5, sliding_window=9
    ),
    "ministral3": _variant("Ministral3", _WIDER, _BY_LENGTH, tie_word_embeddings=True),
    "mistral3": _of_pictures("Mistral3", sliding_window=7),
    "qwen2.5-vl": _of_pictures("Qwen2_5_VL", _rope(2, 2, 2)),
    "glm4v": _of_pictures("Glm4v", _rope(1, 1, 1, partial_rotary_factor=0.5)),
    "internvl": _of_pictures("InternVL"),
    "qwen3-vl": _of_pictures("Qwen3VL", _rope(4, 3, 3), head_dim=20, tie_word_embeddings=True),
    "smollm3": _variant("SmolLM3", _GROUPED, num_hidden_layers=5),
    "qwen3.5": _variant("Qwen3_5", _DELTA, tie_word_embeddings=True),
    "qwen3.5-vision": _of_pictures("Qwen3_5", _DELTA, _rope(2, 1, 1, partial_rotary_factor=0.4)),
    "lfm2": _variant("Lfm2", _LFM2, intermediate_size=120, block_multiple_of=8, conv_L_cache=4),
    "qwen3.5-first-full": _variant(
        "Qwen3_5",
        _DELTA,
        linear_conv_kernel_dim=3,
        linear_num_value_heads=2,
        layer_types=["full_attention", "linear_attention"] * 2,
    ),
    "falcon-sequential": Variant(_falcon, parallel_attn=False, multi_query=False, bias=True),
}

_MIXTURE: Sizes = {**_GROUPED, "intermediate_size": 40, "num_experts_per_tok": 3}
_QWEN_MOE: Sizes = {**_MIXTURE, "moe_intermediate_size": 24, "num_experts": 7}
_QWEN_SHARED: Sizes = {**_QWEN_MOE, "shared_expert_intermediate_size": 36}
_ERNIE_MOE: Sizes = {**_GROUPED, "moe_intermediate_size": 24, "moe_num_experts": 7, "moe_k": 3}
_ROUTED: Sizes = {
    **_MIXTURE,
    "moe_intermediate_size": 24,
    "head_dim": 20,
    "num_hidden_layers": 5,
}
_GLM_MOE: Sizes = {
    **_ROUTED,
    "n_routed_experts": 8,
    "num_hidden_layers": 4,
    "routed_scaling_factor": 1.7,
}
_HALF_TURNED: Sizes = {**_GLM_MOE, "partial_rotary_factor": 0.5}
_GROUPS: Sizes = {"n_group": 4, "topk_group": 2}
_DEEPSEEK: Sizes = {
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
_DEEPSEEK_V2: Sizes = {
    **_DEEPSEEK,
    "rope_parameters": {**_ROPES["yarn"], "mscale": 0.7, "mscale_all_dim": 0.7},
    "routed_scaling_factor": 1.3,
}
_GPT_OSS: Sizes = {
    **_MIXTURE,
    "num_local_experts": 5,
    "head_dim": 20,
    "sliding_window": 9,
    "num_hidden_layers": 4,
    "rope_parameters": {
        **_ROPES["yarn"],
        "rope_theta": 150000.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
_OF_EXPERTS: Sizes = {"intermediate_size": 40, "num_experts_per_tok": 3, "num_local_experts": 6}

# Mixtures of experts.
MIXTURES: dict[str, Variant] = {
    "qwen2-moe": _variant("Qwen2Moe", _QWEN_SHARED),
    "qwen2-moe-windows": _variant(
        "Qwen2Moe",
        _QWEN_SHARED,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=2,
        norm_topk_prob=True,
        decoder_sparse_step=2,
    ),
    "qwen3-next": _variant("Qwen3Next", _QWEN_SHARED, _DELTA),
    "qwen3-next-dense": _variant(
        "Qwen3Next", _QWEN_SHARED, _DELTA, mlp_only_layers=[1, 3], norm_topk_prob=False
    ),
    "qwen3.5-moe": _variant("Qwen3_5Moe", _QWEN_SHARED, _DELTA),
    "lfm2-moe": _variant("Lfm2Moe", _QWEN_MOE, _LFM2, num_dense_layers=1),
    "qwen3-moe": _variant("Qwen3Moe", _QWEN_MOE, norm_topk_prob=True, head_dim=20),
    "qwen3-moe-dense": _variant("Qwen3Moe", _QWEN_MOE, mlp_only_layers=[1]),
    "olmoe": _variant("Olmoe", _MIXTURE, num_experts=7),
    "mixtral": _variant("Mixtral", _MIXTURE, num_local_experts=5),
    "granite-moe": _variant("GraniteMoe", _MIXTURE, _GRANITE, num_local_experts=6),
    "granite-moe-shared": _variant(
        "GraniteMoeShared",
        _MIXTURE,
        num_local_experts=6,
        shared_intermediate_size=28,
        attention_multiplier=0.3,
    ),
    "granite4-moe": _variant(
        "GraniteMoeHybrid", _GRANITE4, _OF_EXPERTS, position_embedding_type="rope"
    ),
    "granite4-h-moe": _variant("GraniteMoeHybrid", _GRANITE4_H, _OF_EXPERTS, mamba_n_groups=1),
    "nemotron-h-moe": _variant(
        "NemotronH",
        _nemotron_h("moe"),
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=36,
        routed_scaling_factor=1.7,
    ),
    "ernie4.5-moe": _variant("Ernie4_5_Moe", _ERNIE_MOE),
    "ernie4.5-moe-steps": _variant(
        "Ernie4_5_Moe",
        _ERNIE_MOE,
        num_hidden_layers=6,
        moe_layer_start_index=2,
        moe_layer_end_index=4,
        moe_layer_interval=2,
        moe_num_shared_experts=0,
    ),
    "qwen3-vl-moe": _of_pictures("Qwen3VLMoe", _QWEN_MOE, _rope(2, 2, 2), norm_topk_prob=True),
    "glm4v-moe": _of_pictures("Glm4vMoe", _GLM_MOE, _rope(2, 2, 1, partial_rotary_factor=0.5)),
    "glm4-moe": _variant("Glm4Moe", _HALF_TURNED, attention_bias=True),
    "glm4-moe-groups": _variant(
        "Glm4Moe",
        _HALF_TURNED,
        _GROUPS,
        use_qk_norm=True,
        n_shared_experts=2,
        first_k_dense_replace=2,
    ),
    "dots1": _variant(
        "Dots1",
        _ROUTED,
        n_routed_experts=8,
        sliding_window=70,
        max_window_layers=2,
        norm_topk_prob=True,
        first_k_dense_replace=1,
        n_shared_experts=2,
    ),
    "solar-open": _variant("SolarOpen", _ROUTED, n_routed_experts=8, n_shared_experts=1),
    "hy3": _variant("HYV3", _ROUTED, num_experts=8),
    "exaone-moe": _variant("ExaoneMoe", _ROUTED, num_experts=8, sliding_window=9),
    "hunyuan-moe": _variant("HunYuanMoEV1", _MIXTURE, _WIDER, num_experts=7, moe_topk=3),
    "bailing2": Variant(
        _bailing2,
        {
            "model_type": "bailing_moe",
            "architectures": ["BailingMoeV2ForCausalLM"],
            "num_shared_experts": 1,
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
        **(_HALF_TURNED | _GROUPS),
        attention_bias=False,
        use_qk_norm=True,
    ),
    "deepseek-v2": _variant("DeepseekV2", _DEEPSEEK_V2, q_lora_rank=None),
    "deepseek-v2-rank": _variant(
        "DeepseekV2",
        _DEEPSEEK_V2,
        _GROUPS,
        q_lora_rank=20,
        first_k_dense_replace=1,
        topk_method="group_limited_greedy",
    ),
    "deepseek-v3": _variant(
        "DeepseekV3",
        _DEEPSEEK,
        _GROUPS,
        q_lora_rank=20,
        first_k_dense_replace=1,
        routed_scaling_factor=1.7,
        rope_parameters=_SCALED_YARN,
    ),
    "deepseek-v3-halves": _variant(
        "DeepseekV3",
        _DEEPSEEK,
        q_lora_rank=20,
        n_group=1,
        topk_group=1,
        rope_interleave=False,
        first_k_dense_replace=0,
    ),
    "minimax-m2": _variant("MiniMaxM2", _MIXTURE, num_local_experts=7, head_dim=20, rotary_dim=10),
    "mistral4": _variant("Mistral4", _DEEPSEEK, _BY_LENGTH, q_lora_rank=20),
    "glm4-moe-lite": _variant("Glm4MoeLite", _DEEPSEEK, q_lora_rank=20),
    "gpt-oss": _variant("GptOss", _GPT_OSS, swiglu_limit=0.8),
    "gpt-oss-plain": _variant("GptOss", _GPT_OSS, attention_bias=False),
    "gpt-oss-one-expert": _variant("GptOss", _GPT_OSS, num_local_experts=1, num_experts_per_tok=1),
    "smallthinker": Variant(_smallthinker, 3),
    "smallthinker-windows": Variant(
        _smallthinker,
        5,
        rope_layout=[0, 1, 1, 1, 0],
        sliding_window_layout=[0, 1, 1, 1, 0],
        moe_primary_router_apply_softmax=True,
    ),
    "turbosparse-mixtral": Variant(
        _with_experts,
        "Mistral",
        "gate",
        5,
        {
            "w1": (40, 48),
            "w3": (40, 48),
            "w2": (48, 40),
            "predictor.fc1": (12, 48),
            "predictor.fc2": (40, 12),
        },
        {
            "model_type": "turbosparsemixtral",
            "architectures": ["TurboSparseMixtralForCausalLM"],
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
        intermediate_size=40,
        sliding_window=None,
    ),
    "gemma4-a4b": _variant(
        "Gemma4",
        _GEMMA4,
        _KEYS_ARE_VALUES,
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
    # transformers adds keys to the ropes that it is given, and variants share these.
    model = deepcopy(made)().eval()
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
