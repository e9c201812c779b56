"""Cold neurons, divided over the CPU devices: whichever a token needs, all have work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hotcold.placement.solver.cost import Groups
from hotcold.placement.solver.problem import (
    HOST,
    Assignment,
    Problem,
    merge_cpu_devices,
    objective_s,
    shortages,
)
from hotcold.placement.solver.solver import Solution, fragmented, solve


def solve_divided(
    problem: Problem, groups: Groups, *, time_limit_s: float = 10.0
) -> tuple[Problem, Groups, Solution]:
    """Solve with all CPU devices as one, then divide each of its groups among them.

    The groups returned have one piece for each CPU device: in proportion to its speed, as far as
    memory allows, and dealt in turn, as neighbours may fire alike. `problem` and solution are in
    these.
    Errors:  MemoryBudgetError where something fits nowhere
    """
    solution = solve(merge_cpu_devices(problem), time_limit_s=time_limit_s)
    if problem.num_devices - problem.num_gpus == 1:
        return problem, groups, solution
    on_gpu = solution.assignment.group_device < problem.num_gpus
    on_gpu &= solution.assignment.group_device != HOST
    order, sizes = _deal(problem, groups, on_gpu)
    divided, places = _in_pieces(problem, solution.assignment, on_gpu, sizes)
    if shortages(divided, places).any():
        raise fragmented(problem)
    found = replace(solution, assignment=places, objective_s=objective_s(divided, places))
    return divided, Groups(order, sizes), found


def _deal(problem: Problem, groups: Groups, on_gpu: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Order and sizes of the pieces, C of each group; a group on a GPU stays one piece."""
    num_cpus = problem.num_devices - problem.num_gpus
    order, sizes = groups.order.copy(), np.zeros((*groups.sizes.shape, num_cpus), np.int64)
    weights = _weights(problem, int(groups.sizes[~on_gpu].sum()))
    owed = np.zeros(num_cpus)  # what a device should have had so far, less what it has
    for layer, own in enumerate(groups.sizes):
        ends = np.cumsum(own)
        for group, size in enumerate(own.tolist()):
            if on_gpu[layer, group] or size == 0:
                sizes[layer, group, 0] = size
                continue
            owed += size * weights
            counts = np.maximum(0, np.floor(owed)).astype(np.int64)
            while (left := size - int(counts.sum())) != 0:
                device = (owed - counts).argmax() if left > 0 else (counts - owed).argmax()
                counts[device] += 1 if left > 0 else -1
            owed -= counts
            ids = order[layer, ends[group] - size : ends[group]]
            ids[:] = ids[np.argsort(_interleaved(counts), kind="stable")]
            sizes[layer, group] = counts
    return order, sizes.reshape(len(sizes), -1)


def _weights(problem: Problem, num_cold: int) -> np.ndarray:
    """The share of the cold neurons that each CPU device gets: (C,), adding up to 1."""
    gpus = problem.num_gpus
    speeds = 1 / np.maximum(problem.group_seconds[:, :, gpus:].sum(axis=(0, 1)), 1e-30)
    most = problem.budget_bytes[gpus:] // problem.neuron_bytes
    found, is_full = np.zeros(len(most)), np.zeros(len(most), bool)
    while not is_full.all():
        left = num_cold - most[is_full].sum()
        found = np.where(is_full, most, left * speeds / speeds[~is_full].sum())
        if not (found[~is_full] > most[~is_full]).any():
            break
        is_full |= found > most
    return found / max(found.sum(), 1e-30)


def _in_pieces(
    problem: Problem, assignment: Assignment, on_gpu: np.ndarray, sizes: np.ndarray
) -> tuple[Problem, Assignment]:
    """The problem with groups of these sizes, and where they are."""
    num_cpus, num_devices = problem.num_devices - problem.num_gpus, problem.num_devices
    layers, count = problem.group_sizes.shape
    shares = sizes.reshape(layers, count, num_cpus) / np.maximum(problem.group_sizes, 1)[..., None]
    seconds = problem.group_seconds[:, :, None] * shares[..., None]
    divided = replace(
        problem,
        group_sizes=sizes,
        group_seconds=seconds.reshape(layers, -1, num_devices),
        group_frequency=np.repeat(problem.group_frequency, num_cpus, axis=1),
    )
    cpus = problem.num_gpus + np.arange(num_cpus)
    places = np.where(on_gpu[..., None], assignment.group_device[..., None], cpus)
    return divided, replace(assignment, group_device=places.reshape(layers, -1).astype(np.int16))


def _interleaved(counts: np.ndarray) -> np.ndarray:
    """Each i counts[i] times, evenly spread: 2 and 4 give 1 0 1 1 0 1."""
    columns = np.repeat(np.arange(len(counts)), counts)
    number = np.concatenate([np.arange(count) for count in counts])
    return columns[np.argsort((number + 0.5) / counts[columns], kind="stable")]
