"""What attention computes on: weights, KV cache, rope tables; a rope's frequencies, cached on disk.

torch computes the frequencies, because transformers does, and no other library rounds alike. A
start that finds them in the cache need not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np

from hotcold.actors.protocol.messages import CacheSpec
from hotcold.model.config.model_config import ModelConfig, RopeConfig
from hotcold.model.files.atomic_write import write_atomic
from hotcold.model.weights.attention import AttentionWeights
from hotcold.model.weights.embedding import HeadWeights
from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS, rope_table
from hotcold.numba_kernels.decode.norm import norm_kind
from hotcold.numba_kernels.own_cache import own_folder
from hotcold.numba_kernels.serve.serve_attention import AttentionArrays, AttentionShape


def attention_shape(config: ModelConfig) -> AttentionShape:
    """The numbers of `config` that the compiled loops need."""
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_kind=norm_kind(config.norm_kind),
        norm_epsilon=np.float32(config.norm_eps),
        order=config.layer_order,
        scale=np.float32(config.score_scale),
        softcap=np.float32(config.attention_softcap),
        residual_scale=np.float32(config.residual_scale),
        logit_softcap=np.float32(config.logit_softcap),
    )


def cache_array(config: ModelConfig, cache: CacheSpec, num_layers: int) -> np.ndarray:
    """Zero pages for keys or values of so many layers; memory is used as they are written."""
    shape = num_layers, cache.num_pages, config.num_kv_heads, PAGE_POSITIONS, config.head_dim
    dtype = np.float32 if cache.dtype == "float32" else np.uint16
    return aligned_empty(shape, dtype, huge_pages=False)


def position_arrays(config: ModelConfig, cache: CacheSpec) -> dict[str, Any]:
    """The fields of `AttentionArrays` about positions.

    rope_tables (R, P, 2, half) float32 cosines and sines; layer_ropes, windows (L,) int32
    """
    tables = [_rope_array(rope, config.head_dim, cache.num_positions) for rope in config.ropes]
    layers = range(config.num_layers)
    return {
        "rope_tables": np.stack(tables) if tables else np.empty((0, 0, 2, 0), np.float32),
        "layer_ropes": np.array([config.rope_of_layer(layer) for layer in layers], np.int32),
        "windows": np.array([config.window_of_layer(layer) for layer in layers], np.int32),
    }


def attention_arrays(
    config: ModelConfig, cache: CacheSpec, attention: AttentionWeights, head: HeadWeights
) -> AttentionArrays:
    """Weights of all layers, an empty KV cache, rope tables and windows."""
    return AttentionArrays(
        **vars(attention),
        **vars(head),
        keys=cache_array(config, cache, config.num_layers),
        values=cache_array(config, cache, config.num_layers),
        **position_arrays(config, cache),
    )


def _rope_array(rope: RopeConfig, head_dim: int, num_positions: int) -> np.ndarray:
    """(P, 2, half). Of longrope's two lists of factors, uses the one for the longest sequence."""
    table = rope_table(inv_freq(rope, head_dim, rope.is_long(num_positions)), num_positions)
    return table if rope.table_scale == 1 else table * np.float32(rope.table_scale)


def inv_freq(rope: RopeConfig, head_dim: int, is_long: bool = False) -> np.ndarray:
    """`RopeConfig.inv_freq`, cached on disk."""
    try:
        path = rope_cache_path(rope, head_dim, is_long)
    except OSError:
        return rope.inv_freq(head_dim, is_long)
    found = _read_cached(path, rope.rotary_dim(head_dim) // 2)
    if found is None:
        found = rope.inv_freq(head_dim, is_long)
        bits = found.astype("<f4").tobytes()
        with contextlib.suppress(OSError):
            write_atomic(path, hashlib.sha256(bits).digest() + bits)
    return found


def rope_cache_path(rope: RopeConfig, head_dim: int, is_long: bool = False) -> Path:
    """The file for this rope, torch and processor, below XDG_CACHE_HOME or ~/.cache.

    Errors:  OSError where there is no folder private to this user
    """
    key = {
        "rope": asdict(rope),
        "head_dim": head_dim,
        "is_long": is_long,
        "torch": metadata.version("torch"),
        "cpu": llvmlite.binding.get_host_cpu_name(),
        "instructions": os.environ.get("ATEN_CPU_CAPABILITY", ""),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return own_folder("rope") / digest


def _read_cached(path: Path, size: int) -> np.ndarray | None:
    """(size,) float32; None where the file is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, bits = content[:32], content[32:]
    if len(bits) != 4 * size or hashlib.sha256(bits).digest() != digest:
        return None
    return np.frombuffer(bits, "<f4").astype(np.float32)
