"""The cost of a byte read to find which neurons fire, measured on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import numpy_dtype
from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.checks import read_only
from hotcold.numba_kernels.decode.vectors import activation_space
from hotcold.numba_kernels.formats import row_items
from hotcold.numba_kernels.ir.bit_ir import INPUT_PLANES
from hotcold.numba_kernels.measure import gates_of, lowrank_of, signs_of
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.sign import SignLayer

_MAX_BYTES = 1 << 26  # read in turn: more than a core's share of the caches
_ROUNDS = 7
_LISTED_SHARE = 0.25  # of the gates
_HIDDEN = 128  # of a low-rank predictor
_BYTE = 0x11  # of weights: small and positive in every format
_Work = tuple[Callable[[], None], int]  # a function, and the bytes that it reads


@dataclass(frozen=True)
class ReadPrices:
    """Cost of a byte of all a layer's gate rows, of listed rows, and of predictors.

    signs: predictors of one and of two bits a weight; lowrank: of float16 and of int8. With all
    prices 1 a cost is a number of bytes.
    """

    gates: float = 1.0
    listed: float = 1.0
    signs: tuple[float, float] = (1.0, 1.0)
    lowrank: tuple[float, float] = (1.0, 1.0)

    def of(self, layer: SignLayer | LowRankLayer) -> float:
        """Return the price of a byte of this predictor."""
        if isinstance(layer, SignLayer):
            return self.signs[layer.num_weight_planes - 1]
        return self.lowrank[layer.down.dtype == np.int8]


IN_BYTES = ReadPrices()


def measure_prices(config: ModelConfig, num_threads: int) -> ReadPrices:
    """Measure nanoseconds of CPU time a byte, for this model's width and its gates' format.

    `num_threads` share gates and signs, while the driver computes low-rank predictors alone: their
    bytes cost `num_threads` times as much.
    """
    works = [
        *_gate_works(config),
        *(_sign_work(config, planes) for planes in (1, 2)),
        *(_lowrank_work(config, dtype) for dtype in (np.uint16, np.int8)),
    ]
    gates, listed, one_bit, two_bits, half, byte = _prices(works)
    lowrank = (half * num_threads, byte * num_threads)
    return ReadPrices(gates, listed, (one_bit, two_bits), lowrank)


def _gate_works(config: ModelConfig) -> list[_Work]:
    """All gate rows, and listed ones."""
    dtype = numpy_dtype(config.dtype_of("gate"))
    shape = (config.largest_ffn, row_items(dtype, config.hidden_size))
    gate = _filled(shape, dtype, config.num_layers).reshape(-1, shape[1])
    x = np.full((1, config.hidden_size), 0.01, np.float32)
    scratch, values = activation_space(1, *x.shape), np.zeros(len(gate), np.float32)
    chosen = np.random.default_rng(0).random(len(gate)) < _LISTED_SHARE
    chosen[0] = True
    ids, row = read_only(np.flatnonzero(chosen).astype(np.int32)), gate.strides[0]
    return [
        (lambda: gates_of(gate, ids[:0], x, scratch, values), len(gate) * row),
        (lambda: gates_of(gate, ids, x, scratch, values[: ids.size]), ids.size * row),
    ]


def _sign_work(config: ModelConfig, num_planes: int) -> _Work:
    count, words = config.largest_ffn, -(-config.hidden_size // 64)
    bits = _filled((count, num_planes * words), np.dtype(np.uint64), config.num_layers)
    planes = np.zeros((INPUT_PLANES, words), np.uint64)
    x = np.full(config.hidden_size, 0.01, np.float32)
    center, scale = np.zeros_like(x), np.ones_like(x)
    thresholds, out = np.zeros(count, np.float32), np.zeros(count, np.float32)
    return lambda: signs_of(bits, planes, x, center, scale, thresholds, out), bits.nbytes


def _lowrank_work(config: ModelConfig, dtype: type) -> _Work:
    count, width = config.largest_ffn, config.hidden_size
    up = _filled((_HIDDEN, count), np.dtype(dtype), config.num_layers)
    down = _filled((_HIDDEN, width), np.dtype(dtype), len(up))
    up = up[: len(down)]
    scales, hidden = np.ones(_HIDDEN, np.float32), np.zeros((1, _HIDDEN), np.float32)
    x, thresholds = np.full((1, width), 0.01, np.float32), np.zeros(count, np.float32)
    out = np.zeros(count, np.float32)
    num_bytes = down.nbytes + up.nbytes
    return lambda: lowrank_of(down, scales, up, x, hidden, thresholds, out), num_bytes


def _filled(shape: tuple[int, int], dtype: np.dtype, num_layers: int) -> np.ndarray:
    """An array (L, *shape), of as many layers as a token reads if they fit in _MAX_BYTES."""
    size = shape[0] * shape[1] * dtype.itemsize
    layers = max(1, min(num_layers, _MAX_BYTES // size))
    array = aligned_empty((layers, *shape), dtype)
    array.view(np.uint8)[:] = _BYTE
    return array


def _prices(works: Sequence[_Work]) -> list[float]:
    """Nanoseconds of CPU time a byte: the least of several rounds, after one that compiles."""
    best = [float("inf")] * len(works)
    for turn in range(1 + _ROUNDS):
        for i, (work, num_bytes) in enumerate(works):
            started = time.thread_time_ns()
            work()
            spent = max(1, time.thread_time_ns() - started)
            best[i] = min(best[i], spent / num_bytes) if turn else best[i]
    return best
