"""Which placement plan a system loads by, and what that plan has to be made for."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from hotcold.actors.protocol.messages import PREDICTED_MODES, SystemConfig
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import UsageError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.artifact_places import artifact_path, artifacts_like
from hotcold.placement.machine.this_machine import measured_before
from hotcold.placement.plan import PlanRequest, plan_path, read_plan
from hotcold.placement.profile import PROFILE_FILE, ActivationProfile, read_profile
from hotcold.placement.solver.cost import PredictorCost
from hotcold.predictors.predictor_file import Predictors, read_predictors

_HEAD_BYTES = 1 << 20
_UNMEASURED_FACTOR = 2.0
_UNMEASURED = f"predictors choose {_UNMEASURED_FACTOR:g} neurons for each that fires"


def plan_request(
    system: SystemConfig,
    gpu_memory_bytes: int | None,
    cpu_memory_bytes: int | None,
    machine_digest: str,
    profile: ActivationProfile | None,
) -> PlanRequest:
    """The request that a plan for `system` has to answer."""
    return PlanRequest(
        mode=system.mode,
        gpu_memory_bytes=gpu_memory_bytes,
        cpu_memory_bytes=cpu_memory_bytes,
        context_length=system.context_length,
        kv_dtype=system.kv_dtype,
        num_cpu_actors=system.num_cpu_actors,
        machine_digest=machine_digest,
        profile_digest="" if profile is None else profile.digest,
        predictor_digest=_predictor_digest(system),
        weight_dtype=system.weight_dtype,
    )


def own_profile(
    path: Path, identity: ModelIdentity, config: ModelConfig
) -> ActivationProfile | None:
    """The profile beside the model, or None. Errors: ArtifactError where it is not this model's."""
    file = artifact_path(path, PROFILE_FILE)
    return read_profile(file, identity, config) if file.exists() else None


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


def find_plan(
    path: Path,
    system: SystemConfig,
    config: ModelConfig,
    gpu_memory_bytes: int | None,
    cpu_memory_bytes: int | None,
    file: Path | None,
) -> str:
    """The plan for `system`: `file`, else the one made for exactly this request; "" for none.

    Without a plan neurons are assigned to the CPU services round-robin. Nothing is measured here: a
    plan exists only where the machine has been measured.
    Errors:  ArtifactError, UsageError for a `file` that does not fit the system
    """
    if system.hosts:
        if file is not None:
            raise UsageError("--plan places neurons on one machine; leave it or --hosts out")
        return ""
    if file is None and not artifacts_like(path, "plan-*"):
        return ""
    machine = measured_before()
    if machine is None and file is None:
        return ""
    identity = ModelIdentity.of(path)
    request = plan_request(
        system,
        gpu_memory_bytes,
        cpu_memory_bytes,
        "" if machine is None else machine.digest,
        own_profile(path, identity, config),
    )
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
            f"{found}: is for {plan.num_gpus} GPUs, and a system uses one; make it again with "
            "CUDA_VISIBLE_DEVICES=0"
        )
    raise UsageError(
        f"{found}: places {num_on_gpus} neurons on a GPU, and this system has none; make a plan "
        "with --gpu-memory 0 and give that option here too"
    )


def _predictor_digest(system: SystemConfig) -> str:
    """A digest of the file's first MiB, with its header, and of its size; "" without a file."""
    if not system.predictors_path:
        return ""
    path = Path(system.predictors_path)
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return hashlib.sha256(head + str(path.stat().st_size).encode()).hexdigest()
