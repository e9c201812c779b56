"""Expected bytes and seconds of a token: the cost of each neuron and part on each device.

A row is hidden_size weights. A neuron's first row (of the gate, or of the first matrix) decides
whether it fires; its other rows (up and down, or down alone) are read only if it does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotcold.model.config import neurons
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import mean_row_bytes
from hotcold.model.weights.sizes import (
    attention_bytes,
    ffn_bytes,
    head_bytes,
    kv_cache_bytes,
    neuron_bytes,
)
from hotcold.placement.profile import Rates
from hotcold.placement.solver.problem import ATTENTION, GROUP_SIZE, HEAD, PREDICTOR, Problem

_FLAGS_US = 8  # of a shared layer, there and back; by others' figures, not measured
_FLOAT_BYTES = 4  # of the hidden state, as it is exchanged
# Measured on random weights at a density of 0.10 and recall 0.96 (docs/decisions.md, "Prediction"):
# sign predictors of 2 bits a weight choose 0.165 of the gates, low-rank ones of 80 int8 units for
# 4096 inputs 0.185.
_SIGN_BITS, _SIGN_FACTOR = 2, 1.6
_UNITS_OF_WIDTH, _LOWRANK_FACTOR = 80 / 4096, 1.8


@dataclass(frozen=True)
class PlanDevice:
    """One device of a plan: the GPU, or a CPU service with its share of a NUMA node.

    Units:   budget_bytes is what the model may use, without reserves; free_bytes is free memory
             now. A GPU reads everything at rows_gb_per_s.
    """

    name: str
    is_gpu: bool
    budget_bytes: int
    free_bytes: int
    rows_gb_per_s: float
    gather_gb_per_s: float
    link_gb_per_s: float = math.inf


@dataclass(frozen=True, eq=False)
class PredictorCost:
    """The size of a model's predictors, and how many neurons they select for each that fires.

    Shapes:  layer_bytes (L,) int64, selected_factor (L,) float64, each at least 1
    Units:   selected_factor is the share of neurons computed / the share that fires
    `note` says what is assumed; empty where all is measured.
    """

    kind: str
    layer_bytes: np.ndarray
    selected_factor: np.ndarray
    note: str = ""


def assumed_predictors(config: ModelConfig, kind: str) -> PredictorCost:
    """The cost of predictors of usual size that are not here. `kind` is sign or lowrank."""
    sizes = np.array(config.ffn_sizes, np.int64)
    if kind == "sign":
        num_bytes, factor = sizes * config.hidden_size * _SIGN_BITS // 8, _SIGN_FACTOR
        size = f"of {_SIGN_BITS} bits a gate weight"
    else:
        units = max(16, round(_UNITS_OF_WIDTH * config.hidden_size))
        num_bytes, factor = units * (config.hidden_size + sizes), _LOWRANK_FACTOR
        size = f"of {units} units in 8 bits"
    return PredictorCost(
        kind,
        num_bytes,
        np.full(config.num_layers, factor),
        f"predictors {size} choose {factor:g} neurons for each that fires, as on random weights",
    )


@dataclass(frozen=True)
class RowBytes:
    """Bytes of a neuron's first row, of its up row (0 in a two-matrix FFN), and of its down row.

    Transposed down projections are read whole, whichever neurons fire.
    """

    first: int
    up: int
    down: int
    reads_all_down: bool = False

    @property
    def rest(self) -> int:
        """Bytes of up and down rows."""
        return self.up + self.down

    @classmethod
    def of(cls, config: ModelConfig) -> RowBytes:
        """The rows of `config`, in its dtypes."""
        first = round(mean_row_bytes(config, config.hidden_size, "gate"))
        down = round(mean_row_bytes(config, config.hidden_size, "down"))
        transposed = "down" in dict(config.mean_row_bytes)
        return cls(first, first if config.has_gate else 0, down, transposed)

    def read(self, gates: float, ups: float, downs: float) -> float:
        """Bytes read of a neuron when these shares of its rows are computed.

        Transposed down projections are read of all neurons whose gates are.
        """
        return (
            self.first * gates
            + self.up * ups
            + self.down * (gates if self.reads_all_down else downs)
        )


def read_bytes(
    rows: RowBytes, rates: Rates, mode: str, selected_factor: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that a device reads of each neuron for one token: first row, other rows.

    dense: c * first, c * rest;  exact: c * first, f * rest;
    predicted (selected_factor given): min(c, f * selected_factor[l]) * first, f * rest
    c and f are the rates at which it is chosen and fires. Transposed down projections are read of
    all neurons that are chosen.
    Shapes:  selected_factor (L,); both results (L, N)
    """
    if mode == "dense":
        return rates.chosen * rows.first, rates.chosen * rows.rest
    picked = rates.chosen
    if selected_factor is not None:
        picked = np.minimum(picked, rates.fired * selected_factor[:, None])
    if rows.reads_all_down:
        return picked * rows.first, rates.fired * rows.up + rates.chosen * rows.down
    return picked * rows.first, rates.fired * rows.rest


