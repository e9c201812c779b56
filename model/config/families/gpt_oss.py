"""gpt-oss: sinks in attention, windows in every second layer, experts with biases and limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotcold.model.config.activations import CLAMPED_SLOPE
from hotcold.model.config.families.experts import COUNT_KEYS, read_router
from hotcold.model.config.families.family import (
    Family,
    GgufArchitecture,
    max_positions,
    sliding_layers,
    windows,
)
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import GGUF_EXPERTS, LLAMA_NAMES, ExpertNames
from hotcold.model.config.gguf_metadata import Metadata, expert_length, gated_values
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.model_config import ExpertsConfig
from hotcold.model.config.rope import read_rope

_THETA = 150_000.0
_BIASES = "mlp.experts.gate_up_proj_bias"
# In bfloat16: (E, d, 2 I) and (E, I, d). In MXFP4, beside `_scales`: rows of 32 weights a block.
_FLOATS = ExpertNames(
    router="mlp.router.weight",
    gate="mlp.experts.gate_up_proj",
    up="mlp.experts.gate_up_proj",
    down="mlp.experts.down_proj",
    router_bias="mlp.router.bias",
    gate_bias=_BIASES,
    up_bias=_BIASES,
    down_bias="mlp.experts.down_proj_bias",
    alternates=True,
    is_transposed=True,
)
_MXFP4 = replace(
    _FLOATS,
    gate="mlp.experts.gate_up_proj_blocks",
    up="mlp.experts.gate_up_proj_blocks",
    down="mlp.experts.down_proj_blocks",
    is_transposed=False,
)


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    sliding = sliding_layers(reader, lambda layer: layer % 2 == 0)
    rope = read_rope(reader, max_positions(reader), theta=_THETA)
    fields = llama_fields(reader, norm_eps=1e-5, ropes=(rope,))
    has_bias = reader.boolean("attention_bias", True)
    router = read_router(
        reader, "num_local_experts", "softmax_of_chosen", False, has_bias=True
    )  # fmt: skip
    return {
        **fields,
        "activation_fn": "clamped_silu",
        "activation_threshold": reader.number("swiglu_limit", 7.0, low=1e-6, high=1e30),
        "attention_bias": has_bias,
        "out_bias": has_bias,
        "ffn_bias": True,
        "has_sinks": True,
        "windows": windows(reader, sliding, 128),
        "experts": ExpertsConfig(router=router, size=fields["ffn_size"]),
    }


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    return {
        **gated_values(metadata),
        "intermediate_size": expert_length(metadata),
        "sliding_window": metadata.integer("attention.sliding_window"),
    }


_GGUF_NAMES = {"post_attention_layernorm": "post_attention_norm"}


GPT_OSS = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM", "GptOssModel"),
    read_fields=_read_fields,
    tensor_names=LLAMA_NAMES.with_layer(
        sinks="self_attn.sinks", experts=(_FLOATS, _MXFP4, *GGUF_EXPERTS)
    ),
    reads=(
        *(*COUNT_KEYS, "num_experts_per_tok", "swiglu_limit", "swiglu_alpha"),
        *("sliding_window", "layer_types"),
    ),
    fixed={"hidden_act": ("silu", "swish"), "swiglu_alpha": (CLAMPED_SLOPE,)},
    defaults={"head_dim": 64, "num_key_value_heads": 8},
    gguf=GgufArchitecture(("gpt-oss",), _gguf_values, _GGUF_NAMES),
)
