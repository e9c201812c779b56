"""The architectures of GGUF files that are read: tensor names, order of rows, metadata.

A new architecture is an entry in ARCHITECTURES. What llama.cpp has in its source instead of the
file stands here too.
Source:  llama.cpp, gguf-py/gguf/constants.py, convert_hf_to_gguf.py and src/models/
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hotcold.model.config.families.experts import GGUF_EXPERTS
from hotcold.model.config.families.tensor_names import LayerNames, TensorNames
from hotcold.model.config.gguf_metadata import Metadata, gated_values, head_dim
from hotcold.model.errors import ConfigError

# From config.json's values: row i of a checkpoint's tensor is row order[i] of the file's tensor.
RowOrder = Callable[[Mapping[str, Any]], np.ndarray]
# From metadata: the keys of config.json beside those that all architectures have.
Values = Callable[[Metadata], dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """One value of general.architecture, and the Hugging Face model that it is.

    `names` are the tensors' names in the file, with a field for each role. A file that has a tensor
    of `variants` is of that architecture instead.
    """

    model_type: str
    class_name: str
    names: TensorNames
    values: Values
    row_orders: Mapping[str, RowOrder] = field(default_factory=dict)  # by name in `names.layer`
    adds_one_to_norms: bool = False  # a checkpoint has these weights without the one
    variants: tuple[tuple[str, Architecture], ...] = ()


LLAMA_LAYER = LayerNames(
    norm="attn_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    out="attn_output",
    ffn_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    predictor=(),
)
LLAMA_NAMES = TensorNames("token_embd", "blk.{}.", LLAMA_LAYER, "output_norm", head="output")
_named = LLAMA_NAMES.with_layer


def paired_rows(heads_key: str) -> RowOrder:
    """Order of q's or k's rows: a file has the two that rotate together side by side.

    A checkpoint has them half a head apart. `heads_key` is the number of heads in config.json.
    """

    def order(values: Mapping[str, Any]) -> np.ndarray:
        heads, size = values[heads_key], values["head_dim"]
        rows = np.arange(heads * size).reshape(heads, size // 2, 2)
        return rows.swapaxes(1, 2).reshape(-1)

    return order


def grouped_qkv_rows(values: Mapping[str, Any]) -> np.ndarray:
    """Order of Falcon's rows: all q, k, v in a file, by KV head in a checkpoint."""
    heads, kv_heads = values["num_attention_heads"], values["num_kv_heads"]
    size = values["hidden_size"] // heads
    rows = np.arange((heads + 2 * kv_heads) * size).reshape(-1, size)
    q, k, v = rows[:heads], rows[heads : heads + kv_heads], rows[heads + kv_heads :]
    groups = [q.reshape(kv_heads, -1, size), k[:, None], v[:, None]]
    return np.concatenate(groups, axis=1).reshape(-1)


