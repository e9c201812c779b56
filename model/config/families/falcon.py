"""Falcon: attention and FFN side by side, q, k and v in one tensor, few KV heads."""

from __future__ import annotations

from typing import Any

from hotcold.model.config.activations import activation_fn
from hotcold.model.config.families.family import (
    MAX_WIDTH,
    Family,
    GgufArchitecture,
    grouped_kv_heads,
    head_sizes,
    max_positions,
)
from hotcold.model.config.families.llama import POWERINFER_DOWN
from hotcold.model.config.families.tensor_names import LayerNames, TensorNames
from hotcold.model.config.gguf_metadata import Metadata
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.rope import read_rope


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    sizes = head_sizes(reader)
    grouped = reader.boolean("new_decoder_architecture", False)
    parallel = grouped or reader.boolean("parallel_attn", True)
    num_norms = reader.integer("num_ln_in_parallel_attn", 2 if grouped else 1, high=2)
    bias = reader.boolean("bias", False)
    key = "activation" if reader.has("activation") else "hidden_act"
    if not reader.has(key):
        raise reader.fail(
            "activation", "is missing; add gelu, or relu if this is a ReLU version of Falcon"
        )
    return {
        **sizes,
        "num_kv_heads": _kv_heads(reader, sizes["num_heads"], grouped),
        "ffn_size": reader.integer("ffn_hidden_size", 4 * sizes["hidden_size"], high=4 * MAX_WIDTH),
        "has_gate": False,
        "activation_fn": activation_fn(reader, key, "gelu"),
        "norm_kind": "layernorm",
        "norm_bias": True,
        "norm_eps": reader.number("layer_norm_epsilon", 1e-5, low=0.0, high=1.0),
        "has_ffn_norm": not parallel or (grouped and num_norms == 2),
        "parallel_ffn": parallel,
        "attention_bias": bias,
        "out_bias": bias,
        "ffn_bias": bias,
        "fused_qkv": "grouped",
        "ropes": (read_rope(reader, max_positions(reader)),),
    }


def _kv_heads(reader: ConfigReader, heads: int, grouped: bool) -> int:
    if grouped:
        return grouped_kv_heads(reader, "num_kv_heads", heads)
    kv_heads = reader.integer("num_kv_heads", heads, high=heads)
    if reader.boolean("multi_query", True):
        return 1  # such configs carry num_kv_heads too, and transformers does not read it
    if kv_heads != heads:
        raise reader.fail("num_kv_heads", f"is {kv_heads} but multi_query is false; give {heads}")
    return heads


def _tensor_names(config: ModelConfig) -> TensorNames:
    norm, ffn_norm = "input_layernorm", "post_attention_layernorm"
    if config.parallel_ffn:
        norm, ffn_norm = ("ln_attn", "ln_mlp") if config.has_ffn_norm else (norm, "")
    return TensorNames(
        tokens="word_embeddings",
        layers="h.{}.",
        layer=LayerNames(
            norm=norm,
            qkv=("self_attention.query_key_value",),
            out="self_attention.dense",
            ffn_norm=ffn_norm,
            gate="mlp.dense_h_to_4h",
            up="",
            down="mlp.dense_4h_to_h",
        ),
        final_norm="ln_f",
    )


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    """llama.cpp computes gelu in every Falcon, PowerInfer relu."""
    kv_heads = metadata.integer("attention.head_count_kv", 1)
    return {
        "hidden_size": metadata.integer("embedding_length"),
        "ffn_hidden_size": metadata.integer("feed_forward_length"),
        "num_attention_heads": metadata.integer("attention.head_count"),
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": kv_heads > 1,
        "num_ln_in_parallel_attn": 1 + metadata.has_tensor("blk.0.attn_norm_2.weight"),
        "multi_query": kv_heads == 1,
        "activation": "relu" if metadata.has_tensor(POWERINFER_DOWN) else "gelu",
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
    }


_GGUF_NAMES = {
    "ln_attn": "attn_norm_2",
    "ln_mlp": "attn_norm",
    "self_attention.query_key_value": "attn_qkv",
    "mlp.dense_h_to_4h": "ffn_up",
}


FALCON = Family(
    name="falcon",
    architectures=("FalconForCausalLM", "FalconModel"),
    prefixes=("transformer.",),
    bos_id=11,
    eos_id=11,
    tied_embeddings=True,
    read_fields=_read_fields,
    tensor_names=_tensor_names,
    fixed={"alibi": (False,)},
    gguf=GgufArchitecture(("falcon",), _gguf_values, _GGUF_NAMES),
)
