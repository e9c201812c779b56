"""What `hotcold serve` is to serve, checked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.memory_needs import system_need
from hotcold.actors.setup.preflight import prepare_system
from hotcold.jobs.kept.identity import model_text
from hotcold.model.errors import HotcoldError, UsageError, shown
from hotcold.model.files.locate import locate_model, model_name

_OF_ONE_MODEL = {"predictors": "--predictors", "thresholds": "--thresholds", "plan": "--plan"}


@dataclass(frozen=True)
class ModelPlan:
    """One model and the system that will hold it."""

    name: str  # by which requests name it
    model: str  # of `model_text`
    system: SystemConfig
    memory_bytes: int
    shared_bytes: int = 0  # of these, in shared memory, where there is room for the largest at once


def model_plans(models: Sequence[str], options: SystemOptions) -> list[ModelPlan]:
    """Of each model, as it would be alone on this machine; of the demo model where none is named.

    Errors:  HotcoldError; UsageError for two of one name, and for options of one model alone
    """
    given = [text for name, text in _OF_ONE_MODEL.items() if getattr(options, name) is not None]
    if given and len(models) > 1:
        raise UsageError(
            f"{given[0]} is of one model, and these are {len(models)}; leave it out, or serve one"
        )
    if len(models) < 2:
        return [_plan(models[0] if models else None, options)]
    plans = []
    for model in models:
        try:
            plans.append(_plan(model, options))
        except HotcoldError as problem:
            raise UsageError(f"{shown(model)}: {problem}") from problem
    by_name = {plan.name: plan for plan in plans}
    for plan in plans:
        if by_name[plan.name] is not plan:
            raise UsageError(
                f"two models are called {plan.name!r}, by which requests could not tell them "
                "apart; give one of the folders or files another name"
            )
    return plans


def _plan(model: str | None, options: SystemOptions) -> ModelPlan:
    path = locate_model(model)
    system, config = prepare_system(path, options)
    need = system_need(system, config)
    shared = need.arena_bytes + need.predictor_bytes
    return ModelPlan(model_name(model, path), model_text(model), system, need.total_bytes, shared)
