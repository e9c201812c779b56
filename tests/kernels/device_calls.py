"""A device's kernels as functions of NumPy arrays: names and arguments of numba_kernels' wrappers.

Arguments are checked as there and copied to the device; results are copied back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.cuda_kernels.kernels import LAYER_NORM, MAX_TOKENS, RMS_NORM
from hotcold.cuda_kernels.matrix import DeviceMatrix
from hotcold.cuda_kernels.sizes import FfnLayout
from hotcold.numba_kernels.checks import float_array, optional_floats, require, row_ids, weight_rows
from hotcold.numba_kernels.decode.activations import (
    ALL_FIRE,
    Activation,
    Thresholds,
    activation,
    not_zero,
)
from hotcold.numba_kernels.formats import is_quantized, row_width
from tests.kernels.quantized_rows import KINDS

_FORMATS = {"float32": "f32", "uint16": "f16", "int16": "bf16"}


@dataclass(frozen=True)
class DeviceCalls:
    """The wrappers over one device: its kernels, and copies to it and back."""

    kernels: Any  # DeviceKernels whose hot_ffn takes `token_masks` too
    to_device: Callable[[np.ndarray], Any]
    to_host: Callable[[Any], np.ndarray]

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
        x = float_array("x", x, (x.size,))
        return self._norm(RMS_NORM, x, float_array("weight", weight, x.shape), None, epsilon)

    def layer_norm(
        self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, epsilon: float
    ) -> np.ndarray:
        x = float_array("x", x, (x.size,))
        return self._norm(LAYER_NORM, x, float_array("weight", weight, x.shape), bias, epsilon)

    def _norm(
        self, kind: int, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, epsilon: float
    ) -> np.ndarray:
        shift = self.to_device(optional_floats("bias", bias, x.size))
        out = self.to_device(x[None])  # and in place
        self.kernels.norm(kind, out, self.to_device(weight), shift, epsilon, out)
        return self.to_host(out)[0]

    def rope(self, heads: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
        """As queries of a token that has one key and one value besides, at position 1."""
        require(heads.ndim == 2, "heads must have 2 dimensions")
        require(heads.shape[1] % 2 == 0, "head_dim must be even")
        heads = float_array("heads", heads, heads.shape)
        half = cos_sin.shape[-1] if cos_sin.ndim else 0
        require(2 * half <= heads.shape[1], "more pairs than a head has")
        cos_sin = float_array("cos_sin", cos_sin, (2, half))
        table = np.stack([np.full_like(cos_sin, np.nan), cos_sin])
        qkv = self.to_device(np.concatenate([heads, heads[:2]]).reshape(1, -1))
        cache = np.zeros((2, 1, 1, 64, heads.shape[1]), np.float32)
        place, first = np.ones(1, np.int32), np.zeros(1, np.int32)
        self.kernels.rope_store(
            qkv, len(heads), 1, *map(self.to_device, (table, place, first, first[None], *cache))
        )
        return self.to_host(qkv).reshape(-1, heads.shape[1])[: len(heads)]

    def gemv(
        self, weights: np.ndarray, x: np.ndarray, bias: np.ndarray | None = None
    ) -> np.ndarray:
        weights = weight_rows("weights", weights)
        width = row_width(weights.dtype, weights.shape[1])
        x = float_array("x", x, (x.shape[0] if x.ndim else 0, width))
        shift = self.to_device(optional_floats("bias", bias, weights.shape[0]))
        out = np.empty((x.shape[0], weights.shape[0]), np.float32)
        matrix = self._matrix(weights)
        for t in range(0, len(x), MAX_TOKENS):
            part = self.to_device(out[t : t + MAX_TOKENS])
            self.kernels.gemv(matrix, shift, self.to_device(x[t : t + MAX_TOKENS]), part)
            out[t : t + MAX_TOKENS] = self.to_host(part)
        return out

    def sparse_ffn(
        self,
        gate: np.ndarray,
        up: np.ndarray | None,
        down: np.ndarray,
        x: np.ndarray,
        ids: np.ndarray | None = None,
        token_masks: np.ndarray | None = None,
        *,
        gate_bias: np.ndarray | None = None,
        up_bias: np.ndarray | None = None,
        activation_fn: str = "relu",
        threshold: float = 0.0,
        skip_silent: bool = True,
        thresholds: Thresholds | None = None,
        down_norms: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        if thresholds is None:
            thresholds = not_zero(activation_fn) if skip_silent else ALL_FIRE
        gate = weight_rows("gate", gate)
        num_neurons, width = gate.shape[0], row_width(gate.dtype, gate.shape[1])
        up = None if up is None else weight_rows("up", up, width)
        down = weight_rows("down", down, width)
        require(up is None or len(up) == num_neurons, f"up must have {num_neurons} rows")
        require(len(down) == num_neurons, f"down must have {num_neurons} rows")
        require(up is None or gate.dtype == up.dtype, "gate and up must have one dtype")
        x = float_array("x", x, (x.shape[0] if x.ndim else 0, width))
        require(len(x) <= MAX_TOKENS, f"x has {len(x)} rows, more tokens than {MAX_TOKENS}")
        biases = [
            optional_floats("gate_bias", gate_bias, num_neurons),
            optional_floats("up_bias", up_bias, 0 if up is None else num_neurons),
            optional_floats("down_norms", down_norms, num_neurons),
        ]
        function = activation(activation_fn, threshold)
        own = np.arange(num_neurons, dtype=np.int32)
        if ids is not None:
            own = row_ids("ids", ids, num_neurons)
        if token_masks is not None:
            require(token_masks.dtype == np.uint32, "token_masks must be uint32")
            require(ids is not None and token_masks.shape == own.shape, "token_masks go with ids")
        if not len(x) or not own.size:
            return np.zeros((len(x), width), np.float32), own[:0]
        masks = None
        if ids is not None:  # a device computes all neurons, those not listed for no token
            masks = np.zeros(num_neurons, np.uint32)
            masks[own] = 0xFFFFFFFF if token_masks is None else token_masks
        out, is_fired = self._ffn((gate, up, down), biases, x, masks, function, thresholds)
        return out, own if thresholds == ALL_FIRE else own[is_fired[own]]

    def _ffn(
        self,
        matrices: tuple[np.ndarray, np.ndarray | None, np.ndarray],
        biases: list[np.ndarray],
        x: np.ndarray,
        masks: np.ndarray | None,
        function: Activation,
        thresholds: Thresholds,
    ) -> tuple[np.ndarray, np.ndarray]:
        gate, up, down = (m if m is None else self._matrix(m) for m in matrices)
        layout = FfnLayout(len(x), len(matrices[0]), x.shape[1])
        items = self.kernels.ffn_scratch_items(len(x), len(matrices[0]), x.shape[1])
        scratch = self.to_device(np.full(items, np.nan, np.float32))
        out, count = self.to_device(np.full_like(x, np.nan)), self.to_device(np.zeros(2, np.int32))
        self.kernels.hot_ffn(
            gate, self.to_device(biases[0]), up, self.to_device(biases[1]), down, None,
            self.to_device(x), function, thresholds, self.to_device(biases[2]), scratch, out, count,
            None if masks is None else self.to_device(masks),
        )  # fmt: skip
        first = layout.offsets[1]
        flags = self.to_host(scratch)[first : first + layout.num_neurons].view(np.int32)
        found = [np.count_nonzero(flags & bit) for bit in (1, 2)]
        require(self.to_host(count).tolist() == found, "num_fired differs from the flags")
        return self.to_host(out), flags & 1 != 0

    def decode_attention(
        self,
        queries: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        length: int,
        pages: np.ndarray | None = None,
        *,
        window: int = 0,
        softcap: float = 0.0,
        scale: float | None = None,
    ) -> np.ndarray:
        require(keys.dtype in (np.float32, np.uint16), "the cache must be float32 or uint16")
        require(keys.shape == values.shape, "keys and values must have one shape")
        require(keys.dtype == values.dtype, "keys and values must have one dtype")
        if pages is None:
            require(keys.ndim == 3, "without pages keys must be (G, P, hd)")
            keys, values, pages = keys[None], values[None], np.zeros(1, np.int32)
        require(keys.ndim == 4, "with pages keys must be (M, G, P, hd)")
        require(pages.dtype == np.int32 and pages.ndim == 1, "pages must be a list of int32")
        require(keys.shape[2] % 4 == 0 or len(keys) == 1, "pages of whole fours")
        require(all(0 <= page < len(keys) for page in pages), "pages must be those of the cache")
        require(queries.ndim == 2 and queries.shape[1] == keys.shape[3], "queries must be (H, hd)")
        num_groups, head_dim = keys.shape[1], keys.shape[3]
        require(num_groups > 0 and len(queries) % num_groups == 0, "heads must be whole groups")
        require(0 < length <= pages.size * keys.shape[2], "length must lie in the pages")
        queries = float_array("queries", queries, queries.shape)
        others = np.zeros((2 * num_groups, head_dim), np.float32)
        qkv = np.concatenate([queries, others]).reshape(1, -1)
        items = self.kernels.attention_scratch_items(1, len(queries), head_dim, length)
        out = self.to_device(np.empty((1, queries.size), np.float32))
        one = np.zeros(1, np.int32)
        arrays = (np.ascontiguousarray(keys), np.ascontiguousarray(values), one + length - 1, one)
        self.kernels.decode_attention(
            self.to_device(qkv), len(queries), num_groups,
            *map(self.to_device, (*arrays, pages[None])),
            head_dim**-0.5 if scale is None else scale, length,
            self.to_device(np.full(items, np.nan, np.float32)), out, window, softcap,
        )  # fmt: skip
        return self.to_host(out).reshape(queries.shape)

    def _matrix(self, rows: np.ndarray) -> DeviceMatrix:
        return device_matrix(rows, self.to_device)


def device_matrix(rows: np.ndarray, to_device: Callable[[np.ndarray], Any]) -> DeviceMatrix:
    """Rows of a format of numba_kernels, copied to a device."""
    width = row_width(rows.dtype, rows.shape[1])
    if not is_quantized(rows.dtype):
        name = _FORMATS[str(rows.dtype)]
        return DeviceMatrix(to_device(np.ascontiguousarray(rows)), name, width)
    name = {dtype: kind for kind, dtype in KINDS.items()}[rows.dtype]
    data = to_device(np.ascontiguousarray(rows).view(np.uint8))
    return DeviceMatrix(data, name, width)
