"""Records of LAYER_NUMBERS for tests of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hotcold.cuda_kernels.kernels import Layer
from hotcold.numba_kernels.layer_record import LAYER_NUMBERS, LayerVectors

_NO_ROPE = np.empty((0, 2, 0), np.float32)


def layer_numbers(**facts: Any) -> Any:
    """A record with `facts`; the rest is 0 or False, but residual_scale is 1."""
    record = np.zeros(1, LAYER_NUMBERS)[0]
    for name, value in ({"residual_scale": 1} | facts).items():
        record[name] = value
    return record


def device_layer(
    put: Callable[[np.ndarray], Any],
    rope_table: np.ndarray = _NO_ROPE,
    vectors: dict[str, np.ndarray] | None = None,
    query_table: np.ndarray | None = None,
    **facts: Any,
) -> Layer:
    """A layer of a device, with `layer_numbers(**facts)` and no vectors but those given."""
    every = dict.fromkeys(LayerVectors._fields, np.empty(0, np.float32)) | (vectors or {})
    found = LayerVectors(**{name: put(vector) for name, vector in every.items()})
    own = None if query_table is None else put(query_table)
    return Layer.of(layer_numbers(**facts), found, put(rope_table), own)
