"""The placement problem in numbers: groups of neurons and parts, devices and costs.

Devices work on a layer in parallel, layers and parts one after another:

    seconds = exchanges + sum of parts + sum over layers of the slowest device's work for that layer

On the CPU alone a layer takes two exchanges, the head one. A GPU shares its layers with the CPU:
all are one exchange, with the head. A layer whose attention or predictor is on the host takes two
more, the head there one more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

GROUP_SIZE = 64
HOST = -1
ATTENTION, HEAD, PREDICTOR = "attention", "head", "predictor"


@dataclass(frozen=True, eq=False)
class Problem:
    """One model on one machine. Devices are the GPU, if there is one, then the CPU devices.

    Groups of a layer are sorted hottest first. A part (a layer's attention with its KV cache, the
    head, a layer's predictor) is on the GPU or on the host; there each CPU device holds a share of
    it in proportion to the memory that its neurons leave free. Attention on the host is that of the
    first layers, as a system has it.
    Shapes:  L layers, K groups, D devices, of them G = 0 or 1 a GPU, P parts
    Dtypes:  bytes and counts int64, seconds float64
    Units:   expected seconds a token
    """

    num_gpus: int  # 0 or 1
    budget_bytes: np.ndarray  # (D,)
    neuron_bytes: int
    group_sizes: np.ndarray  # (L, K) neurons; 0 where a layer has fewer groups
    group_seconds: np.ndarray  # (L, K, D)
    group_frequency: np.ndarray  # (L, K) mean share of a neuron's bytes that a token reads
    part_kinds: np.ndarray  # (P,) ATTENTION and PREDICTOR of all layers or none, HEAD
    part_bytes: np.ndarray  # (P,)
    part_seconds: np.ndarray  # (P, G + 1), the last column is the host
    exchange_s: float  # of one

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.group_seconds.shape[0]

    @property
    def num_devices(self) -> int:
        """The GPU and CPU devices."""
        return len(self.budget_bytes)


@dataclass(frozen=True, eq=False)
class Assignment:
    """The device index of every group and part, HOST for parts on the host.

    Shapes:  group_device (L, K), part_device (P,)
    Dtypes:  int16
    """

    group_device: np.ndarray
    part_device: np.ndarray


def neurons_on(problem: Problem, assignment: Assignment) -> np.ndarray:
    """How many neurons of each layer each device holds: (L, D) int64."""
    devices = np.arange(problem.num_devices)
    is_on = assignment.group_device[:, :, None] == devices
    return (problem.group_sizes[:, :, None] * is_on).sum(axis=1)


def count_exchanges(problem: Problem, assignment: Assignment) -> int:
    """Exchanges of a token."""
    if not problem.num_gpus:
        return 2 * problem.num_layers + 1
    on_host, kinds = assignment.part_device == HOST, problem.part_kinds
    apart = np.zeros(problem.num_layers, bool)
    for kind in (ATTENTION, PREDICTOR):
        if kind in kinds:
            apart |= on_host[kinds == kind]
    return 1 + 2 * int(apart.sum()) + int(on_host[kinds == HEAD].sum())


def device_seconds(problem: Problem, assignment: Assignment) -> np.ndarray:
    """Seconds of each device for each layer's neurons: (L, D)."""
    is_on = assignment.group_device[:, :, None] == np.arange(problem.num_devices)
    found: np.ndarray = (problem.group_seconds * is_on).sum(axis=1)
    return found


def part_seconds(problem: Problem, assignment: Assignment) -> np.ndarray:
    """Seconds of each part on its device: (P,). HOST, -1, is the last column."""
    return problem.part_seconds[np.arange(len(problem.part_bytes)), assignment.part_device]


def objective_s(problem: Problem, assignment: Assignment) -> float:
    """Expected seconds of a token, by the formula of this module."""
    layers = device_seconds(problem, assignment).max(axis=1).sum()
    parts = part_seconds(problem, assignment).sum()
    return float(count_exchanges(problem, assignment) * problem.exchange_s + parts + layers)


def neuron_bytes_on(problem: Problem, assignment: Assignment) -> np.ndarray:
    """Bytes of the neurons of each device: (D,) int64."""
    return neurons_on(problem, assignment).sum(axis=0) * problem.neuron_bytes


def part_bytes_on(problem: Problem, assignment: Assignment) -> np.ndarray:
    """Bytes of each part on each device: (P, D) int64, host parts spread over the CPU devices.

    Each part is divided in proportion to the memory that neurons leave free on each device.
    """
    gpus = problem.num_gpus
    free = (problem.budget_bytes - neuron_bytes_on(problem, assignment))[gpus:]
    found = np.zeros((len(problem.part_bytes), problem.num_devices), np.int64)
    ends = _host_ends(problem, assignment, free)
    for part, device in enumerate(assignment.part_device):
        if device == HOST:
            found[part, gpus:] = np.diff(ends[part], prepend=0)
        else:
            found[part, device] = problem.part_bytes[part]
    return found


def _host_ends(problem: Problem, assignment: Assignment, free: np.ndarray) -> dict[int, list[int]]:
    """Cumulative bytes of each host part over the CPU devices.

    The total of all host parts is divided first, so that no device gets a byte too much; the parts
    then fill these shares one after another.
    """
    parts = [part for part, device in enumerate(assignment.part_device) if device == HOST]
    left = shares(sum(int(problem.part_bytes[part]) for part in parts), free)
    ends = {}
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        cut = left if is_last else shares(int(problem.part_bytes[part]), np.array(left))
        left = [have - take for have, take in zip(left, cut, strict=True)]
        ends[part] = list(np.cumsum(cut))
    return ends


def shares(total: int, weights: np.ndarray) -> list[int]:
    """Divide `total` into integers in proportion to `weights`, none above its weight if all fit.

    Partial sums are the exact ones rounded down; equal shares if all weights are 0.
    """
    whole = [max(0, int(weight)) for weight in weights]
    if not sum(whole):
        whole = [1] * len(whole)
    ends, before, cut = sum(whole), 0, []
    reached = 0
    for weight in whole:
        reached += weight
        end = total * reached // ends
        cut.append(end - before)
        before = end
    return cut


def shortages(problem: Problem, assignment: Assignment) -> np.ndarray:
    """Bytes that each device and, last, all CPU devices together lack: (D + 1,), else 0."""
    gpus = problem.num_gpus
    neurons = neuron_bytes_on(problem, assignment)
    on_gpu = [
        problem.part_bytes[assignment.part_device == gpu].sum(dtype=np.int64) for gpu in range(gpus)
    ]
    host = problem.part_bytes[assignment.part_device == HOST].sum(dtype=np.int64)
    used = neurons + np.array([*on_gpu, *[0] * (problem.num_devices - gpus)], np.int64)
    lacking = np.append(
        used - problem.budget_bytes, neurons[gpus:].sum() + host - problem.budget_bytes[gpus:].sum()
    )
    return np.maximum(lacking, 0)


def merge_cpu_devices(problem: Problem) -> Problem:
    """The problem with one CPU device as fast and as large as all of them together.

    Its minimum is a lower bound of the problem's, as no CPU device then waits for another.
    """
    gpus = problem.num_gpus
    with np.errstate(divide="ignore"):
        together = 1 / (1 / problem.group_seconds[:, :, gpus:]).sum(axis=2, keepdims=True)
    budgets = problem.budget_bytes
    return replace(
        problem,
        budget_bytes=np.append(budgets[:gpus], budgets[gpus:].sum()),
        group_seconds=np.concatenate([problem.group_seconds[:, :, :gpus], together], axis=2),
    )
