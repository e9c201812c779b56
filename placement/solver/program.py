"""The placement as an integer program, whose variables count groups of nearly equal frequency.

Variables, in this order:
    n[q, d]  groups of class q (all layers' classes in one row) on device d
    t[l]     time of layer l's neurons
    p[i]     where there is a GPU: whether it has part i; else the host has
    e[l]     where there is a GPU: whether layer l takes exchanges of its own
    one      1, with the constant cost, so that the solver's gap is relative to all seconds

    minimise    sum of t + parts + exchanges
    such that   sum over d of n[q, d] = count of q
                work of layer l on d <= t[l]
                e[l] >= 1 - p of its attention; e[l] >= 1 - p of its predictor
                p of a layer's attention <= p of the next layer's
                bytes on the GPU <= budget; neurons on the CPU + host parts <= its budget

All CPU devices are one here (`merge_cpu_devices`).

Source: PowerInfer section 6; t[l] replaces its sum of frequencies on the GPU, which balances
devices of any speed. Its least number of neurons that pays for an exchange is not needed: layers
take none for neurons on the GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.placement.solver.problem import (
    ATTENTION,
    HEAD,
    HOST,
    PREDICTOR,
    Assignment,
    Problem,
)

MAX_CLASSES = 32


@dataclass(frozen=True, eq=False)
class Classes:
    """Runs of groups of one layer that are treated as equal. Q classes over all layers.

    Shapes:  layer, first, count (Q,), seconds (Q, D) the mean of one group, size (Q,) neurons
    """

    layer: np.ndarray
    first: np.ndarray
    count: np.ndarray
    size: np.ndarray
    seconds: np.ndarray


def make_classes(problem: Problem) -> Classes:
    """Cut each layer's groups, hottest first, in at most MAX_CLASSES + 1 classes.

    A layer with at most MAX_CLASSES groups has a class for each. Otherwise cuts are where the
    mean of rank and fallen frequency, both from 0 to 1, passes a multiple of 1 / MAX_CLASSES:
    classes are short where frequency falls steeply. Groups of a class have one size.
    """
    num_groups = problem.group_sizes.shape[1]
    columns: list[tuple[int, int, int]] = []  # layer, first, count
    for layer in range(problem.num_layers):
        sizes = problem.group_sizes[layer]
        sizes = sizes[sizes > 0]
        ids = _class_of_groups(problem.group_frequency[layer, : sizes.size])
        is_first = np.diff(ids, prepend=-1) | np.diff(sizes, prepend=0)
        first = np.flatnonzero(is_first)
        count = np.diff(first, append=sizes.size)
        columns += [(layer, int(at), int(n)) for at, n in zip(first, count, strict=True)]
    layers, first, count = np.array(columns, np.int64).T
    starts = layers * num_groups + first
    flat = problem.group_seconds.reshape(-1, problem.num_devices)
    seconds = np.add.reduceat(flat, starts, axis=0) / count[:, None]
    return Classes(layers, first, count, problem.group_sizes[layers, first], seconds)


def _class_of_groups(frequency: np.ndarray) -> np.ndarray:
    num_groups = len(frequency)
    if num_groups <= MAX_CLASSES:
        return np.arange(num_groups)
    rank = np.arange(num_groups) / (num_groups - 1)
    spread = frequency[0] - frequency[-1]
    fallen = (frequency[0] - frequency) / spread if spread > 0 else rank
    return np.minimum((rank + fallen) / 2 * MAX_CLASSES, MAX_CLASSES - 1).astype(np.int64)


class _Builder:
    """Numbers the variables, and collects a sparse matrix of constraints, block by block."""

    def __init__(self, problem: Problem, classes: Classes, unit_s: float) -> None:
        self.problem, self.classes, self.unit_s = problem, classes, unit_s
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.low: list[np.ndarray] = []
        self.high: list[np.ndarray] = []
        self.num_rows = self.num_columns = 0
        layers, gpus = problem.num_layers, problem.num_gpus
        self.n = self._variables(len(classes.layer), problem.num_devices)
        self.t = self._variables(layers)
        self.p = self._variables(len(problem.part_bytes), gpus)
        self.e = self._variables(layers, gpus)
        (self.one,) = self._variables(1)

    def _variables(self, *shape: int) -> np.ndarray:
        """Columns of new variables."""
        found = self.num_columns + np.arange(math.prod(shape)).reshape(shape)
        self.num_columns += found.size
        return found

    def add(self, low: Any, high: Any, *entries: tuple[Any, Any, Any]) -> None:
        """Add rows low <= row <= high; each entry is rows (within the block), columns, values."""
        low, high = np.broadcast_arrays(np.atleast_1d(low), np.atleast_1d(high))
        for rows, columns, values in entries:
            at, column, value = np.broadcast_arrays(rows, columns, values)
            self.parts.append((at.ravel() + self.num_rows, column.ravel(), value.ravel()))
        self.low.append(low.astype(float))
        self.high.append(high.astype(float))
        self.num_rows += low.size

    def add_all(self) -> None:
        """Add the constraints of this module's docstring."""
        count = self.classes.count
        self.add(count, count, (np.arange(len(count))[:, None], self.n, 1.0))
        self._add_times()
        if self.problem.num_gpus:
            self._add_exchanges()
            attention = self.p[self.problem.part_kinds == ATTENTION]
            row = np.arange(len(attention) - 1)[:, None]
            before = (row, attention[:-1], -1.0)
            self.add(np.zeros(row.size), np.inf, (row, attention[1:], 1.0), before)
        self._add_budgets()

    def _add_times(self) -> None:
        layers, devices = self.problem.num_layers, self.problem.num_devices
        row = np.arange(layers * devices).reshape(layers, devices)
        self.add(
            np.full(row.size, -np.inf),
            0.0,
            (row[self.classes.layer], self.n, self.classes.seconds / self.unit_s),
            (row, self.t[:, None], -1.0),
        )

    def _add_exchanges(self) -> None:
        row = np.arange(self.problem.num_layers)[:, None]
        for kind in (ATTENTION, PREDICTOR):
            parts = self.p[self.problem.part_kinds == kind]
            if parts.size:
                self.add(np.ones(row.size), np.inf, (row, parts, 1.0), (row, self.e, 1.0))

    def _add_budgets(self) -> None:
        """Rows in units of a group's bytes: the solver's tolerance is then a few bytes."""
        problem, n, p, gpus = self.problem, self.n, self.p, self.problem.num_gpus
        unit = float(problem.group_sizes.max() * problem.neuron_bytes)
        size = (self.classes.size * problem.neuron_bytes / unit)[:, None]
        part, budget = problem.part_bytes[:, None] / unit, problem.budget_bytes / unit
        host, on_gpu = budget[gpus] - problem.part_bytes.sum() / unit, np.arange(gpus)
        least = np.full(gpus, -np.inf)
        self.add(least, budget[:gpus], (on_gpu, n[:, :gpus], size), (on_gpu, p, part))
        self.add(-np.inf, host, (0, n[:, gpus:], size), (0, p, -part))

    def arguments(self) -> dict[str, Any]:
        """The cost of the variables and their bounds, beside the constraints."""
        from scipy.optimize import Bounds, LinearConstraint
        from scipy.sparse import coo_array

        problem, gpus, unit_s = self.problem, self.problem.num_gpus, self.unit_s
        exchange_s = problem.exchange_s
        num_exchanges = 1 if gpus else 2 * problem.num_layers  # and the head's
        low, high = np.zeros(self.num_columns), np.ones(self.num_columns)
        cost, integrality = np.zeros(self.num_columns), np.ones(self.num_columns)
        cost[self.t], high[self.t], integrality[self.t] = 1.0, np.inf, 0
        host_s = problem.part_seconds[:, -1] + exchange_s * (problem.part_kinds == HEAD)
        cost[self.p] = (problem.part_seconds[:, :gpus] - host_s[:, None]) / unit_s
        cost[self.e] = 2 * exchange_s / unit_s
        cost[self.one] = (num_exchanges * exchange_s + float(host_s.sum())) / unit_s
        low[self.one] = 1
        high[self.n] = self.classes.count[:, None]
        rows, columns, values = (np.concatenate(part) for part in zip(*self.parts, strict=True))
        shape = self.num_rows, self.num_columns
        matrix = coo_array((values.astype(float), (rows, columns)), shape).tocsc()
        row_low, row_high = np.concatenate(self.low), np.concatenate(self.high)
        return {
            "c": cost,
            "integrality": integrality,
            "bounds": Bounds(low, high),
            "constraints": LinearConstraint(matrix, row_low, row_high),
        }


def build_program(problem: Problem, classes: Classes, unit_s: float) -> dict[str, Any]:
    """The program of this module's docstring: arguments of scipy.optimize.milp.

    Seconds are divided by `unit_s`, bytes by a group's.
    """
    builder = _Builder(problem, classes, unit_s)
    builder.add_all()
    return builder.arguments()


def read_solution(problem: Problem, classes: Classes, values: np.ndarray) -> Assignment:
    """Turn the solver's counts into places; of a class the hottest go to the GPU."""
    num_classes, devices, gpus = len(classes.layer), problem.num_devices, problem.num_gpus
    n = np.rint(values[: num_classes * devices]).astype(np.int64).reshape(num_classes, devices)
    group_device = np.full(problem.group_seconds.shape[:2], HOST, np.int16)
    for q in range(num_classes):
        at = slice(int(classes.first[q]), int(classes.first[q] + classes.count[q]))
        group_device[classes.layer[q], at] = np.repeat(np.arange(devices), n[q])
    part_device = np.full(len(problem.part_bytes), HOST, np.int16)
    if gpus:
        first = num_classes * devices + problem.num_layers
        part_device[np.rint(values[first : first + part_device.size]) == 1] = 0
    return Assignment(group_device, part_device)
