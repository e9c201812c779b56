"""Gemma 4: two kinds of layers, with head sizes and KV heads of their own.

Of layers without a window values may be keys before their norm, and a quarter of a head is rotated.
The 26B-A4B has an FFN and experts in each layer. The small models (E2B, E4B) add an embedding of
the token to each layer's output, and their last layers attend to the keys and values of earlier
ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hotcold.model.config.families.experts import expert_size, read_router
from hotcold.model.config.families.family import (
    MAX_LAYERS,
    MAX_WIDTH,
    GgufArchitecture,
    grouped_kv_heads,
    max_positions,
    num_layers,
    sliding_layers,
    windows,
)
from hotcold.model.config.families.gemma import GEMMA3, GEMMA_NAMES
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import GGUF_EXPERTS, ExpertNames, TensorNames
from hotcold.model.config.gguf_metadata import Metadata, head_dim, window_kinds
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.layer_spec import HeadSizes
from hotcold.model.config.model_config import ExpertsConfig, ModelConfig
from hotcold.model.config.rope import KINDS, RopeConfig, read_ropes_by_window
from hotcold.model.errors import shown

_FULL = RopeConfig(theta=1_000_000.0, kind="proportional", share=0.25)
_LOCAL_THETA = 10_000.0


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    sliding = sliding_layers(reader, lambda layer: (layer + 1) % 6 != 0)
    sliding = (*sliding[:-1], False)
    ropes = read_ropes_by_window(
        reader,
        max_positions(reader),
        theta=_FULL.theta,
        local_theta=reader.number("rope_local_base_freq", _LOCAL_THETA, low=1e-6, high=1e12),
        full=_FULL,
        kinds=(*KINDS, "proportional"),
    )
    fields = llama_fields(
        reader,
        activation_key="hidden_activation",
        activation_default="gelu_pytorch_tanh",
        ropes=ropes,
    )
    kv_layers, heads = _kv_layers(reader, sliding), _layer_heads(reader, fields, sliding)
    if any(heads[layer] != heads[kv_layer] for layer, kv_layer in enumerate(kv_layers)):
        raise reader.fail("head_dim", "differs between layers that share keys and values")
    found = {
        **fields,
        "layer_heads": heads,
        "layer_ffn_sizes": _ffn_sizes(reader, fields["ffn_size"], kv_layers),
        "has_output_norms": True,
        "has_output_scale": True,
        "qk_norm": "head",
        "has_value_norm": True,
        "key_value_layers": _key_value_layers(reader, sliding),
        "kv_layers": kv_layers,
        "per_layer_size": _per_layer_size(reader),
        "attention_scale": 1.0,
        "logit_softcap": reader.number("final_logit_softcapping", 0.0, low=0.0, high=1e9),
        "embedding_scale": fields["hidden_size"] ** 0.5,
        "windows": windows(reader, sliding, 512),
        "layer_ropes": tuple(int(is_windowed) for is_windowed in sliding),
    }
    return _with_experts(reader, found) if reader.boolean("enable_moe_block", False) else found


def _with_experts(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of the 26B-A4B, whose layers have an FFN and experts side by side: two layers here."""
    for key in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        reader.refuse(key, lambda value: value == 0, "not supported beside experts")
    layers = num_layers(reader)
    router = read_router(
        reader,
        "num_experts",
        "softmax",
        norms_chosen=True,
        chosen_key="top_k_experts",
        reads="normed_residual",
        scales_input=True,
        scales_experts=True,
    )
    of_layers = {
        name: tuple(value for value in fields[name] for _ in range(2))
        for name in ("layer_heads", "windows", "layer_ropes")
    }
    return {
        **fields,
        **of_layers,
        "num_layers": 2 * layers,
        "has_ffn_pairs": True,
        "key_value_layers": tuple(2 * layer for layer in fields["key_value_layers"]),
        "experts": ExpertsConfig(
            router=router,
            size=expert_size(reader, "moe_intermediate_size"),
            dense_layers=tuple(range(0, 2 * layers, 2)),
        ),
    }