def hotness(config: ModelConfig, rates: Rates) -> np.ndarray:
    """The share of each neuron's bytes that a token reads where all that fires is computed: (L, N).

    Of always computed layers and shared experts that is most, of experts what is chosen.
    """
    rows = RowBytes.of(config)
    first, rest = read_bytes(rows, rates, "exact")
    return (first + rest) / (rows.first + rows.rest)


def neuron_seconds(
    rows: RowBytes,
    devices: Sequence[PlanDevice],
    rates: Rates,
    mode: str,
    selected_factor: np.ndarray | None = None,
) -> np.ndarray:
    """Expected seconds of each neuron on each device, alone: (L, N, D).

    bytes / bandwidth; a CPU reads contiguous rows (first rows without a predictor, all rows in
    dense mode) at rows_gb_per_s, selected rows at gather_gb_per_s.
    """
    first, rest = read_bytes(rows, rates, mode, selected_factor)
    seconds = np.empty((*rates.fired.shape, len(devices)))
    for index, device in enumerate(devices):
        picking, running = device.gather_gb_per_s * 1e9, device.rows_gb_per_s * 1e9
        if device.is_gpu or mode == "dense":
            seconds[..., index] = (first + rest) / running
        else:
            is_picked = selected_factor is not None
            seconds[..., index] = first / (picking if is_picked else running) + rest / picking
    return seconds


@dataclass(frozen=True, eq=False)
class Groups:
    """The neurons of each layer in groups, the hottest group first.

    order: a layer's neuron ids, group after group; what the largest layer has more comes last
    Shapes:  order (L, N); sizes (L, K) neurons, 0 where a layer has fewer groups
    Dtypes:  int64
    """

    order: np.ndarray
    sizes: np.ndarray

    def sums(self, values: np.ndarray) -> np.ndarray:
        """The sum of `values` over each group. Shapes: values (L, N, ...); result (L, K, ...)."""
        found = np.zeros((*self.sizes.shape, *values.shape[2:]))
        for layer, sizes in enumerate(self.sizes):
            own = sizes[sizes > 0]
            ranked = values[layer, self.order[layer]]
            found[layer, : own.size] = np.add.reduceat(ranked, np.cumsum(own) - own, axis=0)
        return found


def make_groups(config: ModelConfig, hot: np.ndarray) -> Groups:
    """Neurons of about equal `hot` (L, N) together, GROUP_SIZE of them, within a block.

    An expert none of whose activations are exactly zero is one group. Ties are in checkpoint order.
    """
    found = []
    for layer, own in zip(config.layers, hot, strict=True):
        sizes, end = layer.ffn.block_sizes, 0
        groups: list[np.ndarray] = []
        for size in sizes:
            ids = np.arange(end, end + size)
            ids = ids[np.argsort(-own[ids], kind="stable")]
            is_whole = len(sizes) > 1 and not config.is_sparse
            cuts = np.arange(GROUP_SIZE, size, GROUP_SIZE)
            groups += [ids] if is_whole else np.split(ids, cuts)
            end += size
        means = np.array([own[ids].mean() for ids in groups])
        found.append([groups[i] for i in np.argsort(-means, kind="stable")])
    order = np.argsort(~neurons.exists(config), axis=1, kind="stable")
    counts = np.zeros((len(found), max(map(len, found))), np.int64)
    for row, count, groups in zip(order, counts, found, strict=True):
        row[: sum(map(len, groups))] = np.concatenate(groups)
        count[: len(groups)] = [ids.size for ids in groups]
    return Groups(order, counts)


