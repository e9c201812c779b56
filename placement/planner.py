"""Makes a placement plan: computes costs, solves, maps groups of neurons back to neurons."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotcold.model.config import neurons
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.weights.sizes import kv_cache_bytes
from hotcold.placement.machine.description import Machine
from hotcold.placement.plan import PlacementPlan, PlanRequest
from hotcold.placement.profile import ActivationProfile, Rates, rates_of
from hotcold.placement.report import Expected, assumptions, make_report
from hotcold.placement.solver.cost import (
    Groups,
    PartCost,
    PlanDevice,
    PredictorCost,
    RowBytes,
    gpu_read_bytes,
    hotness,
    make_groups,
    make_problem,
    part_costs,
    read_bytes,
)
from hotcold.placement.solver.divide import solve_divided
from hotcold.placement.solver.plan_devices import make_plan_devices
from hotcold.placement.solver.problem import ATTENTION, HEAD, Assignment, Problem
from hotcold.placement.solver.solver import require_fit


def make_plan(
    config: ModelConfig,
    machine: Machine,
    profile: ActivationProfile | None,
    request: PlanRequest,
    predictor: PredictorCost | None = None,
    host_reserve_bytes: int = 0,
    *,
    time_limit_s: float = 10.0,
) -> PlacementPlan:
    """Place the model `config` (of the checkpoint's dtype) on `machine` as `request` asks.

    Without a profile every neuron counts as always firing, or in experts, which are then chosen
    equally often, whenever its expert is chosen. `host_reserve_bytes` is the memory of processes
    and arena on the host.
    Errors:  MemoryBudgetError where it does not fit
    """
    posed = _posed(config, machine, profile, request, predictor, host_reserve_bytes)
    devices = posed.devices
    problem, groups, solution = solve_divided(
        posed.problem, posed.groups, time_limit_s=time_limit_s
    )
    neuron_device = neuron_places(config, groups, solution.assignment)
    kv = kv_cache_bytes(config, request.context_length, request.kv_dtype)
    expected = _expected(config, posed, request.mode, neuron_device)
    part_device = solution.assignment.part_device
    kinds = np.array(problem.part_kinds)
    return PlacementPlan(
        request=request,
        device_names=tuple(device.name for device in devices),
        neuron_device=neuron_device,
        attention_device=part_device[kinds == ATTENTION],
        head_device=int(part_device[kinds == HEAD][0]),
        machine=machine,
        report={
            **make_report(problem, devices, posed.parts, kv, expected, solution),
            "assumed": list(assumptions(config, machine, request, profile, predictor)),
        },
    )


def require_room(
    config: ModelConfig,
    machine: Machine,
    profile: ActivationProfile | None,
    request: PlanRequest,
    predictor: PredictorCost | None = None,
    host_reserve_bytes: int = 0,
) -> None:
    """Raise MemoryBudgetError where `make_plan` would for want of memory, whatever the speeds."""
    require_fit(_posed(config, machine, profile, request, predictor, host_reserve_bytes).problem)


@dataclass(frozen=True, eq=False)
class _Posed:
    """What is to be solved, and what it is made of."""

    devices: tuple[PlanDevice, ...]
    rates: Rates
    groups: Groups
    parts: PartCost
    selected_factor: np.ndarray | None
    problem: Problem


def _posed(
    config: ModelConfig,
    machine: Machine,
    profile: ActivationProfile | None,
    request: PlanRequest,
    predictor: PredictorCost | None,
    host_reserve_bytes: int,
) -> _Posed:
    devices = make_plan_devices(
        machine,
        num_cpu_actors=request.num_cpu_actors,
        gpu_memory_bytes=request.gpu_memory_bytes,
        cpu_memory_bytes=request.cpu_memory_bytes,
        host_reserve_bytes=host_reserve_bytes,
    )
    rates = rates_of(config, profile)
    groups = make_groups(config, hotness(config, rates))
    factor = None if predictor is None else predictor.selected_factor
    parts = part_costs(config, request.context_length, request.kv_dtype, predictor)
    problem = make_problem(
        config, devices, rates, groups, request.mode, parts, machine.exchange_us, factor
    )
    return _Posed(devices, rates, groups, parts, factor, problem)


def neuron_places(config: ModelConfig, groups: Groups, assignment: Assignment) -> np.ndarray:
    """The device of each neuron, by that of its group: (L, N) int16, -1 where there is none."""
    places = np.full(neurons.shape(config), -1, np.int16)
    for layer, size in enumerate(config.ffn_sizes):
        by_rank = np.repeat(assignment.group_device[layer], groups.sizes[layer])
        places[layer, groups.order[layer, :size]] = by_rank
    return places


def _expected(config: ModelConfig, posed: _Posed, mode: str, neuron_device: np.ndarray) -> Expected:
    rows, rates, devices = RowBytes.of(config), posed.rates, posed.devices
    on_gpu = gpu_read_bytes(rows, rates, mode)
    first, rest = read_bytes(rows, rates, mode, posed.selected_factor)
    held = [neuron_device == index for index in range(len(devices))]
    read = [
        (on_gpu if device.is_gpu else first + rest)[mask].sum()
        for device, mask in zip(devices, held, strict=True)
    ]
    return Expected(np.array(read), np.array([rates.fired[mask].sum() for mask in held]))
