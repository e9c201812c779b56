"""Frequencies of ropes.

torch computes them, because transformers does, and no other library rounds alike. They are cached
on disk: a start that finds them there need not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import numpy as np

from hotcold.model.config.model_config import RopeConfig
from hotcold.numba_kernels.own_cache import host_cpu, own_folder, read_checked, write_checked


def inv_freq(rope: RopeConfig, head_dim: int, num_positions: int = 0) -> np.ndarray:
    """`RopeConfig.inv_freq`, cached on disk."""
    try:
        path = rope_cache_path(rope, head_dim, num_positions)
    except OSError:
        return rope.inv_freq(head_dim, num_positions)
    found = _read_cached(path, rope.rotary_dim(head_dim) // 2)
    if found is None:
        found = rope.inv_freq(head_dim, num_positions)
        with contextlib.suppress(OSError):
            write_checked(path, found.astype("<f4").tobytes())
    return found


def rope_cache_path(rope: RopeConfig, head_dim: int, num_positions: int = 0) -> Path:
    """The file for this rope, length, torch and processor, below XDG_CACHE_HOME or ~/.cache.

    Errors:  OSError where there is no folder private to this user
    """
    key = {
        "rope": asdict(rope),
        "head_dim": head_dim,
        "length": rope.length_that_counts(num_positions),
        "torch": metadata.version("torch"),
        "cpu": host_cpu(),
        "instructions": os.environ.get("ATEN_CPU_CAPABILITY", ""),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return own_folder("rope") / digest


def _read_cached(path: Path, size: int) -> np.ndarray | None:
    """(size,) float32; None where the file is missing or damaged."""
    try:
        bits = read_checked(path)
    except (OSError, ValueError):
        return None
    return np.frombuffer(bits, "<f4").astype(np.float32) if len(bits) == 4 * size else None
