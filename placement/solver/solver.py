"""Solves the placement: an integer program by HiGHS, or the greedy placement if better."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from hotcold.model.byte_sizes import binary_text
from hotcold.model.errors import MemoryBudgetError
from hotcold.placement.solver.greedy import assign_cold, hottest_first
from hotcold.placement.solver.problem import (
    ATTENTION,
    HEAD,
    PREDICTOR,
    Assignment,
    Problem,
    keeps_min_neurons,
    merge_cpu_devices,
    objective_s,
    shortages,
)
from hotcold.placement.solver.program import build_program, make_classes, read_solution

# A group is 1/448 of a layer of 28672 neurons: groups are too coarse for a smaller gap.
MIP_GAP = 1e-3
_EXACT_GROUPS = 1000  # all layers' together
_MIN_TIME_S = 0.1
_PART_NAMES = {
    ATTENTION: "attention weights and KV cache",
    HEAD: "head's weights",
    PREDICTOR: "predictors",
}
_REMEDY = "give more --cpu-memory or --gpu-memory, a smaller --context or a smaller model"


@dataclass(frozen=True, eq=False)
class Solution:
    """A placement and its quality.

    `bound_s` is a lower bound of the seconds, with groups of one class taken as equal; `gap` is the
    objective's distance from it, relative to the objective.
    """

    assignment: Assignment
    method: str  # "milp" or "greedy"
    objective_s: float
    bound_s: float
    solve_s: float
    keeps_min_neurons: bool  # False where memory left no choice

    @property
    def gap(self) -> float:
        """From 0, proven best, to 1, nothing known."""
        return max(0.0, 1 - self.bound_s / self.objective_s) if self.objective_s else 0.0


def solve(problem: Problem, *, time_limit_s: float = 10.0, mip_gap: float = MIP_GAP) -> Solution:
    """Find the placement with the fewest expected seconds.

    The greedy placement is always computed too, and the better one returned. If the budgets allow
    no placement with `min_neurons`, that rule is dropped.
    Units:   seconds; `mip_gap` is relative
    Errors:  MemoryBudgetError where something fits nowhere
    """
    started = time.perf_counter()
    require_fit(problem)
    for allowed in (problem, _without_min_neurons(problem)):
        greedy = hottest_first(allowed)
        unit_s = _unit_s(allowed, greedy)
        found, bound_s = _solve_program(allowed, unit_s, started + time_limit_s, mip_gap)
        candidates = [
            (objective_s(allowed, assignment), method, assignment)
            for method, assignment in (("milp", found), ("greedy", greedy))
            if assignment is not None
        ]
        if candidates:
            seconds, method, assignment = min(candidates, key=lambda entry: entry[0])
            solve_s = time.perf_counter() - started
            keeps = keeps_min_neurons(problem, assignment)
            return Solution(assignment, method, seconds, min(bound_s, seconds), solve_s, keeps)
    raise _fragmented(problem)


def require_fit(problem: Problem) -> None:
    """Raise MemoryBudgetError for the first part that the devices together cannot hold."""
    total = left = int(problem.budget_bytes.sum())
    for what, num_bytes in _needs(problem):
        if num_bytes > left:
            raise MemoryBudgetError(
                f"the {what} do not fit: they need {binary_text(num_bytes)}, {binary_text(left)} "
                f"are left of the {binary_text(total)} that reserves leave on all devices, "
                f"{binary_text(num_bytes - left)} are missing; {_REMEDY}"
            )
        left -= num_bytes


def _needs(problem: Problem) -> list[tuple[str, int]]:
    """Names and bytes of all parts, in the order in which they are placed."""
    kinds = np.array(problem.part_kinds)
    parts = [
        (name, int(problem.part_bytes[kinds == kind].sum())) for kind, name in _PART_NAMES.items()
    ]
    neurons = int(problem.group_sizes.sum()) * problem.neuron_bytes
    return [*parts, ("FFN neurons", neurons)]


def _fragmented(problem: Problem) -> MemoryBudgetError:
    """The error where all fits in the devices' total memory, but not device by device."""
    need = sum(num_bytes for _, num_bytes in _needs(problem))
    there = int(problem.budget_bytes.sum())
    group = int(problem.group_sizes.max()) * problem.neuron_bytes
    return MemoryBudgetError(
        "the FFN neurons do not fit in the devices' separate memories: the model needs "
        f"{binary_text(need)}, {binary_text(there)} are there, but a group of neurons stays whole "
        f"and up to {binary_text(problem.num_devices * group)} are missing; {_REMEDY}"
    )


def _without_min_neurons(problem: Problem) -> Problem:
    return replace(problem, min_neurons=np.zeros_like(problem.min_neurons))


def _unit_s(problem: Problem, greedy: Assignment | None) -> float:
    """A unit close to a layer's time, so that the solver's absolute tolerances are small."""
    if greedy is None:
        seconds = float(problem.group_seconds.mean(axis=2).sum())
    else:
        seconds = objective_s(replace(problem, exchange_s=0.0), greedy) - problem.fixed_s
    return seconds / problem.num_layers or 1.0


def _solve_program(
    problem: Problem, unit_s: float, deadline: float, mip_gap: float
) -> tuple[Assignment | None, float]:
    """The best placement found in time, or None, and a lower bound in seconds.

    A large problem is solved with its CPU devices merged, which makes it much smaller; cold groups
    are then assigned greedily.
    """
    num_groups = problem.group_seconds[:, :, 0].size
    if num_groups < _EXACT_GROUPS or problem.num_devices - problem.num_gpus == 1:
        return _solve_exactly(problem, unit_s, deadline, mip_gap)
    merged, bound_s = _solve_exactly(merge_cpu_devices(problem), unit_s, deadline, mip_gap)
    found = None if merged is None else assign_cold(problem, merged)
    if found is None:
        return _solve_exactly(problem, unit_s, deadline, mip_gap)
    return found, bound_s


def _solve_exactly(
    problem: Problem, unit_s: float, deadline: float, mip_gap: float
) -> tuple[Assignment | None, float]:
    from scipy.optimize import Bounds, LinearConstraint, milp

    left_s = max(_MIN_TIME_S, deadline - time.perf_counter())
    classes = make_classes(problem)
    program = build_program(problem, classes, unit_s)
    result = milp(
        program.cost,
        integrality=program.integrality,
        bounds=Bounds(program.low, program.high),
        constraints=LinearConstraint(program.matrix.tocsc(), program.row_low, program.row_high),
        options={"time_limit": left_s, "mip_rel_gap": mip_gap},
    )
    bound = result.get("mip_dual_bound")
    known = bound is not None and np.isfinite(bound)
    bound_s = float(bound) * unit_s if known else 0.0
    if result.x is None:
        return None, bound_s
    found = read_solution(problem, classes, result.x)
    # The solver's tolerance may break a budget by some bytes.
    if shortages(problem, found).any() or not keeps_min_neurons(problem, found):
        return None, bound_s
    return found, bound_s
