"""The interface of a device's kernels: arrays in, work put on the current stream."""

from __future__ import annotations

from typing import Any, Protocol

from hotcold.cuda_kernels.matrix import DeviceMatrix

RMS_NORM, LAYER_NORM = 0, 1  # the numbers of numba_kernels.decode.norm
# The numbers of numba_kernels.checks.
RELU, SILU, GELU, GELU_TANH, RELU2, FATRELU, DRELU = range(7)
MAX_TOKENS = 32


class DeviceKernels(Protocol):
    """What a device computes for a step of 1 <= T <= 32 tokens.

    Every method only puts work on the current stream: it waits for nothing and allocates nothing,
    so that it can be captured in a CUDA graph. The first call of each kind compiles its kernel, so
    it must precede a capture. Arrays are on the device, C-contiguous, float32 where nothing else is
    said. A token's results are bit-equal whatever its batch-mates.
    """

    def norm(
        self,
        kind: int,
        x: Any,
        weight: Any,
        bias: Any,
        epsilon: float,
        out: Any,
        residual: Any = None,
        factor: float = 1.0,
    ) -> None:
        """out[t] = RMSNorm or LayerNorm of x[t]; x[t] itself without weights.

        With `residual` out[t] = residual[t] + factor * norm.
        Shapes:  x, out (T, d), may be one array; residual (T, d), another; weight (d,) or (0,),
                 bias (d,) or (0,)
        """

    def norm_parts(self, x: Any, first: int, last: int, weight: Any, epsilon: float) -> None:
        """RMSNorm, in place, of each `size` numbers of x[t, first:last].

        Shapes:  x (T, d), weight (size,), last - first a multiple of size
        """

    def softcap(self, x: Any, cap: float) -> None:
        """x = cap * tanh(x / cap), in place."""

    def gemv(
        self, weights: DeviceMatrix, bias: Any, x: Any, out: Any, residual: Any = None
    ) -> None:
        """out[t, n] = weights[n] . x[t] + bias[n] [+ residual[t, n]].

        Shapes:  weights (N, d), bias (N,) or (0,), x (T, d); out, residual (T, N), may be one array
        """

    def rope_store(
        self,
        qkv: Any,
        num_heads: int,
        num_kv_heads: int,
        rope_table: Any,
        positions: Any,
        slots: Any,
        page_tables: Any,
        keys: Any,
        values: Any,
    ) -> None:
        """Rotate query and key heads in place, write keys and values of this layer to the cache.

        Shapes:  qkv (T, (H + 2 KV) * dim); rope_table (P, 2, half), or (0, 2, 0) for none: 2 * half
                 items of a head are rotated;
                 positions, slots (T,); page_tables (slots, pages); keys, values (M, KV, 64, dim)
        Dtypes:  positions, slots, page_tables int32; keys, values float32 or uint16 (float16 bits)
        """

    def decode_attention(
        self,
        qkv: Any,
        num_heads: int,
        num_kv_heads: int,
        keys: Any,
        values: Any,
        positions: Any,
        slots: Any,
        page_tables: Any,
        scale: float,
        max_length: int,
        scratch: Any,
        out: Any,
        window: int = 0,
        softcap: float = 0.0,
    ) -> None:
        """Each token's heads attend to the positions up to its own, grouped-query.

        With a window only to the last `window` of them; with a softcap scores become
        softcap * tanh(score / softcap). Positions are below `max_length`. scratch:
        `attention_scratch_items`.
        Shapes:  out (T, H * dim), the rest as in `rope_store`; dim <= 256
        """

    def hot_ffn(
        self,
        gate: DeviceMatrix,
        gate_bias: Any,
        up: DeviceMatrix | None,
        up_bias: Any,
        down: DeviceMatrix,
        down_bias: Any,
        x: Any,
        function: Any,
        thresholds: Any,
        down_norms: Any,
        scratch: Any,
        out: Any,
        num_fired: Any,
    ) -> None:
        """The FFN of the hot neurons, those on the device.

        out[t] = down_bias + sum over n of fn(gate[n] . x[t] + bias) (up[n] . x[t] + bias) down[n]

        function, thresholds: `Activation` and `Thresholds` of numba_kernels; drelu applies relu to
        both factors. A neuron whose gate passes for no token costs its gate row; one that only
        fails the product threshold also costs its up row. num_fired is set to the number of neurons
        that fire for any token, and of up rows read. scratch: `ffn_scratch_items`.
        Shapes:  gate, up, down (N, d), N may be 0; x, out (T, d); biases (N,) or (0,), down_bias
                 (d,) or (0,); down_norms (N,) or (0,); num_fired (2,) int32
        """

    def attention_scratch_items(
        self, num_tokens: int, num_heads: int, head_dim: int, max_length: int
    ) -> int:
        """float32 items that `decode_attention` needs as scratch."""

    def ffn_scratch_items(self, num_tokens: int, num_neurons: int, width: int) -> int:
        """float32 items that `hot_ffn` needs as scratch."""

    def widen(self, weights: DeviceMatrix, first: int, last: int, out: Any) -> None:
        """out (n, d) uint16 = rows first..last-1 as float16 bits; infinite where beyond float16."""
