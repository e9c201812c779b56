"""A layer's neurons and router on a device, and which neurons a step computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from hotcold.cuda_kernels.matrix import DeviceMatrix


@dataclass(frozen=True)
class DeviceNeurons:
    """N neurons of one layer, in B blocks.

    gate, up, down (N, d), up None in a two-matrix FFN; gate_bias, up_bias (N,) float32 or (0,)
    down_norms (N,) float32: lengths of down's rows; (0,) where no product threshold needs them
    starts (B + 1,) int32: block b has the rows starts[b] to starts[b + 1] - 1; (0,): one block
    """

    gate: DeviceMatrix
    gate_bias: Any
    up: DeviceMatrix | None
    up_bias: Any
    down: DeviceMatrix
    down_norms: Any
    starts: Any

    @property
    def num_neurons(self) -> int:
        """N."""
        return self.gate.num_rows


@dataclass(frozen=True)
class DeviceRouter:
    """A layer's router, float32: as a layer of `numba_kernels.router_arrays.RouterArrays`.

    rows (E, d); bias, selection_bias (E,) or (0,); shared (1, d), None without a shared gate
    """

    rows: DeviceMatrix
    bias: Any
    selection_bias: Any
    shared: DeviceMatrix | None


class LayerResidual(NamedTuple):
    """What the FFN's sum is added to where a device computes all of it: ffn_residual + scale * FFN.

    ffn_residual (T, d), or None where the sum is normed first; bias (B, d) of each block's down
    projections, or (B, 0); all float32. A token has the biases of its blocks, with their weights.
    """

    ffn_residual: Any
    bias: Any
    scale: float


class DeviceSigns(NamedTuple):
    """A sign predictor of a layer's N neurons: the device's own, then CPU services' as they have
    them.

    bits (N, P * words) uint32: as those of 64 of `predictors.sign`, the lower half first
    thresholds (N,), center, scale (d,) float32
    bounds (C + 1,) int32: service c has the neurons bounds[c] to bounds[c + 1] - 1, the device
    those before
    """

    bits: Any
    thresholds: Any
    center: Any
    scale: Any
    bounds: Any


class DeviceLowRank(NamedTuple):
    """A low-rank predictor of the same neurons: arrays as of `predictors.lowrank`, and bounds."""

    down: Any
    scales: Any
    up: Any
    thresholds: Any
    bounds: Any


DevicePredictor = DeviceSigns | DeviceLowRank


class PredictorScratch(NamedTuple):
    """What predicting a step of T tokens takes: planes (T * 3 * words,), masks (N,) uint32, units
    (T,), hidden (T * most units between low-rank matrices,) float32.
    """

    planes: Any
    units: Any
    masks: Any
    hidden: Any


class SharedMemory(NamedTuple):
    """What a device shares with CPU services; all but `told` is the host's memory.

    told (n,) int32: see csrc/share.cu, of the request in work
    cells (S * cell_words,) int32: doorbells; given, stopped: those that the device writes; output,
    length: of a service's own words its flag, and how many neurons its list has
    ffn_input (T, d), block_weights (T, B), partials (S, T, d), more_partials (S, M, T, d) float32
    active_ids (S, N) int32, active_masks (S, N) uint32: the services' lists
    limit_ns: how long the device waits for a layer's outputs
    """

    told: Any
    cells: Any
    cell_words: int
    given: int
    stopped: int
    output: int
    length: int
    ffn_input: Any
    block_weights: Any
    partials: Any
    more_partials: Any
    active_ids: Any
    active_masks: Any
    limit_ns: int
