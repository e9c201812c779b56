"""Which neurons the GPU service holds, and how the others are dealt to the CPU services."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.setup.placement_choice import own_profile
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.artifact import ModelIdentity
from hotcold.placement.hottest import hottest_neurons
from hotcold.placement.plan import PlacementPlan, load_plan

Layers = list[np.ndarray]  # int32 ids of each layer


def hot_counts(config: ModelConfig, shards: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """How many neurons of each layer no CPU service holds: (L,) int64; none without shards.

    They are the GPU service's: `actors.setup.partition` sees to it that all neurons are
    somewhere.
    """
    if not shards:
        return np.zeros(config.num_layers, np.int64)
    cold = [sum(shard[layer].size for shard in shards) for layer in range(config.num_layers)]
    return config.ffn_size - np.array(cold, np.int64)


def system_plan(system: SystemConfig, config: ModelConfig) -> PlacementPlan | None:
    """The plan that the system loads by, or None. Errors: ArtifactError."""
    if not system.plan_path:
        return None
    return load_plan(Path(system.plan_path), ModelIdentity.of(system.model_path), config)


def hot_neurons(
    system: SystemConfig, config: ModelConfig, plan: PlacementPlan | None
) -> Layers | None:
    """The GPU service's neurons, sorted ids of each layer; None where it holds none.

    The plan's, or all neurons without one; of these the `num_hot_neurons` that fire most often by
    the model's profile, where the system says how many.
    Errors:  ArtifactError
    """
    candidates = None
    if plan is not None:
        candidates = np.zeros((config.num_layers, config.ffn_size), bool)
        if plan.num_gpus:
            candidates = plan.neuron_device == 0
    num_hot = system.num_hot_neurons
    if num_hot < 0:
        num_hot = 0 if candidates is None else int(candidates.sum())
    if num_hot == 0:
        return None
    path = Path(system.model_path)
    profile = own_profile(path, ModelIdentity.of(path), config)
    frequency = None if profile is None else profile.frequency
    return hottest_neurons((config.num_layers, config.ffn_size), num_hot, frequency, candidates)


def cold_neurons(
    system: SystemConfig, config: ModelConfig, plan: PlacementPlan | None, hot: Layers | None
) -> tuple[list[Layers] | None, Layers]:
    """The plan's shard of each CPU service, None without one, and the cold neurons of no shard.

    A plan for another number of CPU services says nothing of them. The neurons that it puts on a
    GPU and that are not in `hot` are of no shard.
    """
    owned = np.zeros((config.num_layers, config.ffn_size), bool)
    for layer, ids in enumerate(hot or []):
        owned[layer, ids] = True
    shards = None
    if plan is not None and len(plan.device_names) - plan.num_gpus == system.num_cpu_actors:
        shards = [plan.neurons_of(f"cpu{i}") for i in range(system.num_cpu_actors)]
        owned |= plan.neuron_device >= plan.num_gpus
    return shards, [np.flatnonzero(~layer).astype(np.int32) for layer in owned]
