"""SmallThinker: ReGLU experts, and a router that reads a layer's input before attention."""

from __future__ import annotations

from typing import Any

from hotcold.model.config.families.experts import (
    expert_size,
    named_experts,
    read_router,
)
from hotcold.model.config.families.family import (
    MAX_WIDTH,
    Family,
    GgufArchitecture,
    max_positions,
    num_layers,
    of_layers,
    windows,
)
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import GGUF_EXPERTS, LLAMA_NAMES
from hotcold.model.config.gguf_metadata import (
    SOFTMAX,
    Metadata,
    expert_length,
    gated_values,
    window,
)
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.model_config import ExpertsConfig
from hotcold.model.config.rope import read_rope

# Kinds of experts that no published model has, and the values without effect.
_FIXED: dict[str, tuple[Any, ...]] = {
    "moe_enable_secondary_experts": (False,),
    "moe_num_secondary_experts": (0,),
    "moe_shared_primary_experts": (0,),
    "moe_enable_early_router": (True,),
    "norm_topk_prob": (True,),
}


def _layout(reader: ConfigReader, key: str, default: int) -> tuple[bool, ...]:
    """Return for each layer whether the list `key` has 1. Errors: ConfigError."""
    if not reader.has(key):
        return (default == 1,) * num_layers(reader)
    return tuple(value == 1 for value in of_layers(reader, key, 0, 1))


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    if not all(_layout(reader, "moe_layer_layout", 1)):
        raise reader.fail("moe_layer_layout", "has layers without experts: not supported")
    size = expert_size(reader, "moe_ffn_hidden_size")
    dense = ConfigReader({**reader.values, "intermediate_size": size}, reader.source)
    rope = read_rope(reader, max_positions(reader), theta=1e6)
    fields = llama_fields(dense, activation_default="relu", ropes=(rope,))
    is_softmax = reader.boolean("moe_primary_router_apply_softmax", False)
    router = read_router(
        reader,
        "moe_num_primary_experts",
        "softmax_of_chosen" if is_softmax else "sigmoid",
        not is_softmax,
        "moe_num_active_primary_experts",
        reads="layer_input",
    )
    rotated = _layout(reader, "rope_layout", 1)
    return {
        **fields,
        "layer_ropes": () if all(rotated) else tuple(0 if has else -1 for has in rotated),
        "windows": windows(_with_window(reader), _layout(reader, "sliding_window_layout", 0)),
        "experts": ExpertsConfig(router=router, size=size),
    }


def _with_window(reader: ConfigReader) -> ConfigReader:
    size = reader.integer("sliding_window_size", 4096, high=MAX_WIDTH << 6)
    return ConfigReader({**reader.values, "sliding_window": size}, reader.source)


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    """With a window all layers but each fourth have it, and only they have rope."""
    layers, size = range(metadata.integer("block_count")), window(metadata)
    period = metadata.integer("attention.sliding_window_pattern", 4) or 1
    layouts = {
        "sliding_window_layout": [int(layer % period != 0) for layer in layers],
        "rope_layout": [int(layer % 4 != 0) for layer in layers],
        "sliding_window_size": size,
    }
    scores = metadata.integer("expert_gating_func", SOFTMAX)
    return {
        **gated_values(metadata),
        **(layouts if size else {}),
        **dict.fromkeys(("hidden_act", "num_local_experts", "num_experts_per_tok")),
        "moe_num_primary_experts": metadata.integer("expert_count"),
        "moe_num_active_primary_experts": metadata.integer("expert_used_count"),
        "moe_ffn_hidden_size": expert_length(metadata),
        "moe_primary_router_apply_softmax": scores == SOFTMAX,
    }


SMALLTHINKER = Family(
    name="smallthinker",
    architectures=("SmallThinkerForCausalLM", "SmallThinkerModel"),
    bos_id=151643,
    eos_id=151645,
    tied_embeddings=True,
    read_fields=_read_fields,
    tensor_names=LLAMA_NAMES.with_layer(
        experts=(
            named_experts(
                "block_sparse_moe",
                "gate",
                "up",
                "down",
                router="block_sparse_moe.primary_router.weight",
            ),
            *GGUF_EXPERTS,
        )
    ),
    reads=(
        *("moe_num_primary_experts", "moe_num_active_primary_experts", "moe_ffn_hidden_size"),
        *("moe_primary_router_apply_softmax", "sliding_window_layout", "sliding_window_size"),
        *("rope_layout", "moe_layer_layout", *_FIXED),
    ),
    fixed={**_FIXED, "hidden_act": ("relu",)},
    gguf=GgufArchitecture(("smallthinker",), _gguf_values),
)
