"""Which placement plan a system loads by, and what that plan has to be made for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hotcold.actors.protocol.messages import PREDICTED_MODES, SystemConfig
from hotcold.actors.protocol.options import SystemOptions
from hotcold.model.byte_sizes import binary_text
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import UsageError
from hotcold.model.files.artifact import ModelIdentity, sampled_digest
from hotcold.model.files.artifact_places import artifact_path, artifacts_like
from hotcold.placement.machine.survey import read_layout
from hotcold.placement.machine.this_machine import read_cached
from hotcold.placement.plan import PlanRequest, load_plan, plan_path, read_plan
from hotcold.placement.profile import PROFILE_FILE, ActivationProfile, read_profile
from hotcold.placement.solver.cost import PredictorCost
from hotcold.predictors.predictor_file import Predictors, read_predictors

_UNMEASURED_FACTOR = 2.0
_CHANGE = 0.1  # of memory or speed that a plan's user is told of
_UNMEASURED = f"predictors choose {_UNMEASURED_FACTOR:g} neurons for each that fires"


def plan_request(
    system: SystemConfig,
    options: SystemOptions,
    machine: str,
    profile: ActivationProfile | None,
) -> PlanRequest:
    """The request that a plan for `system` has to answer, on the machine of this identity."""
    return PlanRequest(
        mode=system.mode,
        gpu_memory_bytes=options.gpu_memory_bytes,
        cpu_memory_bytes=options.cpu_memory_bytes,
        context_length=system.context_length,
        kv_dtype=system.kv_dtype,
        num_cpu_actors=system.num_cpu_actors,
        machine=machine,
        profile_digest="" if profile is None or profile.is_stated else profile.digest,
        predictor_digest=sampled_digest(system.predictors_path),
        weight_dtype=system.weight_dtype,
    )


def own_profile(path: Path, config: ModelConfig) -> ActivationProfile | None:
    """The profile beside the model, or None. Errors: ArtifactError where it is not this model's."""
    file = artifact_path(path, PROFILE_FILE)
    return read_profile(file, ModelIdentity.of(path), config) if file.exists() else None


def predictor_cost(
    system: SystemConfig, identity: ModelIdentity, config: ModelConfig
) -> PredictorCost | None:
    """Bytes and selectivity of the system's predictors; None where its mode has none.

    Errors:  ArtifactError
    """
    if system.mode not in PREDICTED_MODES:
        return None
    predictors = read_predictors(Path(system.predictors_path), identity, config)
    layer_bytes = [0 if layer is None else layer.num_bytes for layer in predictors.layers]
    note = "" if predictors.qualities else _UNMEASURED
    return PredictorCost(system.mode, np.array(layer_bytes, np.int64), _factors(predictors), note)


def _factors(predictors: Predictors) -> np.ndarray:
    """Neurons computed for each that fires, by layer: (L,)."""
    if predictors.qualities is None:
        return np.full(len(predictors.layers), _UNMEASURED_FACTOR)
    return np.array([max(1.0, q.computed / max(q.active, 1e-9)) for q in predictors.qualities])


def find_plan(path: Path, system: SystemConfig, config: ModelConfig, options: SystemOptions) -> str:
    """The plan for `system`: --plan, else the one made for exactly this request; "" for none.

    Without a plan neurons are assigned to the CPU services round-robin. Nothing is measured here.
    Errors:  ArtifactError, UsageError for a --plan that does not fit the system
    """
    file = options.plan
    if system.hosts:
        if file is not None:
            raise UsageError("--plan places neurons on one machine; leave it or --hosts out")
        return ""
    if file is None and not artifacts_like(path, "plan-*"):
        return ""
    identity = ModelIdentity.of(path)
    profile = own_profile(path, config)
    request = plan_request(system, options, read_layout().unmeasured.identity, profile)
    found = plan_path(path, request) if file is None else file
    if file is None and not found.exists():
        return ""
    plan = read_plan(found, identity, config, request)
    if plan.num_gpus <= (system.device == "cuda"):
        return str(found.resolve())
    if file is None:
        return ""
    places = plan.neuron_device
    num_on_gpus = int(((places >= 0) & (places < plan.num_gpus)).sum())
    if system.device == "cuda":
        raise UsageError(
            f"{found}: is for {plan.num_gpus} GPUs, and a system uses one; make it again"
        )
    raise UsageError(
        f"{found}: places {num_on_gpus} neurons on a GPU, and this system has none; make a plan "
        "with --gpu-memory 0 and give that option here too"
    )


def plan_note(system: SystemConfig, config: ModelConfig) -> str:
    """How this machine has changed since the system's plan was made; "" where it has not."""
    if not system.plan_path:
        return ""
    identity, layout = ModelIdentity.of(system.model_path), read_layout()
    then = load_plan(Path(system.plan_path), identity, config).machine
    now = read_cached(layout)
    speed = then.read_gb_per_s if now is None else now.read_gb_per_s
    memory = [sum(node.total_bytes for node in nodes) for nodes in (then.nodes, layout.nodes)]
    changes = []
    if _differ(*memory):
        changes.append(f"had {binary_text(memory[0])} of memory and has {binary_text(memory[1])}")
    if _differ(then.read_gb_per_s, speed):
        changes.append(f"read {then.read_gb_per_s:.3g} GB/s and reads {speed:.3g}")
    if not changes:
        return ""
    return (
        f"loads by {system.plan_path}; since it was made this machine {', '.join(changes)} "
        "(`hotcold plan` makes another)"
    )


def _differ(then: float, now: float) -> bool:
    return abs(now - then) > _CHANGE * then
