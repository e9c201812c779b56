"""OLMo 2: norms after attention and FFN, none before; q and k normed over all heads."""

from __future__ import annotations

from typing import Any

from hotcold.model.config.families.family import Family
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import LLAMA_NAMES
from hotcold.model.config.json_reader import ConfigReader


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    return {
        **llama_fields(reader, norm_eps=1e-5),
        "has_norm": False,
        "has_ffn_norm": False,
        "has_output_norms": True,
        "qk_norm": "full",
    }


_NAMES = LLAMA_NAMES.with_layer(
    norm="",
    ffn_norm="",
    attention_norm="post_attention_layernorm",
    ffn_output_norm="post_feedforward_layernorm",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
)
OLMO2 = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM", "Olmo2Model"),
    eos_id=50279,
    read_fields=_read_fields,
    tensor_names=_NAMES,
)
