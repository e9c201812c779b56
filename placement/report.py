"""A plan's report: bytes by device, expected time by part, solver figures, assumptions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.model.config.model_config import ModelConfig
from hotcold.placement.machine.description import Machine
from hotcold.placement.plan import PlanRequest
from hotcold.placement.profile import ActivationProfile
from hotcold.placement.solver.cost import PartCost, PlanDevice, PredictorCost
from hotcold.placement.solver.problem import (
    ATTENTION,
    HEAD,
    HOST,
    PREDICTOR,
    Assignment,
    Problem,
    count_exchanges,
    device_seconds,
    neuron_bytes_on,
    neurons_on,
    objective_s,
    part_bytes_on,
    part_seconds,
)
from hotcold.placement.solver.solver import Solution

_KINDS = (ATTENTION, HEAD, PREDICTOR)


@dataclass(frozen=True, eq=False)
class Expected:
    """The neuron bytes that each device reads for one token, and the neurons it computes.

    Shapes:  neuron_bytes, active_neurons (D,) float64
    """

    neuron_bytes: np.ndarray
    active_neurons: np.ndarray


def make_report(
    problem: Problem,
    devices: Sequence[PlanDevice],
    parts: PartCost,
    kv_bytes: int,
    expected: Expected,
    solution: Solution,
) -> dict[str, Any]:
    """Figures that JSON can hold: `devices`, `parts`, `token_s`, `tokens_per_s`, `solver`.

    A device has bytes by part, neurons and their share of the expected active ones; a part has
    bytes read a token, GB/s and ms. The parts' ms add up to token_s.
    """
    assignment = solution.assignment
    token_s = objective_s(problem, assignment)
    return {
        "devices": _devices(problem, devices, kv_bytes, expected, assignment),
        "parts": _parts(problem, devices, parts, expected, assignment),
        "token_s": token_s,
        "tokens_per_s": 1 / token_s if token_s else 0.0,
        "solver": {
            "seconds": solution.solve_s,
            "gap": solution.gap,
            "bound_s": solution.bound_s,
        },
    }


def _devices(
    problem: Problem,
    devices: Sequence[PlanDevice],
    kv_bytes: int,
    expected: Expected,
    assignment: Assignment,
) -> list[dict[str, Any]]:
    part_bytes = part_bytes_on(problem, assignment)
    kinds = problem.part_kinds
    held = {kind: part_bytes[kinds == kind].sum(axis=0) for kind in _KINDS}
    attention_total = int(problem.part_bytes[kinds == ATTENTION].sum())
    neuron_bytes = neuron_bytes_on(problem, assignment)
    neurons = neurons_on(problem, assignment).sum(axis=0)
    attention = assignment.part_device[kinds == ATTENTION]
    active_total = float(expected.active_neurons.sum())
    work_s = device_seconds(problem, assignment).sum(axis=0)
    found = []
    for index, device in enumerate(devices):
        # The ratio of cache to weights is the same in every layer, so in every piece of one.
        kv = int(held[ATTENTION][index]) * kv_bytes // max(1, attention_total)
        content = {
            "attention": int(held[ATTENTION][index]) - kv,
            "kv_cache": kv,
            "head": int(held[HEAD][index]),
            "predictors": int(held[PREDICTOR][index]),
            "neurons": int(neuron_bytes[index]),
        }
        used = sum(content.values())
        active = float(expected.active_neurons[index])
        found.append(
            {
                "name": device.name,
                "bytes": content,
                "used_bytes": used,
                "left_bytes": device.budget_bytes - used,
                "budget_bytes": device.budget_bytes,
                "free_bytes": device.free_bytes,
                "attention_layers": int((attention == index).sum()),
                "neurons": int(neurons[index]),
                "active_share": active / active_total if active_total else 0.0,
                "neuron_bytes_per_token": float(expected.neuron_bytes[index]),
                "neuron_ms": float(work_s[index]) * 1e3,
            }
        )
    return found


def _parts(
    problem: Problem,
    devices: Sequence[PlanDevice],
    parts: PartCost,
    expected: Expected,
    assignment: Assignment,
) -> list[dict[str, Any]]:
    kinds, seconds = problem.part_kinds, part_seconds(problem, assignment)
    found = []
    for kind in _KINDS:
        for device in (*range(problem.num_gpus), HOST):
            chosen = (kinds == kind) & (assignment.part_device == device)
            if chosen.any():
                where = "host" if device == HOST else devices[device].name
                found.append(
                    {
                        "name": kind,
                        "where": where,
                        "count": int(chosen.sum()),
                        **_speed(parts.read_bytes[chosen].sum(), seconds[chosen].sum()),
                        "why": "bytes over bandwidth",
                    }
                )
    slowest_s = device_seconds(problem, assignment).max(axis=1).sum()
    found.append(
        {
            "name": "neurons",
            "where": "all",
            "count": int(problem.group_sizes.sum()),
            **_speed(expected.neuron_bytes.sum(), slowest_s),
            "why": "the slowest device of each layer",
        }
    )
    num_exchanges = count_exchanges(problem, assignment)
    found.append(
        {
            "name": "exchanges",
            "where": "all",
            "count": num_exchanges,
            **_speed(0, num_exchanges * problem.exchange_s),
            "why": "two a layer, one for the head; one for all that a GPU has or shares",
        }
    )
    return found


def _speed(read_bytes: float, seconds: float) -> dict[str, float]:
    return {
        "bytes_per_token": float(read_bytes),
        "gb_per_s": float(read_bytes / seconds / 1e9) if seconds else 0.0,
        "ms": float(seconds) * 1e3,
    }


def assumptions(
    config: ModelConfig,
    machine: Machine,
    request: PlanRequest,
    profile: ActivationProfile | None,
    predictor: PredictorCost | None,
) -> Iterator[str]:
    """What a plan assumes: a clause for each assumption, the most important first."""
    is_counted = profile is not None and not profile.is_stated
    if not is_counted and config.experts is not None:
        yield "tokens choose all experts equally often (no profile; `hotcold profile` counts)"
    elif profile is None and config.is_sparse:
        yield "every neuron fires at every token (no profile; `hotcold profile` counts)"
    elif profile is None:
        yield "every neuron fires at every token: no activation is exactly zero"
    if profile is not None and profile.is_stated:
        yield profile.text_name
    if predictor is not None and predictor.note:
        yield predictor.note
    if machine.was_busy:
        yield (
            f"{machine.name} reads no faster than it did on {machine.date} while other programs "
            f"took {machine.busy_cores:.1f} of its cores (`hotcold doctor --fresh` measures again)"
        )
    if not machine.date:
        yield f"{machine.name} is as fast as its description says"
    for gpu in machine.gpus:
        if machine.date and not gpu.measured:
            yield (
                f"{gpu.name} reads {gpu.read_gb_per_s:.0f} GB/s, and {gpu.link_gb_per_s:.0f} GB/s "
                "from the host (not measured)"
            )
    yield f"one request at a time, whose {request.context_length} positions are half full"
