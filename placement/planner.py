"""Makes a placement plan: computes costs, solves, maps groups of neurons back to neurons."""

from __future__ import annotations

import numpy as np

from hotcold.model.config import neurons
from hotcold.model.config.model_config import ModelConfig
from hotcold.placement.machine.description import Machine
from hotcold.placement.plan import PlacementPlan, PlanRequest
from hotcold.placement.profile import ActivationProfile, rates_of
from hotcold.placement.report import Expected, assumptions, make_report
from hotcold.placement.solver.cost import (
    Groups,
    PredictorCost,
    RowBytes,
    hotness,
    make_groups,
    make_problem,
    part_costs,
    read_bytes,
)
from hotcold.placement.solver.divide import solve_divided
from hotcold.placement.solver.plan_devices import make_plan_devices
from hotcold.placement.solver.problem import ATTENTION, HEAD, Assignment
from hotcold.placement.solver.solver import require_fit


class Planner:
    """Places the model `config`, in the formats that it is loaded in, as a request asks."""

    def __init__(
        self,
        config: ModelConfig,
        machine: Machine,
        profile: ActivationProfile | None,
        request: PlanRequest,
        kv_bytes: int,
        host_reserve_bytes: int = 0,
        predictor: PredictorCost | None = None,
    ) -> None:
        """Without a profile every neuron counts as always firing, or in experts, which are then
        chosen equally often, whenever its expert is chosen.

        `kv_bytes` are those of the KV cache, `host_reserve_bytes` those of processes and arena.
        """
        self._config, self._machine, self._request = config, machine, request
        self._profile, self._predictor, self._kv_bytes = profile, predictor, kv_bytes
        self._devices = make_plan_devices(
            machine,
            num_cpu_actors=request.num_cpu_actors,
            gpu_memory_bytes=request.gpu_memory_bytes,
            cpu_memory_bytes=request.cpu_memory_bytes,
            host_reserve_bytes=host_reserve_bytes,
        )
        self._rates = rates_of(config, profile)
        self._groups = make_groups(config, hotness(config, self._rates))
        self._selected_factor = None if predictor is None else predictor.selected_factor
        context, kv_dtype = request.context_length, request.kv_dtype
        self._parts = part_costs(config, context, kv_dtype, kv_bytes, predictor)
        self._problem = make_problem(
            config,
            self._devices,
            self._rates,
            self._groups,
            request.mode,
            self._parts,
            machine.exchange_us,
            self._selected_factor,
        )

    def require_room(self) -> None:
        """Raise MemoryBudgetError where `plan` would for want of memory, whatever the speeds."""
        require_fit(self._problem)

    def plan(self, time_limit_s: float) -> PlacementPlan:
        """The plan. Errors: MemoryBudgetError where the model does not fit."""
        config, request = self._config, self._request
        problem, groups, solution = solve_divided(
            self._problem, self._groups, time_limit_s=time_limit_s
        )
        neuron_device = neuron_places(config, groups, solution.assignment)
        part_device, kinds = solution.assignment.part_device, problem.part_kinds
        expected = self._expected(neuron_device)
        report = make_report(
            problem, self._devices, self._parts, self._kv_bytes, expected, solution
        )
        assumed = assumptions(config, self._machine, request, self._profile, self._predictor)
        return PlacementPlan(
            request=request,
            device_names=tuple(device.name for device in self._devices),
            neuron_device=neuron_device,
            attention_device=part_device[kinds == ATTENTION],
            head_device=int(part_device[kinds == HEAD][0]),
            machine=self._machine,
            report={**report, "assumed": list(assumed)},
        )

    def _expected(self, neuron_device: np.ndarray) -> Expected:
        rates, mode = self._rates, self._request.mode
        first, rest = read_bytes(RowBytes.of(self._config), rates, mode, self._selected_factor)
        held = [neuron_device == index for index in range(len(self._devices))]
        read = np.array([(first + rest)[mask].sum() for mask in held])
        return Expected(read, np.array([rates.fired[mask].sum() for mask in held]))


def neuron_places(config: ModelConfig, groups: Groups, assignment: Assignment) -> np.ndarray:
    """The device of each neuron, by that of its group: (L, N) int16, -1 where there is none."""
    places = np.full(neurons.shape(config), -1, np.int16)
    for layer, size in enumerate(config.ffn_sizes):
        by_rank = np.repeat(assignment.group_device[layer], groups.sizes[layer])
        places[layer, groups.order[layer, :size]] = by_rank
    return places
