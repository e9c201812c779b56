"""Solves the placement, an integer program, by HiGHS."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from hotcold.model.byte_sizes import binary_text
from hotcold.model.errors import MemoryBudgetError
from hotcold.placement.solver.problem import (
    ATTENTION,
    HEAD,
    PREDICTOR,
    Assignment,
    Problem,
    objective_s,
    shortages,
)
from hotcold.placement.solver.program import build_program, make_classes, read_solution

# A group is 1/448 of a layer of 28672 neurons: groups are too coarse for a smaller gap.
MIP_GAP = 1e-3
_MIN_TIME_S = 0.1
_OUT_OF_TIME = 1  # status of scipy.optimize.milp
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
    objective_s: float
    bound_s: float
    solve_s: float

    @property
    def gap(self) -> float:
        """From 0, proven best, to 1, nothing known."""
        return max(0.0, 1 - self.bound_s / self.objective_s) if self.objective_s else 0.0


def solve(problem: Problem, *, time_limit_s: float = 10.0, mip_gap: float = MIP_GAP) -> Solution:
    """Find the placement with the fewest expected seconds; `problem` has one CPU device.

    At least the first placement that is found is waited for.
    Units:   seconds; `mip_gap` is relative
    Errors:  MemoryBudgetError where something fits nowhere
    """
    started = time.perf_counter()
    require_fit(problem)
    # The solver's tolerance may break a budget by some bytes; then a group's are set aside.
    for aside in (0, int(problem.group_sizes.max()) * problem.neuron_bytes):
        tried = replace(problem, budget_bytes=np.maximum(0, problem.budget_bytes - aside))
        found, bound_s = _solve(tried, started + time_limit_s, mip_gap)
        if found is None:
            break
        if not shortages(problem, found).any():
            seconds = objective_s(problem, found)
            solve_s = time.perf_counter() - started
            return Solution(found, seconds, min(bound_s, seconds), solve_s)
    raise fragmented(problem)


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
    parts = [
        (name, int(problem.part_bytes[problem.part_kinds == kind].sum()))
        for kind, name in _PART_NAMES.items()
    ]
    neurons = int(problem.group_sizes.sum()) * problem.neuron_bytes
    return [*parts, ("FFN neurons", neurons)]


def fragmented(problem: Problem) -> MemoryBudgetError:
    """The error where all fits in the devices' total memory, but not device by device."""
    need = sum(num_bytes for _, num_bytes in _needs(problem))
    there = int(problem.budget_bytes.sum())
    group = int(problem.group_sizes.max()) * problem.neuron_bytes
    return MemoryBudgetError(
        "the FFN neurons do not fit in the devices' separate memories: the model needs "
        f"{binary_text(need)}, {binary_text(there)} are there, but a group of neurons stays whole "
        f"and up to {binary_text(problem.num_devices * group)} are missing; {_REMEDY}"
    )


def _solve(problem: Problem, deadline: float, mip_gap: float) -> tuple[Assignment | None, float]:
    """The best placement found in time, and a lower bound in seconds; None where there is none.

    Seconds are in units of about a layer's, so that the solver's absolute tolerances are small.
    """
    from scipy.optimize import milp

    unit_s = float(problem.group_seconds.mean(axis=2).sum()) / problem.num_layers or 1.0
    classes = make_classes(problem)
    program = build_program(problem, classes, unit_s)
    left_s = max(_MIN_TIME_S, deadline - time.perf_counter())
    any_in_time = {"time_limit": left_s, "mip_rel_gap": mip_gap}
    first_found = {"mip_rel_gap": 1.0}
    for options in (any_in_time, first_found):
        result = milp(**program, options=options)
        if result.x is not None:
            bound = result.get("mip_dual_bound")
            known = bound is not None and np.isfinite(bound)
            return read_solution(problem, classes, result.x), bound * unit_s if known else 0.0
        if result.status != _OUT_OF_TIME:
            break
    return None, 0.0
