"""A placement plan: which device holds each neuron and each other part of one model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.model.config import neurons
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError, UsageError
from hotcold.model.files.artifact import Artifact, ModelIdentity, read_artifact, write_artifact
from hotcold.model.files.artifact_places import artifact_path
from hotcold.placement.machine.description import Machine

_KIND = "plan"
_REMEDY = "make it again with `hotcold plan`"
_GIB = 1 << 30


@dataclass(frozen=True)
class PlanRequest:
    """The request that a plan answers; another request needs another plan.

    Units:   memory limits in bytes, None for all free memory; digests are empty without profile or
             predictor, weight_dtype if weights are loaded as stored
    """

    mode: str
    gpu_memory_bytes: int | None
    cpu_memory_bytes: int | None
    context_length: int
    kv_dtype: str
    num_cpu_actors: int
    machine: str  # its `identity`
    profile_digest: str
    predictor_digest: str
    weight_dtype: str = ""

    @property
    def digest(self) -> str:
        """64 hexadecimal digits over everything."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def differences(self, other: PlanRequest) -> list[str]:
        """The entries in which this differs from `other`, as command-line options."""
        mine, others = asdict(self), asdict(other)
        return [_words(name, mine[name]) for name in mine if mine[name] != others[name]]


@dataclass(frozen=True, eq=False)
class PlacementPlan:
    """The device of each part of a model.

    `report` holds figures for people (`placement/report.py`), `machine` those that it is made by.
    Shapes:  neuron_device (L, N), N of the largest layer; attention_device (L,)
    Dtypes:  int16 indices into device_names, the GPU before the CPU devices; -1 is the host,
             for attention and head only, and what a smaller layer lacks
    """

    request: PlanRequest
    device_names: tuple[str, ...]
    neuron_device: np.ndarray
    attention_device: np.ndarray
    head_device: int
    machine: Machine
    report: dict[str, Any]

    @property
    def num_gpus(self) -> int:
        """How many of the devices are GPUs: 0 or 1, which comes first."""
        return sum(not name.startswith("cpu") for name in self.device_names)

    def neurons_of(self, device_name: str) -> list[np.ndarray]:
        """The neurons of each layer on that device: int32 ids, sorted.

        Errors:  KeyError for a device that the plan does not have
        """
        if device_name not in self.device_names:
            raise KeyError(device_name)
        device = self.device_names.index(device_name)
        return [np.flatnonzero(layer == device).astype(np.int32) for layer in self.neuron_device]


def plan_path(model_path: str | Path, request: PlanRequest) -> Path:
    """The default path of the plan for `request`: every request has its own file."""
    return artifact_path(model_path, f"plan-{request.digest[:12]}.safetensors")


def write_plan(path: Path, identity: ModelIdentity, plan: PlacementPlan) -> None:
    """Write `plan` for the model `identity`. Errors: ArtifactError where it cannot be written."""
    tensors = {
        "neuron_device": plan.neuron_device,
        "attention_device": plan.attention_device,
    }
    facts = {
        "request": asdict(plan.request),
        "device_names": list(plan.device_names),
        "head_device": plan.head_device,
        "machine": plan.machine.as_json(),
        "report": plan.report,
    }
    write_artifact(path, _KIND, identity, tensors, facts)


def read_plan(
    path: Path, identity: ModelIdentity, config: ModelConfig, request: PlanRequest
) -> PlacementPlan:
    """Read the plan that was made for `identity` and `request`.

    Errors:  ArtifactError where it is missing, damaged, incomplete, of another model or for another
             request
    """
    plan = load_plan(path, identity, config)
    different = plan.request.differences(request)
    if different:
        wanted = ", ".join(request.differences(plan.request))
        raise ArtifactError(f"{path}: was made for {', '.join(different)}, not {wanted}; {_REMEDY}")
    return plan


def load_plan(path: Path, identity: ModelIdentity, config: ModelConfig) -> PlacementPlan:
    """Read a plan of `identity` for any request. Errors: as in `read_plan`."""
    artifact = read_artifact(path, _KIND, identity)
    made_for = _request(artifact)
    layers = (config.num_layers,)
    plan = PlacementPlan(
        request=made_for,
        device_names=tuple(map(str, artifact.fact("device_names", list))),
        neuron_device=artifact.tensor("neuron_device", np.int16, neurons.shape(config)),
        attention_device=artifact.tensor("attention_device", np.int16, layers),
        head_device=artifact.fact("head_device", int),
        machine=_machine(artifact),
        report=artifact.fact("report", dict),
    )
    _check_devices(path, plan, neurons.exists(config))
    return plan


def _machine(artifact: Artifact) -> Machine:
    try:
        return Machine.from_json(artifact.facts.get("machine"), "its machine")
    except UsageError as problem:
        raise ArtifactError(f"{artifact.path}: {problem}") from None


def _request(artifact: Artifact) -> PlanRequest:
    """The request in the file. Only memory limits may be None."""
    values = artifact.fact("request", dict)
    kinds = {name: str(kind) for name, kind in PlanRequest.__annotations__.items()}
    is_right = values.keys() == kinds.keys() and all(
        isinstance(value, str if kinds[name] == "str" else int)
        or (value is None and "None" in kinds[name])
        for name, value in values.items()
    )
    if not is_right:
        raise ArtifactError(f"{artifact.path}: does not say what it was made for; {_REMEDY}")
    return PlanRequest(**values)


def _check_devices(path: Path, plan: PlacementPlan, exists: np.ndarray) -> None:
    num_devices = len(plan.device_names)
    outside = exists & ((plan.neuron_device < 0) | (plan.neuron_device >= num_devices))
    if outside.any():
        layer, neuron = np.argwhere(outside)[0]
        raise ArtifactError(
            f"{path}: {np.count_nonzero(outside)} neurons are on no device, the first is neuron "
            f"{neuron} of layer {layer}; {_REMEDY}"
        )
    parts = np.append(plan.attention_device, plan.head_device)
    if parts.min() < -1 or parts.max() >= plan.num_gpus:
        raise ArtifactError(f"{path}: puts a part on a device that is no GPU; {_REMEDY}")


def _words(name: str, value: Any) -> str:
    """One entry of a request as a command-line option."""
    match name:
        case "machine":
            return f"the machine {value}"
        case "profile_digest" | "predictor_digest":
            what = name.removesuffix("_digest")
            return f"{what} {value[:12]}" if value else f"no {what}"
        case "gpu_memory_bytes" | "cpu_memory_bytes":
            option = "--" + name.removesuffix("_bytes").replace("_", "-")
            return f"no {option}" if value is None else f"{option} {value / _GIB:.4g} GiB"
        case "weight_dtype":
            return f"--dtype {value}" if value else "no --dtype"
        case "context_length":
            return f"--context {value}"
        case "num_cpu_actors":
            return f"--cpu-actors {value}"
    return f"--{name.replace('_', '-')} {value}"
