"""A rope's angles per position, kept on disk.

torch computes them, as it does for transformers, and rounds as no other library does: a start that
finds them here does without importing it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import llvmlite.binding
import numpy as np

from hotcold.model.config.model_config import RopeConfig
from hotcold.model.files.whole_file import write_whole
from hotcold.numba_kernels.own_cache import own_folder


def inv_freq(rope: RopeConfig, head_dim: int, is_long: bool = False) -> np.ndarray:
    """See `RopeConfig.inv_freq`, which is asked where this machine has not kept its answer."""
    try:
        path = cache_path(rope, head_dim, is_long)
    except OSError:
        return rope.inv_freq(head_dim, is_long)
    found = _read(path, rope.rotary_dim(head_dim) // 2)
    if found is None:
        found = rope.inv_freq(head_dim, is_long)
        bits = found.astype("<f4").tobytes()
        with contextlib.suppress(OSError):
            write_whole(path, hashlib.sha256(bits).digest() + bits)
    return found


def cache_path(rope: RopeConfig, head_dim: int, is_long: bool = False) -> Path:
    """The file, below XDG_CACHE_HOME or ~/.cache: of this rope, this torch and this processor.

    Errors:  OSError where there is no folder of this user's alone
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


def _read(path: Path, size: int) -> np.ndarray | None:
    """What was kept; None where nothing was, or it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, bits = content[:32], content[32:]
    if len(bits) != 4 * size or hashlib.sha256(bits).digest() != digest:
        return None
    return np.frombuffer(bits, "<f4").astype(np.float32)
