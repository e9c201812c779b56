"""What attention computes on: numbers, weights, KV cache, rope tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hotcold.actors.protocol.messages import CacheSpec
from hotcold.model.config.layer_spec import FfnSpec, RouterSpec
from hotcold.model.config.model_config import ModelConfig, RopeConfig
from hotcold.model.weights.attention import AttentionWeights
from hotcold.model.weights.embedding import HeadWeights
from hotcold.model.weights.memory import aligned_empty
from hotcold.model.weights.rope_frequencies import inv_freq
from hotcold.model.weights.sizes import kv_row_bytes
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS, rope_table
from hotcold.numba_kernels.decode.norm import norm_kind
from hotcold.numba_kernels.layer_record import (
    LAYER_NUMBERS,
    SIGMOID,
    SOFTMAX,
    SOFTMAX_OF_CHOSEN,
)
from hotcold.numba_kernels.loops.attention_loop import AttentionArrays

Frequencies = Callable[[RopeConfig, int, int], np.ndarray]
_SCORES = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "softmax_of_chosen": SOFTMAX_OF_CHOSEN}
_NO_ROUTER = RouterSpec(num_experts=0, num_chosen=0, score="softmax", norms_chosen=False)
_CACHE_DTYPES = {"float32": np.float32, "float16": np.uint16, "q8": np.int8}


def layer_numbers(config: ModelConfig) -> np.ndarray:
    """The numbers of each layer that kernels need: (L,) of LAYER_NUMBERS."""
    found = np.empty(config.num_layers, LAYER_NUMBERS)
    for record, layer in zip(found, config.layers, strict=True):
        facts = {**vars(layer), **vars(layer.attention), **layer.order._asdict()}
        facts |= {"norm_kind": norm_kind(layer.norm_kind), "adds_late": layer.adds_late}
        facts |= router_numbers(layer.ffn)
        for name in LAYER_NUMBERS.names or ():
            record[name] = facts[name]
    return found


def router_numbers(ffn: FfnSpec) -> dict[str, float]:
    """The part of LAYER_NUMBERS that a router reads, by name."""
    router = ffn.router or _NO_ROUTER
    return {
        "num_experts": router.num_experts,
        "num_blocks": len(ffn.block_sizes),
        "num_chosen": router.num_chosen,
        "num_groups": router.num_groups,
        "num_chosen_groups": router.num_chosen_groups,
        "router_score": _SCORES[router.score],
        "router_scale": router.scale,
        "norms_chosen": router.norms_chosen,
        "routes_layer_input": router.reads == "layer_input",
    }


def cache_array(config: ModelConfig, cache: CacheSpec, num_layers: int) -> np.ndarray:
    """Zero pages for keys or values of so many layers; memory is used as they are written."""
    dtype = np.dtype(_CACHE_DTYPES[cache.dtype])
    row = kv_row_bytes(config.head_dim, cache.dtype) // dtype.itemsize
    shape = num_layers, cache.num_pages, config.num_kv_heads, PAGE_POSITIONS, row
    return aligned_empty(shape, dtype, huge_pages=False)


def rope_tables(
    config: ModelConfig, cache: CacheSpec, frequencies: Frequencies = inv_freq
) -> np.ndarray:
    """(R, P, 2, half) float32 cosines and sines of the model's ropes."""
    tables = [
        _rope_array(rope, config.head_dim, cache.num_positions, frequencies)
        for rope in config.ropes
    ]
    return np.stack(tables) if tables else np.empty((0, 0, 2, 0), np.float32)


def attention_arrays(
    config: ModelConfig,
    cache: CacheSpec,
    attention: AttentionWeights,
    head: HeadWeights,
    frequencies: Frequencies = inv_freq,
) -> AttentionArrays:
    """Weights of all layers, or of the first ones; an empty KV cache of those; rope tables.

    `frequencies`: of the ropes, as `inv_freq`
    """
    num_layers = len(attention.out)
    return AttentionArrays(
        **vars(attention),
        **vars(head),
        numbers=layer_numbers(config),
        keys=cache_array(config, cache, num_layers),
        values=cache_array(config, cache, num_layers),
        rope_tables=rope_tables(config, cache, frequencies),
        logit_softcap=np.float32(config.logit_softcap),
    )


def _rope_array(
    rope: RopeConfig, head_dim: int, num_positions: int, frequencies: Frequencies
) -> np.ndarray:
    """(P, 2, half). Where frequencies depend on a sequence's length, those of the longest one."""
    table = rope_table(frequencies(rope, head_dim, num_positions), num_positions)
    return table if rope.table_scale == 1 else table * np.float32(rope.table_scale)