def _layer_heads(
    reader: ConfigReader, fields: Mapping[str, Any], sliding: tuple[bool, ...]
) -> tuple[HeadSizes, ...]:
    """Heads of each layer: of those without a window `per_layer_config` or the global keys say."""
    values = reader.values.get("per_layer_config")
    if values is None:
        own = {"head_dim": reader.integer("global_head_dim", 512, high=MAX_WIDTH)}
        key = "num_global_key_value_heads"
        if reader.boolean("attention_k_eq_v", False) and reader.has(key):
            own["num_key_value_heads"] = reader.integer(key, high=MAX_WIDTH)
        values = {str(layer): own for layer, has_window in enumerate(sliding) if not has_window}
    if not isinstance(values, dict) or not all(isinstance(one, dict) for one in values.values()):
        raise reader.fail("per_layer_config", f"is {shown(values, 60)}; give an object a layer")
    known = {"head_dim", "num_key_value_heads"}
    for layer, own in values.items():
        if layer not in map(str, range(len(sliding))) or own.keys() - known:
            what = f"has {shown(own, 60)} of layer {shown(layer)}"
            raise reader.fail("per_layer_config", f"{what}, which is not supported")
    keys = {"head_dim": fields["head_dim"], "num_key_value_heads": fields["num_kv_heads"]}
    heads = []
    for layer in range(len(sliding)):
        sizes = ConfigReader(
            keys | values.get(str(layer), {}), f"{reader.source}: per_layer_config"
        )
        heads.append(
            HeadSizes(
                num_heads=fields["num_heads"],
                num_kv_heads=grouped_kv_heads(sizes, "num_key_value_heads", fields["num_heads"]),
                head_dim=sizes.integer("head_dim", high=MAX_WIDTH),
            )
        )
    return tuple(heads)


def _key_value_layers(reader: ConfigReader, sliding: tuple[bool, ...]) -> tuple[int, ...]:
    if not reader.boolean("attention_k_eq_v", False):
        return ()
    return tuple(layer for layer, has_window in enumerate(sliding) if not has_window)


def _kv_layers(reader: ConfigReader, sliding: tuple[bool, ...]) -> tuple[int, ...]:
    """Of each layer the one whose keys and values it has: the last ones' is of an earlier one."""
    count = reader.integer("num_kv_shared_layers", 0, low=0, high=MAX_LAYERS)
    if not count:
        return ()
    first = len(sliding) - count
    own = list(range(max(first, 0)))
    last = {sliding[layer]: layer for layer in own}
    if any(has_window not in last for has_window in sliding[max(first, 0) :]):
        what = "layers with keys and values of each kind before those that share them"
        raise reader.fail(
            "num_kv_shared_layers", f"is {count}; give fewer, so that there are {what}"
        )
    return (*own, *(last[has_window] for has_window in sliding[first:]))


def _ffn_sizes(reader: ConfigReader, size: int, kv_layers: tuple[int, ...]) -> tuple[int, ...]:
    """With a double-wide MLP layers that share keys and values have twice as many neurons."""
    if not reader.boolean("use_double_wide_mlp", False):
        return ()
    return tuple(size * (1 + (layer != kv)) for layer, kv in enumerate(kv_layers))


def _per_layer_size(reader: ConfigReader) -> int:
    """Numbers of each layer's embedding of a token; 0: layers have none."""
    size = reader.integer("hidden_size_per_layer_input", 0, low=0, high=MAX_WIDTH)
    key, count = "vocab_size_per_layer_input", reader.values.get("vocab_size")
    if size and reader.has(key) and reader.values[key] != count:
        found = shown(reader.values[key])
        raise reader.fail(key, f"is {found} and vocab_size {shown(count)}: not supported")
    return size


