"""What config.json of each family says, with the defaults that transformers has."""

from __future__ import annotations

from typing import Any

from model.config.json_reader import ConfigReader
from model.config.model_config import ActivationFn
from model.config.rope import read_rope
from model.errors import shown

ACTIVATION_FNS: dict[str, ActivationFn] = {
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
}
MAX_WIDTH = 1 << 20
MAX_POSITIONS = 1 << 26


def _activation_fn(reader: ConfigReader, key: str, default: str) -> ActivationFn:
    name = reader.text(key, default)
    if name not in ACTIVATION_FNS:
        supported = ", ".join(sorted(set(ACTIVATION_FNS.values())))
        raise reader.fail(key, f"is {shown(name)}, which is not supported; supported: {supported}")
    for other in ("hidden_act", "activation_function", "activation"):
        if reader.has(other) and reader.values[other] != reader.values.get(key, name):
            raise reader.fail(
                other, f"is {shown(reader.values[other])} but {key} is {shown(name)}; keep one"
            )
    return ACTIVATION_FNS[name]


def max_positions(reader: ConfigReader) -> int:
    """Return the longest context."""
    return reader.integer("max_position_embeddings", 2048, high=MAX_POSITIONS)


def _heads(reader: ConfigReader, head_dim_apart: bool = False) -> tuple[int, int, int]:
    """Return hidden size, number of heads and head size (free only if `head_dim_apart`)."""
    hidden = reader.integer("hidden_size", high=MAX_WIDTH)
    heads = reader.integer("num_attention_heads", high=MAX_WIDTH)
    if hidden % heads and not (reader.has("head_dim") and head_dim_apart):
        raise reader.fail(
            "hidden_size", f"is {hidden}, not a multiple of num_attention_heads {heads}"
        )
    head_dim = reader.integer("head_dim", hidden // heads, high=MAX_WIDTH)
    if head_dim != hidden // heads and not head_dim_apart:
        raise reader.fail("head_dim", f"is {head_dim}; this family needs {hidden // heads}")
    return hidden, heads, head_dim


def _check_groups(reader: ConfigReader, key: str, kv_heads: int, heads: int) -> int:
    if heads % kv_heads:
        raise reader.fail(key, f"is {kv_heads}, which does not divide num_attention_heads {heads}")
    return kv_heads


def llama_fields(reader: ConfigReader) -> dict[str, Any]:
    """Return the fields of ModelConfig that are particular to Llama."""
    hidden, heads, head_dim = _heads(reader, head_dim_apart=True)
    kv_heads = reader.integer("num_key_value_heads", heads, high=heads)
    return {
        "family": "llama",
        "hidden_size": hidden,
        "embed_size": hidden,
        "num_heads": heads,
        "num_kv_heads": _check_groups(reader, "num_key_value_heads", kv_heads, heads),
        "head_dim": head_dim,
        "ffn_size": reader.integer("intermediate_size", high=MAX_WIDTH),
        "has_gate": True,
        "activation_fn": _activation_fn(reader, "hidden_act", "silu"),
        "norm_kind": "rmsnorm",
        "norm_eps": reader.number("rms_norm_eps", 1e-6, low=0.0, high=1.0),
        "norm_affine": True,
        "has_ffn_norm": True,
        "has_final_norm": True,
        "post_norm": False,
        "parallel_ffn": False,
        "attention_bias": reader.boolean("attention_bias", False),
        "ffn_bias": reader.boolean("mlp_bias", False),
        "fused_qkv": False,
        "rope": read_rope(reader, max_positions(reader)),
        "position_offset": 0,
    }


def opt_fields(reader: ConfigReader) -> dict[str, Any]:
    """Return the fields of ModelConfig that are particular to OPT."""
    hidden, heads, head_dim = _heads(reader)
    before = reader.boolean("do_layer_norm_before", True)
    bias = reader.boolean("enable_bias", True)
    return {
        "family": "opt",
        "hidden_size": hidden,
        "embed_size": reader.integer("word_embed_proj_dim", hidden, high=MAX_WIDTH),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "ffn_size": reader.integer("ffn_dim", high=MAX_WIDTH),
        "has_gate": False,
        "activation_fn": _activation_fn(reader, "activation_function", "relu"),
        "norm_kind": "layernorm",
        "norm_eps": 1e-5,
        "norm_affine": reader.boolean("layer_norm_elementwise_affine", True),
        "has_ffn_norm": True,
        "has_final_norm": before and not reader.boolean("_remove_final_layer_norm", False),
        "post_norm": not before,
        "parallel_ffn": False,
        "attention_bias": bias,
        "ffn_bias": bias,
        "fused_qkv": False,
        "rope": None,
        "position_offset": 2,
    }


def falcon_fields(reader: ConfigReader) -> dict[str, Any]:
    """Return the fields of ModelConfig that are particular to Falcon."""
    hidden, heads, head_dim = _heads(reader)
    reader.refuse("alibi", lambda value: value is False, "alibi positions are not supported")
    grouped = reader.boolean("new_decoder_architecture", False)
    parallel = grouped or reader.boolean("parallel_attn", True)
    num_norms = reader.integer("num_ln_in_parallel_attn", 2 if grouped else 1, high=2)
    bias = reader.boolean("bias", False)
    key = "activation" if reader.has("activation") else "hidden_act"
    return {
        "family": "falcon",
        "hidden_size": hidden,
        "embed_size": hidden,
        "num_heads": heads,
        "num_kv_heads": _falcon_kv_heads(reader, heads, grouped),
        "head_dim": head_dim,
        "ffn_size": reader.integer("ffn_hidden_size", 4 * hidden, high=4 * MAX_WIDTH),
        "has_gate": False,
        "activation_fn": _activation_fn(reader, key, "gelu"),
        "norm_kind": "layernorm",
        "norm_eps": reader.number("layer_norm_epsilon", 1e-5, low=0.0, high=1.0),
        "norm_affine": True,
        "has_ffn_norm": not parallel or (grouped and num_norms == 2),
        "has_final_norm": True,
        "post_norm": False,
        "parallel_ffn": parallel,
        "attention_bias": bias,
        "ffn_bias": bias,
        "fused_qkv": True,
        "rope": read_rope(reader, max_positions(reader)),
        "position_offset": 0,
    }


def _falcon_kv_heads(reader: ConfigReader, heads: int, grouped: bool) -> int:
    kv_heads = reader.integer("num_kv_heads", heads, high=heads)
    if grouped:
        return _check_groups(reader, "num_kv_heads", kv_heads, heads)
    if reader.boolean("multi_query", True):
        return 1  # such configs carry num_kv_heads too, and transformers does not read it
    if kv_heads != heads:
        raise reader.fail("num_kv_heads", f"is {kv_heads} but multi_query is false; give {heads}")
    return heads