_PAIRED = {
    "attn_q": paired_rows("num_attention_heads"),
    "attn_k": paired_rows("num_key_value_heads"),
}
_QK_NORMS = {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
_OUTPUT_NORMS = {"attention_norm": "post_attention_norm", "ffn_output_norm": "post_ffw_norm"}
_TWO_MATRICES = {"gate": "ffn_up", "up": ""}


def _llama(metadata: Metadata) -> dict[str, Any]:
    """A sliding window makes it a Mistral; llama.cpp ignores the window."""
    window = metadata.integer("attention.sliding_window", 0)
    windowed = {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": window,
    }
    return {
        **gated_values(metadata),
        "hidden_act": "silu",
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_down.bias"),
        "num_local_experts": metadata.integer("expert_count", 0),
        **(windowed if window else {}),
    }


def _qwen(metadata: Metadata) -> dict[str, Any]:
    return {**gated_values(metadata), "hidden_act": "silu", "use_sliding_window": False}


def _gemma(metadata: Metadata, blocks_of_27b: int) -> dict[str, Any]:
    """Gemma 27B scales scores by hidden size / heads, smaller ones by the head's size."""
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


def _minicpm(metadata: Metadata) -> dict[str, Any]:
    """Older files lack the scales, which are the same for all its models.

    MiniCPM-S computes fatrelu, whose threshold a file lacks: llama.cpp's result is wrong, too.
    """
    name = metadata.model.metadata.get("general.name")
    if isinstance(name, str) and "minicpm-s" in name.lower().replace("_", "-"):
        raise ConfigError(
            f"{metadata.model.path}: is MiniCPM-S, whose function of neurons a GGUF file does not "
            "hold; use its safetensors files"
        )
    hidden, layers = metadata.integer("embedding_length"), metadata.integer("block_count")
    depth = metadata.number("residual_scale", 1.4 / max(1, layers) ** 0.5)
    return {
        **_llama(metadata),
        "scale_emb": metadata.number("embedding_scale", 12.0),
        "scale_depth": depth * layers**0.5,
        "dim_model_base": round(hidden / (metadata.number("logit_scale", hidden / 256) or 1.0)),
    }


def _falcon(metadata: Metadata) -> dict[str, Any]:
    """llama.cpp computes gelu in every Falcon."""
    kv_heads = metadata.integer("attention.head_count_kv", 1)
    return {
        "hidden_size": metadata.integer("embedding_length"),
        "ffn_hidden_size": metadata.integer("feed_forward_length"),
        "num_attention_heads": metadata.integer("attention.head_count"),
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": kv_heads > 1,
        "num_ln_in_parallel_attn": 1 + metadata.has_tensor("blk.0.attn_norm_2.weight"),
        "multi_query": kv_heads == 1,
        "activation": "gelu",
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
    }


def _llama_relu(metadata: Metadata) -> dict[str, Any]:
    return {**_llama(metadata), "hidden_act": "relu"}


def _bamboo(metadata: Metadata) -> dict[str, Any]:
    window = metadata.integer("attention.sliding_window", 0)
    return {**_llama_relu(metadata), "model_type": "bamboo", "sliding_window": window or None,
            "architectures": ["BambooForCausalLM"]}  # fmt: skip


def _falcon_relu(metadata: Metadata) -> dict[str, Any]:
    return {**_falcon(metadata), "activation": "relu"}


_MIXTURE = {"experts": GGUF_EXPERTS}
_POST_NORM = {"ffn_norm": "post_attention_norm"}
_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func


def _num_experts(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
    }


def _expert_length(metadata: Metadata) -> int:
    """Older files say the neurons of all chosen experts together."""
    used = max(1, metadata.integer("expert_used_count"))
    length = metadata.integer("expert_feed_forward_length", 0)
    return length or metadata.integer("feed_forward_length") // used


def _mixtral(metadata: Metadata) -> dict[str, Any]:
    names = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    window = metadata.integer("attention.sliding_window", 0)
    own = {"sliding_window": window or None}
    return {**_llama(metadata), **own, **_num_experts(metadata), **names}


def _qwen2_moe(metadata: Metadata) -> dict[str, Any]:
    shared = metadata.integer("expert_shared_feed_forward_length", 0)
    return {
        **_qwen(metadata),
        **_num_experts(metadata),
        "qkv_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "moe_intermediate_size": _expert_length(metadata),
        "shared_expert_intermediate_size": shared or metadata.integer("feed_forward_length"),
        "norm_topk_prob": False,
    }


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    """A file does not say whether weights are normed; llama.cpp always does it."""
    return {
        **_qwen(metadata),
        **_num_experts(metadata),
        "moe_intermediate_size": _expert_length(metadata),
        "norm_topk_prob": metadata.boolean("expert_weights_norm", True),
    }


def _olmoe(metadata: Metadata) -> dict[str, Any]:
    return {
        **gated_values(metadata),
        **_num_experts(metadata),
        "hidden_act": "silu",
        "clip_qkv": metadata.number("attention.clamp_kqv", 0.0) or None,
        "norm_topk_prob": metadata.boolean("expert_weights_norm", False),
    }


def _granite_moe(metadata: Metadata) -> dict[str, Any]:
    """Without attention.scale llama.cpp takes the usual one, 1 / sqrt(head_dim)."""
    usual = max(1, head_dim(metadata)) ** -0.5
    return {
        **_llama(metadata),
        **_num_experts(metadata),
        "shared_intermediate_size": metadata.integer("expert_shared_feed_forward_length", 0),
        "embedding_multiplier": metadata.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": metadata.number("residual_scale", 0.0) or 1.0,
        "attention_multiplier": metadata.number("attention.scale", 0.0) or usual,
        "logits_scaling": metadata.number("logit_scale", 1.0) or 1.0,
    }


def _glm4_moe(metadata: Metadata) -> dict[str, Any]:
    """block_count includes the layers of drafts."""
    gating = metadata.integer("expert_gating_func", 0)
    if gating not in (0, _SIGMOID):
        raise metadata.fail("expert_gating_func", f"is {gating}, which is not supported")
    drafts = metadata.integer("nextn_predict_layers", 0)
    return {
        **gated_values(metadata),
        **_num_experts(metadata),
        "hidden_act": "silu",
        "num_hidden_layers": metadata.integer("block_count") - drafts,
        "num_nextn_predict_layers": drafts,
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
        "moe_intermediate_size": _expert_length(metadata),
        "n_shared_experts": metadata.integer("expert_shared_count", 0),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0),
        "norm_topk_prob": metadata.boolean("expert_weights_norm", True),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 0.0) or 1.0,
        "n_group": metadata.integer("expert_group_count", 0) or 1,
        "topk_group": metadata.integer("expert_group_used_count", 0) or 1,
        "partial_rotary_factor": _rotary_share(metadata),
    }


def _rotary_share(metadata: Metadata) -> float:
    size = max(1, head_dim(metadata))
    return metadata.integer("rope.dimension_count", size) / size


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    return {
        **gated_values(metadata),
        **_num_experts(metadata),
        "hidden_act": "silu",
        "intermediate_size": _expert_length(metadata),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "sliding_window": metadata.integer("attention.sliding_window"),
    }


