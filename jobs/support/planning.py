"""What `hotcold plan` asks of the planner: for one model, options and machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.options import QUANTIZED, SystemOptions
from hotcold.actors.setup.account import account
from hotcold.actors.setup.placement_choice import plan_request
from hotcold.jobs.support.offload_plan import (
    OffloadPlan,
    Stored,
    offload_plans,
    stored_config,
    stored_model,
)
from hotcold.jobs.support.planned_model import (
    PlannedModel,
    planned_in_memory,
    planned_predictors,
    planned_system,
)
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import loaded_config
from hotcold.model.errors import MemoryBudgetError, UsageError
from hotcold.placement.machine.description import Machine
from hotcold.placement.machine.this_machine import this_machine, unmeasured_machine
from hotcold.placement.plan import PlacementPlan, PlanRequest
from hotcold.placement.planner import make_plan, require_room
from hotcold.placement.profile import ActivationProfile
from hotcold.placement.solver.cost import PredictorCost
from hotcold.placement.solver.plan_devices import RESERVE_BYTES

_PLOTTED = 17  # sizes of memory in a plot
_ROOMY = 1 << 50  # bytes of a node in which every model fits
Asked = tuple[
    ModelConfig, Machine, ActivationProfile | None, PlanRequest, PredictorCost | None, int
]  # arguments of `make_plan`


@dataclass(frozen=True)
class Planning:
    """One model, options, and a machine: what `described` says, else this one.

    `has_plan`: --plan will name the plan.
    """

    model: PlannedModel
    options: SystemOptions
    described: Machine | None
    profile: ActivationProfile | None
    has_plan: bool = False

    @property
    def system(self) -> SystemConfig:
        """The system, with all neurons in memory. Errors: those of `planned_system`."""
        return self._in_memory[0]

    def require_room(self) -> None:
        """Raise what keeps this from being planned, as far as no speed is needed to know it.

        Errors:  MemoryBudgetError; those of `planned_system`
        """
        require_room(*self._asked(self._sizes))

    def measured(self, on_stage: Callable[[str], None]) -> Machine:
        """The machine with its speeds. Errors: MemoryBudgetError where it cannot be measured."""
        return self.described or this_machine(on_stage=on_stage)

    def plan(self, machine: Machine, time_limit_s: float = 1.0) -> PlacementPlan:
        """The plan on `machine`. Errors: MemoryBudgetError."""
        return make_plan(*self._asked(machine), time_limit_s=time_limit_s)

    def fitting_dtype(self) -> str:
        """Of a model that is not here the most precise --dtype that fits; "" for none."""
        if self.model.path is not None or self.options.weight_dtype is not None:
            return ""
        for dtype in QUANTIZED:
            with suppress(MemoryBudgetError, UsageError):
                smaller = replace(self.model, config=loaded_config(self.model.config, dtype))
                chosen = replace(self.options, weight_dtype=dtype)
                replace(self, model=smaller, options=chosen).require_room()
                return dtype
        return ""

    def require_least(self) -> None:
        """Raise MemoryBudgetError, naming the least, where --cpu-memory is too little for that."""
        assert self.options.cpu_memory_bytes is not None
        self._stored_systems()(self.options.cpu_memory_bytes)

    def stored(self, machine: Machine, is_plotted: bool = False) -> list[OffloadPlan]:
        """Plans with neurons on storage, by size of memory from --cpu-memory on; [] if none is.

        Errors:  MemoryBudgetError naming the least that would do
        """
        given = self.options.cpu_memory_bytes
        assert given is not None
        with_all = replace(self, options=replace(self.options, cpu_memory_bytes=None))
        nodes = tuple(replace(node, free_bytes=_ROOMY) for node in machine.nodes)
        report = with_all.plan(replace(machine, nodes=nodes)).report
        head_s = sum(part["ms"] for part in report["parts"] if part["name"] == "head") / 1e3
        number = {"num_sizes": _PLOTTED} if is_plotted else {}
        return offload_plans(
            self._stored_systems(), given, self.profile, report["token_s"], head_s=head_s, **number
        )

    def _stored_systems(self) -> Stored:
        if self.model.path is not None:
            return stored_model(self.model.path, self.options)
        system, gpus = self._planned, self._placed_on(self._sizes).gpus
        if self._uses_gpu:
            wanted = self.options.gpu_memory_bytes or gpus[0].free_bytes - RESERVE_BYTES
            budget = max(1, min(wanted, gpus[0].free_bytes))
            system = replace(system, device="cuda", gpu_memory_bytes=budget)
        return stored_config(system, self.model.config, self.profile)

    @cached_property
    def _sizes(self) -> Machine:
        """The machine with its memory; its speeds need not be its own."""
        return self.described or unmeasured_machine()

    @property
    def _uses_gpu(self) -> bool:
        return bool(self._placed_on(self._sizes).gpus) and self.options.gpu_memory_bytes != 0

    def _placed_on(self, machine: Machine) -> Machine:
        experts = self.model.config.experts
        on_cpu_only = experts is not None and experts.has_predictors
        return replace(machine, gpus=()) if on_cpu_only else machine

    @cached_property
    def _planned(self) -> SystemConfig:
        return planned_system(self.model, self.options, self.described)

    @cached_property
    def _in_memory(self) -> tuple[SystemConfig, ModelConfig]:
        """The system, and the config with the formats of its matrices."""
        return planned_in_memory(self.model, self._planned, self._uses_gpu, self.has_plan)

    def _asked(self, machine: Machine) -> Asked:
        system, config = self._in_memory
        need = account(self._planned, config)
        budgets = self.options.gpu_memory_bytes, self.options.cpu_memory_bytes
        return (
            config,
            self._placed_on(machine),
            self.profile,
            plan_request(system, *budgets, machine.identity, self.profile),
            planned_predictors(self.model, system),
            need.process_bytes + need.arena_bytes + need.draft_bytes,
        )