@dataclass(frozen=True, eq=False)
class PartCost:
    """Bytes of parts in memory, and bytes read for one token.

    Shapes:  all (P,), the layers' attention first, then the head, then the layers' predictors
    """

    kinds: np.ndarray
    num_bytes: np.ndarray
    read_bytes: np.ndarray


def part_costs(
    config: ModelConfig,
    context_length: int,
    kv_dtype: str,
    kv_bytes: int,
    predictor: PredictorCost | None,
) -> PartCost:
    """Attention with its KV cache, of `kv_bytes` in all layers, head, predictors.

    A context that fills is half full on average, so half of it counts as read; of a windowed layer,
    what lies in the window on average. A layer's bias that
    belongs to no neuron (the down projection's) counts with its attention. The input embedding of a
    token is one row and not counted.
    """
    layers = config.num_layers
    context = kv_cache_bytes(config, context_length, kv_dtype) // layers
    weights = (attention_bytes(config) + ffn_bytes(config, 0)) // layers
    kinds = [ATTENTION] * layers + [HEAD]
    held = [weights + kv_bytes // layers] * layers + [head_bytes(config)]
    read = [
        weights + round(context * seen_share(layer.attention.window, context_length))
        for layer in config.layers
    ]
    read.append(head_bytes(config))
    if predictor is not None:
        kinds += [PREDICTOR] * layers
        held += predictor.layer_bytes.tolist()
        read += predictor.layer_bytes.tolist()
    return PartCost(np.array(kinds), np.array(held, np.int64), np.array(read, np.int64))


def seen_share(window: int, context_length: int) -> float:
    """The share of a layer's KV cache that a token reads, on average over a context.

    1/2 without a window (0); with one w / n - w^2 / (2 n^2), for w < n positions
    """
    share = min(1.0, window / context_length) if window else 1.0
    return share - share**2 / 2


def make_problem(
    config: ModelConfig,
    devices: Sequence[PlanDevice],
    rates: Rates,
    groups: Groups,
    mode: str,
    parts: PartCost,
    exchange_us: float,
    selected_factor: np.ndarray | None = None,
) -> Problem:
    """Put costs and budgets together for the solver.

    A layer whose attention is on the GPU takes its flags and the hidden state's way there and back.
    Shapes:  devices are the GPU, if there is one, then the CPU's
    """
    num_gpus = sum(device.is_gpu for device in devices)
    seconds = neuron_seconds(RowBytes.of(config), devices, rates, mode, selected_factor)
    bandwidths = np.array([device.rows_gb_per_s * 1e9 for device in devices])
    speeds = np.append(bandwidths[:num_gpus], bandwidths[num_gpus:].sum())
    part_seconds = parts.read_bytes[:, None] / speeds
    if num_gpus:
        state_bytes = 2 * config.hidden_size * _FLOAT_BYTES
        flags_s = _FLAGS_US / 1e6 + state_bytes / (devices[0].link_gb_per_s * 1e9)
        part_seconds[parts.kinds == ATTENTION, 0] += flags_s
    return Problem(
        num_gpus=num_gpus,
        budget_bytes=np.array([device.budget_bytes for device in devices], np.int64),
        neuron_bytes=neuron_bytes(config),
        group_sizes=groups.sizes,
        group_seconds=groups.sums(seconds),
        group_frequency=groups.sums(hotness(config, rates)) / np.maximum(groups.sizes, 1),
        part_kinds=parts.kinds,
        part_bytes=parts.num_bytes,
        part_seconds=part_seconds,
        exchange_s=exchange_us / 1e6,
    )