def _smallthinker(metadata: Metadata) -> dict[str, Any]:
    """With a window all layers but each fourth have it, and only they have rope."""
    layers, window = (
        metadata.integer("block_count"), metadata.integer("attention.sliding_window", 0)
    )  # fmt: skip
    period = metadata.integer("attention.sliding_window_pattern", 4) or 1
    layouts = {
        "sliding_window_layout": [int(layer % period != 0) for layer in range(layers)],
        "rope_layout": [int(layer % 4 != 0) for layer in range(layers)],
        "sliding_window_size": window,
    }
    return {
        **gated_values(metadata),
        **(layouts if window else {}),
        "moe_num_primary_experts": metadata.integer("expert_count"),
        "moe_num_active_primary_experts": metadata.integer("expert_used_count"),
        "moe_ffn_hidden_size": _expert_length(metadata),
        "moe_primary_router_apply_softmax":
            metadata.integer("expert_gating_func", _SOFTMAX) == _SOFTMAX,
    }  # fmt: skip


_FALCON_LAYER = {"qkv": ("attn_qkv",), "ffn_norm": "", "gate": "ffn_up", "up": ""}
_TWO_NORMS = {"norm": "attn_norm_2", "ffn_norm": "attn_norm"}
# PowerInfer's files have down transposed, and predictors, but no activation function: all are ReLU,
# Bamboo's of gate and up. convert.py pairs rows of q and k as llama.cpp does (permute in
# convert_model_names), and build_llama_variants rotates pairs.
_DOWN_T = "blk.0.ffn_down_t.weight"
_POWERINFER = {"down": "ffn_down_t", "predictor": ("fc1", "fc2")}


def _falcon_of(values: Values, **layer: Any) -> Architecture:
    """Both Falcons: the larger one has a norm for attention and one for the FFN."""
    large, small = {**_FALCON_LAYER, **_TWO_NORMS, **layer}, {**_FALCON_LAYER, **layer}
    rows = {"attn_qkv": grouped_qkv_rows}
    name = ("falcon", "FalconForCausalLM")
    both = Architecture(*name, _named(**large), values, rows)
    return Architecture(
        *name, _named(**small), values, rows, variants=(("blk.0.attn_norm_2.weight", both),)
    )


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "llama",
        "LlamaForCausalLM",
        LLAMA_NAMES,
        _llama,
        _PAIRED,
        variants=(
            (
                "blk.0.ffn_gate_inp.weight",
                Architecture(
                    "mixtral", "MixtralForCausalLM", _named(**_MIXTURE), _mixtral, _PAIRED
                ),
            ),
            (
                _DOWN_T,
                Architecture(
                    "llama", "LlamaForCausalLM", _named(**_POWERINFER), _llama_relu, _PAIRED
                ),
            ),
        ),
    ),
    "minicpm": Architecture("minicpm", "MiniCPMForCausalLM", LLAMA_NAMES, _minicpm, _PAIRED),
    "bamboo": Architecture("bamboo", "BambooForCausalLM", _named(**_POWERINFER), _bamboo, _PAIRED),
    "falcon": replace(
        _falcon_of(_falcon),
        variants=(
            (_DOWN_T, _falcon_of(_falcon_relu, **_POWERINFER)),
            *_falcon_of(_falcon).variants,
        ),
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", LLAMA_NAMES, _qwen),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _named(**_QK_NORMS), _qwen),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", _named(**_OUTPUT_NORMS), _gemma2, adds_one_to_norms=True
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _named(**_OUTPUT_NORMS, **_QK_NORMS),
        _gemma3,
        adds_one_to_norms=True,
    ),
    "phi3": Architecture(
        "phi3", "Phi3ForCausalLM", _named(qkv=("attn_qkv",), gate="ffn_up", up="ffn_up"), _phi3
    ),
    "olmo2": Architecture(
        "olmo2",
        "Olmo2ForCausalLM",
        _named(norm="", ffn_norm="", **_OUTPUT_NORMS, **_QK_NORMS),
        _olmo2,
    ),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", LLAMA_NAMES, _smollm3, _PAIRED),
    "arcee": Architecture("arcee", "ArceeForCausalLM", _named(**_TWO_MATRICES), _arcee, _PAIRED),
    "nemotron": Architecture(
        "nemotron",
        "NemotronForCausalLM",
        _named(**_TWO_MATRICES),
        _nemotron,
        adds_one_to_norms=True,
    ),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _named(**_MIXTURE), _qwen2_moe),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", _named(**_MIXTURE, **_QK_NORMS), _qwen3_moe
    ),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM", _named(**_MIXTURE, **_QK_NORMS), _olmoe),
    "granitemoe": Architecture(
        "granitemoe", "GraniteMoeForCausalLM", _named(**_MIXTURE), _granite_moe, _PAIRED
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        _named(**_MIXTURE, **_QK_NORMS, **_POST_NORM),
        _glm4_moe,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        _named(**_MIXTURE, **_POST_NORM, sinks="attn_sinks"),
        _gpt_oss,
    ),
    "smallthinker": Architecture(
        "smallthinker", "SmallThinkerForCausalLM", _named(**_MIXTURE), _smallthinker
    ),
}
