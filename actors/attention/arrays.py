"""What attention computes on: numbers, weights, KV cache, rope tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hotcold.actors.protocol.messages import CacheSpec
from hotcold.model.config.layer_spec import AttentionSpec, FfnSpec, LatentSpec, RouterSpec
from hotcold.model.config.model_config import ModelConfig, RopeConfig
from hotcold.model.weights.attention import AttentionWeights
from hotcold.model.weights.embedding import HeadWeights
from hotcold.model.weights.memory import aligned_empty
from hotcold.model.weights.rope_frequencies import inv_freq
from hotcold.model.weights.sizes import kv_row_bytes, rope_table_shape
from hotcold.numba_kernels.decode.attention import rope_table
from hotcold.numba_kernels.decode.norm import norm_kind
from hotcold.numba_kernels.layer_pages import LayerPages, page_spans
from hotcold.numba_kernels.layer_record import (
    LAYER_NUMBERS,
    SIGMOID,
    SOFTMAX,
    SOFTMAX_OF_CHOSEN,
)
from hotcold.numba_kernels.loops.attention_loop import AttentionArrays
from hotcold.numba_kernels.loops.mailbox import RECURRENT
from hotcold.numba_kernels.recurrent_arrays import KINDS, RECURRENT_NUMBERS, page_items

Frequencies = Callable[[RopeConfig, int, int], np.ndarray]
_SCORES = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "softmax_of_chosen": SOFTMAX_OF_CHOSEN}
_NO_ROUTER = RouterSpec(num_experts=0, num_chosen=0, score="softmax", norms_chosen=False)
_NORM_SIZES = "q_norm_size", "k_norm_size", "v_norm_size"
_CACHE_DTYPES = {"float32": np.float32, "float16": np.uint16, "q8": np.int8}


def layer_numbers(config: ModelConfig) -> np.ndarray:
    """The numbers of each layer that kernels need: (L,) of LAYER_NUMBERS."""
    found = np.empty(config.num_layers, LAYER_NUMBERS)
    for record, layer in zip(found, config.layers, strict=True):
        facts = {**vars(layer), **vars(layer.attention), **layer.order._asdict()}
        facts |= {"rotated_pairs": _rotated_pairs(config, layer.attention)}
        facts |= _latent_numbers(layer.attention.latent)
        heads_are_normed = layer.attention.latent is None
        facts |= {
            name: layer.vectors[f"{name[:6]}_weight"] * heads_are_normed for name in _NORM_SIZES
        }
        facts |= {"page_group": layer.page_group, "heads_size": layer.heads_size}
        facts |= {"norm_kind": norm_kind(layer.norm_kind), "adds_late": layer.adds_late}
        facts |= router_numbers(layer.ffn)
        for name in LAYER_NUMBERS.names or ():
            record[name] = facts[name]
    return found


def _rotated_pairs(config: ModelConfig, own: AttentionSpec) -> int:
    return 0 if own.rope < 0 else config.ropes[own.rope].rotary_dim(own.rotated_head_dim) // 2


def _latent_numbers(latent: LatentSpec | None) -> dict[str, int]:
    return {
        "latent_size": 0 if latent is None else latent.rank,
        "query_rank": 0 if latent is None else latent.query_rank,
        "plain_size": 0 if latent is None else latent.plain_size,
        "value_size": 0 if latent is None else latent.value_size,
    }


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


def cache_pages(
    config: ModelConfig, cache: CacheSpec, num_layers: int, of_values: bool = False
) -> LayerPages:
    """Zero pages for keys or values of so many layers; memory is used as they are written.

    Layers of latent attention have no values: their keys are. A layer without keys of its own has
    the pages of the layer whose keys it has.
    """
    dtype, layers = np.dtype(_CACHE_DTYPES[cache.dtype]), config.layers[:num_layers]
    shapes = [
        (own.num_kv_heads, kv_row_bytes(own.head_dim, cache.dtype) // dtype.itemsize)
        for own in (layer.attention for layer in layers)
    ]
    counts = [
        0
        if (of_values and layer.attention.latent) or not layer.attention.has_keys
        else cache.pages_of(layer.page_group)
        for layer in layers
    ]
    spans, sizes = page_spans(counts, shapes)
    items = aligned_empty((int(spans[-1:, 1].sum()),), dtype, huge_pages=False)
    return LayerPages(items, spans[[layer.attention.kv_layer for layer in layers]], sizes)


def recurrent_numbers(config: ModelConfig) -> np.ndarray:
    """What kernels know of each layer's recurrence: (L,) of RECURRENT_NUMBERS, 0 of others."""
    found = np.zeros(config.num_layers, RECURRENT_NUMBERS)
    for place, layer in enumerate(config.recurrent_layers):
        facts = vars(config.recurrent) | {"place": place}
        facts["kind"] = KINDS[facts["kind"]]
        for name in RECURRENT_NUMBERS.names or ():
            found[layer][name] = facts[name]
    return found


def recurrent_pages(config: ModelConfig, cache: CacheSpec, num_layers: int) -> np.ndarray:
    """Zero pages (layers, pages, numbers) for the states of recurrent layers."""
    spec = config.recurrent
    count = sum(layer < num_layers for layer in config.recurrent_layers)
    items = 0 if spec is None else page_items(spec)
    shape = (count, cache.pages_of(RECURRENT), items)
    return aligned_empty(shape, np.dtype(np.float32), huge_pages=False)


def rope_tables(config: ModelConfig, cache: CacheSpec) -> list[np.ndarray]:
    """(P, 2, pairs) float32 cosines and sines of each of the model's ropes."""
    return [
        _rope_array(rope, cache.num_positions, inv_freq(rope, size, cache.num_positions))
        for rope, size in _ropes(config)
    ]


def _ropes(config: ModelConfig) -> list[tuple[RopeConfig, int]]:
    """The model's ropes, and the sizes of heads that they rotate."""
    return [(rope, config.rotated_head_dim(index)) for index, rope in enumerate(config.ropes)]


def _joined_tables(config: ModelConfig, cache: CacheSpec, frequencies: Frequencies) -> np.ndarray:
    """(R, P, 2 W + 1): `rope_tables` of the W pairs that turn in any rope, others by no angle.

    The last number is what the rest of a vector, which is not rotated, is multiplied with.
    """
    length = cache.num_positions
    found = np.zeros(rope_table_shape(config, length), np.float32)
    width = found.shape[2] // 2
    for target, (rope, size) in zip(found, _ropes(config), strict=True):
        count = rope.turning_pairs(size)
        table = _rope_array(rope, length, frequencies(rope, size, length)[:count])
        target[:, :count], target[:, count:width] = table[:, 0], 1
        target[:, width : width + count], target[:, -1] = table[:, 1], rope.growths(length)
    return found


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
    num_layers = len(attention.out.places)
    return AttentionArrays(
        **vars(attention),
        **vars(head),
        numbers=layer_numbers(config),
        keys=cache_pages(config, cache, num_layers),
        values=cache_pages(config, cache, num_layers, of_values=True),
        recurrent_numbers=recurrent_numbers(config),
        recurrent_pages=recurrent_pages(config, cache, num_layers),
        rope_tables=_joined_tables(config, cache, frequencies),
        logit_softcap=np.float32(config.logit_softcap),
    )


def _rope_array(rope: RopeConfig, num_positions: int, frequencies: np.ndarray) -> np.ndarray:
    """(P, 2, pairs). Where frequencies depend on a sequence's length, those of the longest one."""
    table = rope_table(frequencies, num_positions)
    return table * rope.scales(num_positions)[:, None, None]
