"""What each family calls its tensors, without the prefix that `Checkpoint` resolves."""

from __future__ import annotations

from dataclasses import dataclass

from model.config.model_config import ModelConfig


@dataclass(frozen=True)
class TensorNames:
    """Names without ".weight" or ".bias"; `{}` stands for the layer; "" where there is none."""

    tokens: str
    final_norm: str
    layer: str
    norm: str
    qkv: tuple[str, ...]  # q, k, v; or one fused tensor
    out: str
    ffn_norm: str
    gate: str
    up: str
    down: str
    positions: str = ""
    project_in: str = ""
    project_out: str = ""
    head: str = "lm_head"


_LLAMA = TensorNames(
    tokens="embed_tokens",
    final_norm="norm",
    layer="layers.{}.",
    norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    ffn_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)

_OPT = TensorNames(
    tokens="embed_tokens",
    final_norm="final_layer_norm",
    layer="layers.{}.",
    norm="self_attn_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    ffn_norm="final_layer_norm",
    gate="fc1",
    up="",
    down="fc2",
    positions="embed_positions",
    project_in="project_in",
    project_out="project_out",
)


def _falcon(config: ModelConfig) -> TensorNames:
    two_norms = config.parallel_ffn and config.has_ffn_norm
    return TensorNames(
        tokens="word_embeddings",
        final_norm="ln_f",
        layer="h.{}.",
        norm="ln_attn" if two_norms else "input_layernorm",
        qkv=("self_attention.query_key_value",),
        out="self_attention.dense",
        ffn_norm="ln_mlp" if two_norms else "post_attention_layernorm",
        gate="mlp.dense_h_to_4h",
        up="",
        down="mlp.dense_4h_to_h",
    )


def tensor_names(config: ModelConfig) -> TensorNames:
    """Return the names that the family's checkpoints use."""
    if config.family == "falcon":
        return _falcon(config)
    return _LLAMA if config.family == "llama" else _OPT
