"""Expected bytes and seconds of a token: what each neuron and each part costs on each device.

A row is hidden_size weights. A neuron's first row (the gate's, or the first matrix's) is read to
know whether it fires, the rest of its rows (up and down, or down alone) where it fires.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import mean_row_bytes, row_bytes
from hotcold.model.weights.sizes import attention_bytes, ffn_bytes, head_bytes, kv_cache_bytes
from hotcold.placement.solver.problem import ATTENTION, GROUP_SIZE, HEAD, PREDICTOR, Problem

KV_ITEM_BYTES = {"float16": 2, "float32": 4}
_FLOAT_BYTES = 4  # of the hidden state, as it is exchanged


@dataclass(frozen=True)
class PlanDevice:
    """One device of a plan: a GPU, or a CPU service with its share of a NUMA node.

    Units:   budget_bytes is what the model may take, reserves already off; free_bytes is what the
             device has free now. A GPU reads everything at rows_gb_per_s.
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
    """What a predictor weighs, and how many more neurons it picks than fire.

    Shapes:  layer_bytes (L,) int64, selected_factor (L,) float64, each at least 1
    Units:   selected_factor is the share of neurons computed / the share that fires
    `note` says what of this is assumed; empty where all was measured.
    """

    kind: str
    layer_bytes: np.ndarray
    selected_factor: np.ndarray
    note: str = ""


@dataclass(frozen=True)
class RowBytes:
    """Bytes of a neuron's first row, of its up row (0 in a two-matrix FFN), and of its down row.

    Where down projections lie by outputs, all of `down` is read whoever fires.
    """

    first: int
    up: int
    down: int
    reads_all_down: bool = False

    @property
    def rest(self) -> int:
        """Of all but the first row."""
        return self.up + self.down

    @classmethod
    def of(cls, config: ModelConfig) -> RowBytes:
        """The rows of `config`, in its dtypes."""
        first = row_bytes(config, config.hidden_size, "gate")
        down = round(mean_row_bytes(config, config.hidden_size, "down"))
        transposed = "down" in dict(config.mean_row_bytes)
        return cls(first, first if config.has_gate else 0, down, transposed)

    def read(self, gates: float, ups: float, downs: float) -> float:
        """Bytes of a neuron where such shares of these rows are computed."""
        of_down = self.down if self.reads_all_down else self.down * downs
        return self.first * gates + self.up * ups + of_down


