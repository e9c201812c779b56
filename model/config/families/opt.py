"""OPT: LayerNorm, learned positions, an FFN of two matrices; opt-350m has post-norm."""

from __future__ import annotations

from typing import Any

from hotcold.model.config.activations import activation_fn
from hotcold.model.config.families.family import MAX_WIDTH, Family, head_sizes
from hotcold.model.config.families.tensor_names import LayerNames, TensorNames
from hotcold.model.config.json_reader import ConfigReader


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    sizes = head_sizes(reader)
    before = reader.boolean("do_layer_norm_before", True)
    bias = reader.boolean("enable_bias", True)
    affine = reader.boolean("layer_norm_elementwise_affine", True)
    return {
        **sizes,
        "embed_size": reader.integer("word_embed_proj_dim", sizes["hidden_size"], high=MAX_WIDTH),
        "num_kv_heads": sizes["num_heads"],
        "ffn_size": reader.integer("ffn_dim", high=MAX_WIDTH),
        "has_gate": False,
        "activation_fn": activation_fn(reader, "activation_function", "relu"),
        "norm_kind": "layernorm",
        "norm_eps": 1e-5,
        "norm_affine": affine,
        "norm_bias": affine,
        "has_final_norm": before and not reader.boolean("_remove_final_layer_norm", False),
        "post_norm": not before,
        "attention_bias": bias,
        "out_bias": bias,
        "ffn_bias": bias,
        "position_offset": 2,
    }


_NAMES = TensorNames(
    tokens="embed_tokens",
    layers="layers.{}.",
    layer=LayerNames(
        norm="self_attn_layer_norm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.out_proj",
        ffn_norm="final_layer_norm",
        gate="fc1",
        up="",
        down="fc2",
    ),
    final_norm="final_layer_norm",
    positions="embed_positions",
    project_in="project_in",
    project_out="project_out",
)

OPT = Family(
    name="opt",
    architectures=("OPTForCausalLM", "OPTModel"),
    prefixes=("model.decoder.", "decoder."),
    bos_id=2,
    eos_id=2,
    tied_embeddings=True,
    read_fields=_read_fields,
    tensor_names=_NAMES,
)
