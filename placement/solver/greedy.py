"""The greedy placement: parts first, then the hottest groups go to the GPUs.

It is the baseline for the solver's placement, and the result where the solver finds none in time.
"""

from __future__ import annotations

import numpy as np

from hotcold.placement.solver.problem import ATTENTION, HEAD, HOST, Assignment, Problem

_PART_ORDER = (ATTENTION, HEAD)  # of what a GPU may hold


def hottest_first(problem: Problem) -> Assignment | None:
    """Fill the GPUs, fastest first: attention, head, then groups by frequency.

    A part goes to the GPU only if that is faster, unless it does not fit on the host. Cold groups
    are balanced over the CPU devices in every layer, as far as memory allows. None where something
    does not fit.
    """
    for only_if_faster in (True, False):
        part_device, free = _place_parts(problem, only_if_faster)
        group_device = _place_hot(problem, free)
        found = assign_cold(problem, Assignment(group_device, part_device))
        if found is not None:
            return found
    return None


def _place_parts(problem: Problem, only_if_faster: bool) -> tuple[np.ndarray, np.ndarray]:
    """Device of each part, and the bytes left on each GPU.

    The last layer's attention comes first; where one stays on the host, those before it do.
    """
    free = problem.budget_bytes[: problem.num_gpus].copy()
    device = np.full(len(problem.part_kinds), HOST, np.int16)
    for kind in _PART_ORDER:
        parts = [part for part, name in enumerate(problem.part_kinds) if name == kind]
        for part in reversed(parts):
            *on_gpu, on_host = problem.part_seconds[part]
            for gpu in np.argsort(on_gpu, kind="stable"):
                is_wanted = on_gpu[gpu] < on_host or not only_if_faster
                if is_wanted and problem.part_bytes[part] <= free[gpu]:
                    device[part] = gpu
                    free[gpu] -= problem.part_bytes[part]
                    break
            if device[part] == HOST:
                break
    return device, free


def _place_hot(problem: Problem, free: np.ndarray) -> np.ndarray:
    """Device of each group, HOST for cold ones; layers with too few hot neurons get none.

    As long as layers have too few, the one with the fewest gives them up, and the others are filled
    again.
    """
    order = np.argsort(-problem.group_frequency, axis=None, kind="stable")
    sizes = problem.layer_sizes[:, None]
    is_allowed = problem.min_neurons <= sizes
    while True:
        device = _fill(problem, free, order, is_allowed)
        is_on = device[:, :, None] == np.arange(problem.num_gpus)
        count = (problem.group_sizes[:, :, None] * is_on).sum(axis=1)
        is_short = (count > 0) & (count < problem.min_neurons)
        if not is_short.any():
            return device
        fewest = np.where(is_short, count, sizes.max() + 1).argmin()
        is_allowed.flat[fewest] = False


def _fill(
    problem: Problem, free: np.ndarray, order: np.ndarray, is_allowed: np.ndarray
) -> np.ndarray:
    num_groups, sizes = problem.group_sizes.shape[1], problem.group_sizes.flat
    device = np.full(problem.group_seconds.shape[:2], HOST, np.int16)
    by_speed = np.argsort(problem.group_seconds[:, :, : problem.num_gpus].sum(axis=(0, 1)))
    for gpu in by_speed:
        is_open = (device.flat[order] == HOST) & is_allowed[order // num_groups, gpu]
        is_open &= sizes[order] > 0
        groups = order[is_open]
        end_bytes = np.cumsum(sizes[groups]) * problem.neuron_bytes
        device.flat[groups[end_bytes <= free[gpu]]] = gpu
    return device


def assign_cold(problem: Problem, assignment: Assignment) -> Assignment | None:
    """Assign every group on no GPU to the CPU device that would finish it first.

    Hottest first in every layer, to balance the devices. None if a group does not fit.
    """
    gpus = problem.num_gpus
    host_bytes = problem.part_bytes[assignment.part_device == HOST].sum()
    free = problem.budget_bytes[gpus:].tolist()
    total_free = sum(free) - int(host_bytes)
    group_bytes = (problem.group_sizes * problem.neuron_bytes).tolist()
    is_cold = (assignment.group_device < 0) | (assignment.group_device >= gpus)
    device = assignment.group_device.copy()
    for layer in range(problem.num_layers):
        seconds, own_bytes = problem.group_seconds[layer, :, gpus:].tolist(), group_bytes[layer]
        done_s = [0.0] * len(free)
        for group in np.flatnonzero(is_cold[layer]).tolist():
            fitting = [i for i, left in enumerate(free) if own_bytes[group] <= left]
            total_free -= own_bytes[group]
            if total_free < 0 or not fitting:
                return None
            _, _, best = min((done_s[i] + seconds[group][i], -free[i], i) for i in fitting)
            done_s[best] += seconds[group][best]
            free[best] -= own_bytes[group]
            device[layer, group] = gpus + best
    return Assignment(device, assignment.part_device) if total_free >= 0 else None