def read_bytes(
    rows: RowBytes, frequency: np.ndarray, mode: str, selected_factor: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that a CPU reads of each neuron for one token: of its first row, of its other rows.

    dense: first, rest;  exact: first, f * rest;
    predicted (selected_factor given): min(1, f * selected_factor[l]) * first, f * rest
    Shapes:  frequency f (L, N), selected_factor (L,); both results (L, N)
    """
    everything = np.ones_like(frequency)
    if mode == "dense":
        return everything * rows.first, everything * rows.rest
    picked = everything
    if selected_factor is not None:
        picked = np.minimum(1.0, frequency * selected_factor[:, None])
    return picked * rows.first, frequency * rows.rest


def gpu_read_bytes(rows: RowBytes, frequency: np.ndarray, mode: str) -> np.ndarray:
    """Bytes that a GPU reads of each neuron for one token: (L, N).

    first + f * rest; all in dense mode. It holds neurons that fire often, so it asks no predictor.
    """
    first, rest = read_bytes(rows, frequency, "dense" if mode == "dense" else "exact")
    return first + rest


def neuron_seconds(
    rows: RowBytes,
    devices: Sequence[PlanDevice],
    frequency: np.ndarray,
    mode: str,
    selected_factor: np.ndarray | None = None,
) -> np.ndarray:
    """Expected seconds of each neuron on each device, alone: (L, N, D).

    bytes / bandwidth; a CPU reads whole runs of rows (the first rows without a predictor, all rows
    in dense mode) at rows_gb_per_s, what it must pick at gather_gb_per_s.
    """
    on_gpu = gpu_read_bytes(rows, frequency, mode)
    first, rest = read_bytes(rows, frequency, mode, selected_factor)
    seconds = np.empty((*frequency.shape, len(devices)))
    for index, device in enumerate(devices):
        picking, running = device.gather_gb_per_s * 1e9, device.rows_gb_per_s * 1e9
        if device.is_gpu:
            seconds[..., index] = on_gpu / running
        elif mode == "dense":
            seconds[..., index] = (first + rest) / running
        else:
            is_picked = selected_factor is not None
            seconds[..., index] = first / (picking if is_picked else running) + rest / picking
    return seconds


def least_neurons(seconds: np.ndarray, sync_s: np.ndarray, num_gpus: int) -> np.ndarray:
    """C_l: the least C with C * T_gpu + T_sync <= C * T_cpu, for each layer and GPU: (L, G).

    T are the layer's mean neuron's seconds, on the CPU those of all devices working together. Where
    the GPU is never faster it is one more than there are neurons.
    Shapes:  seconds (L, N, D), sync_s (G,)
    Source:  PowerInfer section 6.3
    """
    num_neurons = seconds.shape[1]
    mean = seconds.mean(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        cpu_s = 1 / (1 / mean[:, num_gpus:]).sum(axis=1)
        saved_s = cpu_s[:, None] - mean[:, :num_gpus]
        least = np.ceil(np.where(saved_s > 0, sync_s / np.maximum(saved_s, 0), np.inf))
    return np.clip(least, 1, num_neurons + 1).astype(np.int64)


def group_order(frequency: np.ndarray) -> np.ndarray:
    """Neuron ids of each layer, hottest first; equals in the checkpoint's order: (L, N)."""
    return np.argsort(-frequency, axis=1, kind="stable")


def group_starts(num_neurons: int) -> np.ndarray:
    """Where each group of `group_order` starts."""
    return np.arange(0, num_neurons, GROUP_SIZE)


@dataclass(frozen=True, eq=False)
class PartCost:
    """Bytes that parts take in memory, and that they read for one token.

    Shapes:  all (P,), the layers' attention first, then the head, then the layers' predictors
    """

    kinds: tuple[str, ...]
    num_bytes: np.ndarray
    read_bytes: np.ndarray


def part_costs(
    config: ModelConfig, context_length: int, kv_dtype: str, predictor: PredictorCost | None
) -> PartCost:
    """Attention with its KV cache, head, predictors.

    A cache that fills is half full on average, so half of it counts as read; of a windowed layer,
    what lies in the window on average. A layer's bias that
    belongs to no neuron (the down projection's) counts with its attention. The input embedding of a
    token is one row and not counted.
    """
    layers = config.num_layers
    kv = kv_cache_bytes(config, context_length, KV_ITEM_BYTES[kv_dtype]) // layers
    weights = (attention_bytes(config) + ffn_bytes(config, 0)) // layers
    kinds = [ATTENTION] * layers + [HEAD]
    held = [weights + kv] * layers + [head_bytes(config)]
    read = [
        weights + round(kv * seen_share(config.window_of_layer(layer), context_length))
        for layer in range(layers)
    ]
    read.append(head_bytes(config))
    if predictor is not None:
        kinds += [PREDICTOR] * layers
        held += predictor.layer_bytes.tolist()
        read += predictor.layer_bytes.tolist()
    return PartCost(tuple(kinds), np.array(held, np.int64), np.array(read, np.int64))


def seen_share(window: int, context_length: int) -> float:
    """The share of a layer's KV cache that a token reads, on average over a context.

    1/2 without a window (0); with one w / n - w^2 / (2 n^2), for w < n positions
    """
    share = min(1.0, window / context_length) if window else 1.0
    return share - share**2 / 2


def make_problem(
    config: ModelConfig,
    devices: Sequence[PlanDevice],
    frequency: np.ndarray,
    mode: str,
    parts: PartCost,
    exchange_us: float,
    selected_factor: np.ndarray | None = None,
) -> Problem:
    """Put costs and budgets together for the solver.

    A token takes two exchanges a layer and one for the head; a layer that uses a GPU for neurons
    takes one more, and the hidden state's way there and back.
    Shapes:  devices are the GPUs, then the CPU's; frequency (L, N)
    """
    num_gpus = sum(device.is_gpu for device in devices)
    rows = RowBytes.of(config)
    seconds = neuron_seconds(rows, devices, frequency, mode, selected_factor)
    order, starts = group_order(frequency), group_starts(config.ffn_size)
    by_rank = np.take_along_axis(seconds, order[:, :, None], axis=1)
    sizes = np.diff(starts, append=config.ffn_size)
    hot = np.take_along_axis(frequency, order, axis=1)
    bandwidths = [device.rows_gb_per_s * 1e9 for device in devices]
    host = sum(bandwidths[num_gpus:])
    state_bytes = 2 * config.hidden_size * _FLOAT_BYTES
    sync_s = np.array(
        [exchange_us / 1e6 + state_bytes / (c.link_gb_per_s * 1e9) for c in devices[:num_gpus]]
    )
    return Problem(
        num_gpus=num_gpus,
        budget_bytes=np.array([device.budget_bytes for device in devices], np.int64),
        neuron_bytes=ffn_bytes(config, 1) - ffn_bytes(config, 0),
        group_sizes=sizes,
        group_seconds=np.add.reduceat(by_rank, starts, axis=1),
        group_frequency=np.add.reduceat(hot, starts, axis=1) / sizes,
        part_kinds=parts.kinds,
        part_bytes=parts.num_bytes,
        part_seconds=parts.read_bytes[:, None] / np.array([*bandwidths[:num_gpus], host]),
        sync_s=sync_s,
        min_neurons=least_neurons(seconds, sync_s, num_gpus),
        fixed_s=(2 * config.num_layers + 1) * exchange_us / 1e6,
    )
