"""The architectures of GGUF files that are read: a new one is an entry here.

What a file leaves out because llama.cpp has it in its source stands here too.
Source:  llama.cpp, gguf-py/gguf/constants.py, convert_hf_to_gguf.py and src/models/
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from model.config.gguf.architecture import (
    LLAMA_LAYER,
    LLAMA_NAMES,
    Architecture,
    Metadata,
    gated_values,
    head_dim,
    longrope_values,
    paired_rows,
)

_PAIRED = {
    "attn_q": paired_rows("num_attention_heads"),
    "attn_k": paired_rows("num_key_value_heads"),
}
_QK_NORMS = {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
_OUTPUT_NORMS = {"attention_norm": "post_attention_norm", "ffn_output_norm": "post_ffw_norm"}
_TWO_MATRICES = {"gate": "ffn_up", "up": ""}


def _names(**layer: Any) -> Any:
    return replace(LLAMA_NAMES, layer=replace(LLAMA_LAYER, **layer))


def _llama(metadata: Metadata) -> dict[str, Any]:
    window = metadata.integer("attention.sliding_window", 0)
    return {
        **gated_values(metadata),
        "hidden_act": "silu",
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_down.bias"),
        "num_local_experts": metadata.integer("expert_count", 0),
        **({"sliding_window": window} if window else {}),
    }


def _qwen(metadata: Metadata) -> dict[str, Any]:
    return {**gated_values(metadata), "hidden_act": "silu", "use_sliding_window": False}


def _gemma(metadata: Metadata, blocks_of_27b: int) -> dict[str, Any]:
    """The largest of each scales scores by its heads' share of the width."""
    scalar = head_dim(metadata)
    if metadata.integer("block_count") == blocks_of_27b:
        heads = metadata.integer("attention.head_count")
        scalar = metadata.integer("embedding_length") // heads
    return {
        **gated_values(metadata),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": metadata.integer("attention.sliding_window", 4096),
    }


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    return {
        **_gemma(metadata, 46),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    return {
        **_gemma(metadata, 62),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
    }


def _phi3(metadata: Metadata) -> dict[str, Any]:
    window = metadata.integer("attention.sliding_window", 0)
    return {
        **gated_values(metadata),
        "hidden_act": "silu",
        "sliding_window": window or None,
        **longrope_values(metadata),
    }


def _olmo2(metadata: Metadata) -> dict[str, Any]:
    return {**gated_values(metadata), "hidden_act": "silu"}


def _smollm3(metadata: Metadata) -> dict[str, Any]:
    return {**_llama(metadata), "no_rope_layer_interval": 4}


def _arcee(metadata: Metadata) -> dict[str, Any]:
    return {**_llama(metadata), "hidden_act": "relu2"}


def _nemotron(metadata: Metadata) -> dict[str, Any]:
    epsilon = metadata.number("attention.layer_norm_epsilon")
    values = gated_values(metadata, epsilon)
    return {**values, "hidden_act": "relu2", "norm_eps": epsilon}


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", LLAMA_NAMES, _llama, _PAIRED),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", LLAMA_NAMES, _qwen),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _names(**_QK_NORMS), _qwen),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", _names(**_OUTPUT_NORMS), _gemma2, adds_one_to_norms=True
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _names(**_OUTPUT_NORMS, **_QK_NORMS),
        _gemma3,
        adds_one_to_norms=True,
    ),
    "phi3": Architecture(
        "phi3", "Phi3ForCausalLM", _names(qkv=("attn_qkv",), gate="ffn_up", up="ffn_up"), _phi3
    ),
    "olmo2": Architecture(
        "olmo2",
        "Olmo2ForCausalLM",
        _names(norm="", ffn_norm="", **_OUTPUT_NORMS, **_QK_NORMS),
        _olmo2,
    ),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", LLAMA_NAMES, _smollm3, _PAIRED),
    "arcee": Architecture("arcee", "ArceeForCausalLM", _names(**_TWO_MATRICES), _arcee, _PAIRED),
    "nemotron": Architecture(
        "nemotron",
        "NemotronForCausalLM",
        _names(**_TWO_MATRICES),
        _nemotron,
        adds_one_to_norms=True,
    ),
}
