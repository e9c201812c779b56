"""Makes a placement plan: computes costs, solves, maps groups of neurons back to neurons."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.weights.sizes import kv_cache_bytes
from hotcold.placement.machine.description import Machine
from hotcold.placement.plan import PlacementPlan, PlanRequest
from hotcold.placement.profile import ActivationProfile
from hotcold.placement.report import Expected, assumptions, make_report
from hotcold.placement.solver.cost import (
    PlanDevice,
    PredictorCost,
    RowBytes,
    gpu_read_bytes,
    group_order,
    make_problem,
    part_costs,
    read_bytes,
)
from hotcold.placement.solver.plan_devices import make_plan_devices
from hotcold.placement.solver.problem import ATTENTION, HEAD, Assignment, Problem
from hotcold.placement.solver.solver import solve


def make_plan(
    config: ModelConfig,
    machine: Machine,
    profile: ActivationProfile | None,
    request: PlanRequest,
    *,
    predictor: PredictorCost | None = None,
    host_reserve_bytes: int = 0,
    time_limit_s: float = 10.0,
) -> PlacementPlan:
    """Place the model `config` (of the checkpoint's dtype) on `machine` as `request` asks.

    Without a profile every neuron counts as always firing. `host_reserve_bytes` is the memory of
    processes and arena on the host.
    Errors:  MemoryBudgetError where it does not fit
    """
    devices = make_plan_devices(
        machine,
        num_cpu_actors=request.num_cpu_actors,
        gpu_memory_bytes=request.gpu_memory_bytes,
        cpu_memory_bytes=request.cpu_memory_bytes,
        host_reserve_bytes=host_reserve_bytes,
    )
    if profile is None:
        frequency = np.ones((config.num_layers, config.ffn_size))
    else:
        frequency = profile.frequency
    factor = None if predictor is None else predictor.selected_factor
    parts = part_costs(config, request.context_length, request.kv_dtype, predictor)
    problem = make_problem(
        config, devices, frequency, request.mode, parts, machine.exchange_us, factor
    )
    solution = solve(problem, time_limit_s=time_limit_s)
    neuron_device = neuron_places(problem, solution.assignment, frequency)
    kv = kv_cache_bytes(config, request.context_length, request.kv_dtype)
    expected = _expected(config, devices, frequency, request.mode, factor, neuron_device)
    part_device = solution.assignment.part_device
    kinds = np.array(problem.part_kinds)
    return PlacementPlan(
        request=request,
        device_names=tuple(device.name for device in devices),
        neuron_device=neuron_device,
        attention_device=part_device[kinds == ATTENTION],
        head_device=int(part_device[kinds == HEAD][0]),
        report={
            **make_report(problem, devices, parts, kv, expected, solution),
            "assumed": list(assumptions(machine, request, profile, predictor)),
        },
    )


def neuron_places(problem: Problem, assignment: Assignment, frequency: np.ndarray) -> np.ndarray:
    """The device of each neuron, by that of its group: (L, N) int16. frequency (L, N)."""
    by_rank = np.repeat(assignment.group_device, problem.group_sizes, axis=1)
    places = np.empty_like(by_rank)
    np.put_along_axis(places, group_order(frequency), by_rank, axis=1)
    return places


def _expected(
    config: ModelConfig,
    devices: Sequence[PlanDevice],
    frequency: np.ndarray,
    mode: str,
    selected_factor: np.ndarray | None,
    neuron_device: np.ndarray,
) -> Expected:
    rows = RowBytes.of(config)
    on_gpu = gpu_read_bytes(rows, frequency, mode)
    first, rest = read_bytes(rows, frequency, mode, selected_factor)
    held = [neuron_device == index for index in range(len(devices))]
    read = [
        (on_gpu if device.is_gpu else first + rest)[mask].sum()
        for device, mask in zip(devices, held, strict=True)
    ]
    return Expected(np.array(read), np.array([frequency[mask].sum() for mask in held]))
