"""A device's kernels as functions of NumPy arrays, with the names and arguments of `reference`.

Arguments are copied to the device, results back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.cuda_kernels.kernels import MAX_TOKENS, PagedCache
from hotcold.cuda_kernels.matrix import DeviceMatrix, padded_items
from hotcold.cuda_kernels.neurons import DeviceNeurons, LayerResidual
from hotcold.cuda_kernels.sizes import FfnLayout
from hotcold.numba_kernels.checks import float_array, require, weight_rows
from hotcold.numba_kernels.decode.activations import (
    Activation,
    Thresholds,
)
from hotcold.numba_kernels.decode.selection import Selection
from hotcold.numba_kernels.decode.vectors import NO_BIAS
from hotcold.numba_kernels.formats import FORMATS, is_quantized, row_width
from tests.kernels.layer_numbers import device_layer


@dataclass(frozen=True)
class DeviceCalls:
    """One device's kernels, and copies to it and back."""

    kernels: Any  # CudaKernels
    to_device: Callable[[np.ndarray], Any]
    to_host: Callable[[Any], np.ndarray]

    def gemv(
        self, weights: np.ndarray, x: np.ndarray, bias: np.ndarray | None = None
    ) -> np.ndarray:
        weights = weight_rows("weights", weights)
        width = row_width(weights.dtype, weights.shape[1])
        x = float_array("x", x, (x.shape[0] if x.ndim else 0, width))
        shift = NO_BIAS if bias is None else float_array("bias", bias, (len(weights),))
        out = np.empty((x.shape[0], weights.shape[0]), np.float32)
        matrix = self._matrix(weights)
        for t in range(0, len(x), MAX_TOKENS):
            part = self.to_device(out[t : t + MAX_TOKENS])
            self.kernels.gemv(
                matrix, self.to_device(shift), self.to_device(x[t : t + MAX_TOKENS]), part
            )
            out[t : t + MAX_TOKENS] = self.to_host(part)
        return out

    def neurons(
        self,
        gate: np.ndarray,
        up: np.ndarray | None,
        down: np.ndarray,
        gate_bias: np.ndarray | None = None,
        up_bias: np.ndarray | None = None,
        down_norms: np.ndarray | None = None,
        starts: np.ndarray | None = None,
    ) -> DeviceNeurons:
        """A layer's neurons, copied to the device."""
        vectors = gate_bias, up_bias, down_norms
        biases = [self.to_device(NO_BIAS if each is None else each) for each in vectors]
        matrices = [None if each is None else self._matrix(each) for each in (gate, up, down)]
        blocks = np.empty(0, np.int32) if starts is None else starts.astype(np.int32)
        assert matrices[0] is not None and matrices[2] is not None
        return DeviceNeurons(
            matrices[0], biases[0], matrices[1], biases[1], matrices[2], biases[2],
            self.to_device(blocks),
        )  # fmt: skip

    def selected_ffn(
        self,
        neurons: DeviceNeurons,
        x: np.ndarray,
        selection: Selection,
        function: Activation,
        thresholds: Thresholds,
        residual: LayerResidual | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The output (T, d), and whether each neuron fires for any token (N,); none is listed."""
        assert not selection.is_listed
        layout = FfnLayout(len(x), neurons.num_neurons, x.shape[1])
        items = self.kernels.ffn_scratch_items(len(x), neurons.num_neurons, x.shape[1])
        scratch = self.to_device(np.full(items, np.nan, np.float32))
        out, count = self.to_device(np.full_like(x, np.nan)), self.to_device(np.full(2, -1, "i4"))
        if residual is not None:
            arrays = self.to_device(residual.ffn_residual), self.to_device(residual.bias)
            residual = LayerResidual(*arrays, residual.scale)
        self.kernels.hot_ffn(
            neurons, self.to_device(x), function, thresholds, scratch, out, count,
            self.to_device(selection.block_weights), residual,
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
        if pages is None:
            keys, values, pages = keys[None], values[None], np.zeros(1, np.int32)
        num_groups, head_dim = keys.shape[1], keys.shape[3]
        others = np.zeros((2 * num_groups, head_dim), np.float32)
        qkv = np.concatenate([queries, others]).reshape(1, -1)
        items = self.kernels.attention_scratch_items(1, len(queries), head_dim, length)
        out = self.to_device(np.empty((1, queries.size), np.float32))
        one = np.zeros(1, np.int32)
        arrays = (np.ascontiguousarray(keys), np.ascontiguousarray(values), one + length - 1, one)
        layer = device_layer(
            self.to_device, num_heads=len(queries), num_kv_heads=num_groups, head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale, window=window, softcap=softcap,
        )  # fmt: skip
        self.kernels.decode_attention(
            layer, self.to_device(qkv),
            PagedCache(*map(self.to_device, (*arrays, pages[None]))), length,
            self.to_device(np.full(items, np.nan, np.float32)), out,
        )  # fmt: skip
        return self.to_host(out).reshape(queries.shape)

    def _matrix(self, rows: np.ndarray) -> DeviceMatrix:
        return device_matrix(rows, self.to_device)


def device_matrix(rows: np.ndarray, to_device: Callable[[np.ndarray], Any]) -> DeviceMatrix:
    """Rows of a format of numba_kernels, copied to a device."""
    width = row_width(rows.dtype, rows.shape[1])
    name = FORMATS[rows.dtype].short
    if not is_quantized(rows.dtype):
        return DeviceMatrix(to_device(np.ascontiguousarray(rows)), name, width)
    items = rows.shape[1]
    data = np.full((rows.shape[0], padded_items(rows.dtype, items)), 255, np.uint8)
    data[:, :items] = np.ascontiguousarray(rows).view(np.uint8)
    return DeviceMatrix(to_device(data), name, width)
