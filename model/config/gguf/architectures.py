"""The architectures of GGUF files that are read: a new one is an entry here.

Source:  llama.cpp, gguf-py/gguf/constants.py and convert_hf_to_gguf.py
"""

from __future__ import annotations

from typing import Any

from model.config.gguf.architecture import (
    LLAMA_NAMES,
    Architecture,
    Metadata,
    gated_values,
    paired_rows,
)


def _llama_values(metadata: Metadata) -> dict[str, Any]:
    return {
        **gated_values(metadata),
        "hidden_act": "silu",
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_down.bias"),
        "num_local_experts": metadata.integer("expert_count", 0),
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "llama",
        "LlamaForCausalLM",
        LLAMA_NAMES,
        _llama_values,
        row_orders={
            "attn_q": paired_rows("num_attention_heads"),
            "attn_k": paired_rows("num_key_value_heads"),
        },
    ),
}
