"""Which device holds which share of the neurons, and of the activations that they make."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.setup.placement_choice import own_profile
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.artifact_places import artifacts_like
from hotcold.placement.plan import PlacementPlan, load_plan

_MAX_POINTS = 200


@dataclass(frozen=True, eq=False)
class DeviceShare:
    """A device's share of all neurons, and of all activations if there is a profile.

    curve: (P, 2) float64, shares of neurons and of activations from 0 to 1: this device's neurons,
    the most frequent first, after those of the devices before it
    """

    name: str
    num_neurons: int
    neurons: float
    activations: float | None
    curve: np.ndarray


@dataclass(frozen=True, eq=False)
class Placement:
    """What the placement tab shows: devices in the plan's order, GPUs first."""

    devices: list[DeviceShare]
    num_profiled_tokens: int  # 0: there is no profile
    plan: PlacementPlan | None


def plans_beside(model_path: str | Path) -> list[Path]:
    """The plan files of the model."""
    return artifacts_like(model_path, "plan-*.safetensors")


def placement_of(
    system: SystemConfig,
    config: ModelConfig,
    owners: tuple[list[str], np.ndarray],
    plan_file: str = "",
) -> Placement:
    """The placement by `plan_file`, or of `system` as it runs.

    `owners`: those of the running system, from its `neuron_owners`.
    Errors:  ArtifactError where a file is not of this model
    """
    path = Path(system.model_path)
    identity = ModelIdentity.of(path)
    chosen = plan_file or system.plan_path
    plan = load_plan(Path(chosen), identity, config) if chosen else None
    names, owner = owners
    if plan is not None and plan_file:
        names, owner = list(plan.device_names), plan.neuron_device
    profile = own_profile(path, identity, config)
    counts = None if profile is None or not profile.counts.any() else profile.counts
    num_tokens = 0 if profile is None or counts is None else profile.num_tokens
    return Placement(device_shares(names, owner, counts), num_tokens, plan)


def device_shares(
    names: list[str], owner: np.ndarray, counts: np.ndarray | None
) -> list[DeviceShare]:
    """Shares of each device.

    Shapes:  owner (L, N) indices into names, -1 where there is no neuron; counts (L, N) or None
    """
    total = int((owner >= 0).sum())
    fired = np.ones(owner.shape) if counts is None else counts
    before = np.zeros(2)
    found = []
    for index, name in enumerate(names):
        own = np.sort(fired[owner == index].astype(np.float64))[::-1]
        reached = np.concatenate([[0.0], own.cumsum()]) / fired[owner >= 0].sum()
        points = np.unique(np.linspace(0, own.size, min(own.size, _MAX_POINTS) + 1).astype(int))
        curve = before + np.stack([points / total, reached[points]], axis=1)
        share = None if counts is None else float(reached[-1])
        found.append(DeviceShare(name, own.size, own.size / total, share, curve))
        before = curve[-1]
    return found