def _names(config: ModelConfig) -> TensorNames:
    """q, k and v by layer: values may be keys, and some layers have neither."""
    q, k, _ = _NAMES.layer.qkv
    changes: dict[int, dict[str, Any]]
    changes = {layer: {"qkv": (q, k, k)} for layer in config.key_value_layers}
    shared = [layer for layer, kv in enumerate(config.kv_layers) if layer != kv]
    changes |= {layer: {"qkv": (q,), "k_norm": ""} for layer in shared}
    parts = (_FIRST, _SECOND) if config.has_ffn_pairs else ({},)
    return replace(_NAMES, layer_changes=changes, parts=parts)


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    """Heads, neurons and windows are lists, one number a layer. A file without v has k instead."""
    metadata.rows_of("rope_freqs.weight")  # tells which part of a head is rotated
    layers, heads = metadata.integer("block_count"), metadata.integer("attention.head_count")
    kinds = window_kinds(metadata, 6)
    sliding = [kind == "sliding_attention" for kind in kinds]
    kv_heads = metadata.integers("attention.head_count_kv", layers, heads)
    neurons = metadata.integers("feed_forward_length", layers)
    shared = metadata.integer("attention.shared_kv_layers", 0)
    local_dim = metadata.integer("attention.key_length_swa")
    for key in ("rope.dimension_count_swa", "attention.value_length_swa"):
        if (size := metadata.integer(key, local_dim)) != local_dim:
            raise metadata.fail(key, f"is {size}, not {local_dim}, which is not supported")
    is_double = neurons != neurons[:1] * layers
    if is_double and neurons != [
        neurons[0] * (1 + (layer >= layers - shared)) for layer in range(layers)
    ]:
        raise metadata.fail("feed_forward_length", "has numbers that are not supported")
    full = [layer for layer in range(layers) if not sliding[layer]]
    own = {"head_dim": head_dim(metadata)}
    return {
        "hidden_size": metadata.integer("embedding_length"),
        "intermediate_size": neurons[0] if neurons else 0,
        "num_attention_heads": heads,
        "num_key_value_heads": next((kv_heads[i] for i in range(layers) if sliding[i]), heads),
        "head_dim": local_dim,
        "per_layer_config": {
            str(layer): {**own, "num_key_value_heads": kv_heads[layer]} for layer in full
        },
        "layer_types": kinds,
        "sliding_window": metadata.integer("attention.sliding_window"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0),
        "attention_k_eq_v":
            bool(full) and not metadata.has_tensor(f"blk.{full[0]}.attn_v.weight"),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": is_double,
        "hidden_size_per_layer_input": metadata.integer("embedding_length_per_layer_input", 0),
        **(_gguf_experts(metadata) if metadata.integer("expert_count", 0) else {}),
    }  # fmt: skip


def _gguf_experts(metadata: Metadata) -> dict[str, Any]:
    return {
        "enable_moe_block": True,
        "num_experts": metadata.integer("expert_count"),
        "top_k_experts": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
    }


_GGUF_NAMES = {
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}
_GGUF = GgufArchitecture(
    ("gemma4",), _gguf_values, _GGUF_NAMES, rope_keys=("freq_base_swa", "dimension_count_swa")
)


_NAMES = replace(
    GEMMA_NAMES,
    per_layer_tokens="embed_tokens_per_layer",
    per_layer_context="per_layer_model_projection",
    per_layer_context_norm="per_layer_projection_norm",
).with_layer(
    output_scale="layer_scalar",
    per_layer_gate="per_layer_input_gate",
    per_layer_projection="per_layer_projection",
    per_layer_norm="post_per_layer_input_norm",
)
_FIRST: dict[str, Any] = {"ffn_output_norm": "post_feedforward_layernorm_1"}
_SECOND: dict[str, Any] = {
    "norm": "",
    "qkv": (),
    "out": "",
    "attention_norm": "",
    "q_norm": "",
    "k_norm": "",
    "ffn_norm": "pre_feedforward_layernorm_2",
    "ffn_output_norm": "post_feedforward_layernorm_2",
    "pair_norm": "post_feedforward_layernorm",
    "experts": (
        ExpertNames(
            router="router.proj.weight",
            gate="experts.gate_up_proj",
            up="experts.gate_up_proj",
            down="experts.down_proj",
            router_scale="router.scale",
            expert_scale="router.per_expert_scale",
        ),
        *GGUF_EXPERTS,
    ),
}
GEMMA4 = replace(
    GEMMA3,
    name="gemma4_text",
    architectures=(
        *("Gemma4ForCausalLM", "Gemma4TextModel"),
        *("Gemma4ForConditionalGeneration", "Gemma4Model"),
    ),
    read_fields=_read_fields,
    tensor_names=_names,
    reads=(
        *("sliding_window", "layer_types", "final_logit_softcapping", "per_layer_config"),
        *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"),
        *("num_kv_shared_layers", "use_double_wide_mlp", "enable_moe_block"),
        *("num_experts", "top_k_experts", "moe_intermediate_size"),
        *("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
    ),
    fixed={"use_bidirectional_attention": (False, "vision")},
    defaults={
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "vocab_size": 262_144,
        "hidden_size_per_layer_input": 256,
    },
    gguf=_GGUF,
)
# The 12B, whose images and sounds need no encoder.
GEMMA4_UNIFIED = replace(
    GEMMA4,
    name="gemma4_unified_text",
    architectures=(
        *("Gemma4UnifiedForCausalLM", "Gemma4UnifiedTextModel"),
        *("Gemma4UnifiedForConditionalGeneration", "Gemma4UnifiedModel"),
    ),
    defaults={**GEMMA4.defaults, "hidden_size_per_layer_input": 0, "sliding_window": 1024},
)
