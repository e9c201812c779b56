"""Which service holds which neurons: hot ones on the GPU, cold ones on CPU services and threads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.stripes import (
    Stripes,
    in_loading_order,
    num_shares,
    num_stripes,
    share_stripes,
)
from hotcold.actors.protocol.topology import Topology
from hotcold.actors.setup.placement_choice import own_profile
from hotcold.model.config import neurons
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ServiceError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.placement.plan import PlacementPlan, load_plan
from hotcold.placement.profile import rates_of
from hotcold.placement.solver.cost import hotness

Layers = list[np.ndarray]  # int32 ids of each layer


def system_plan(system: SystemConfig, config: ModelConfig) -> PlacementPlan | None:
    """The plan that the system loads by, or None. Errors: ArtifactError."""
    if not system.plan_path:
        return None
    return load_plan(Path(system.plan_path), ModelIdentity.of(system.model_path), config)


def hot_neurons(
    system: SystemConfig, config: ModelConfig, plan: PlacementPlan | None
) -> Layers | None:
    """The attention service's neurons, sorted ids of each layer; None where it holds none.

    Those of the plan, or all; if `num_hot_neurons` is set, only so many of them, the most frequent
    by the model's profile. Of neurons as frequent the others leave before those of layers that the
    plan puts on the GPU as a whole, and of these the first layers' before the next one's.
    Errors:  ArtifactError
    """
    exists = candidates = neurons.exists(config)
    is_whole = np.zeros(config.num_layers, bool)
    if plan is not None:
        candidates = (plan.neuron_device == 0) & (plan.num_gpus > 0)
        is_whole = (candidates == exists).all(axis=1)
        is_whole[: system.num_host_layers] = False
    num_hot = system.num_hot_neurons
    if num_hot < 0:
        num_hot = 0 if plan is None else int(candidates.sum())
    if num_hot == 0:
        return None
    rates = rates_of(config, own_profile(Path(system.model_path), config))
    scores = np.where(candidates, hotness(config, rates), -1.0)
    order = np.lexsort((_ranks(config, is_whole).ravel(), -scores.ravel()))
    chosen = np.zeros(scores.size, bool)
    chosen[order[: min(num_hot, int(candidates.sum()))]] = True
    return [np.flatnonzero(layer).astype(np.int32) for layer in chosen.reshape(scores.shape)]


def cold_neurons(
    system: SystemConfig,
    config: ModelConfig,
    plan: PlacementPlan | None,
    hot: Sequence[Layers | None],
) -> tuple[list[Layers] | None, Layers]:
    """The plan's shard of each CPU service (None without one), and the cold neurons of no shard.

    `hot`: the neurons of each attention service. A plan for another number of CPU services has no
    shards. Neurons that it puts on a GPU and that are not in `hot` are in no shard.
    """
    owned = ~neurons.exists(config)
    for layers in hot:
        for layer, ids in enumerate(layers or []):
            owned[layer, ids] = True
    shards = None
    if plan is not None and len(plan.device_names) - plan.num_gpus == system.num_cpu_actors:
        shards = [plan.neurons_of(f"cpu{i}") for i in range(system.num_cpu_actors)]
        owned |= plan.neuron_device >= plan.num_gpus
    return shards, [np.flatnonzero(~layer).astype(np.int32) for layer in owned]


def _ranks(config: ModelConfig, is_whole: np.ndarray) -> np.ndarray:
    """Ranks (L, N) by which whole layers come first, the last one before the one ahead of it.

    Within others low ranks are spread, as neighbours in a checkpoint may fire alike; experts that
    have no silent neurons stay whole: theirs are equal.
    """
    ranks = _spread_ranks(neurons.shape(config))
    if config.experts is not None and not config.is_sparse:
        of_blocks = _spread_ranks((config.num_layers, neurons.most_blocks(config)))
        blocks = np.maximum(neurons.blocks(config), 0)
        has_experts = np.array([len(layer.ffn.block_sizes) > 1 for layer in config.layers])
        of_neurons = np.take_along_axis(of_blocks, blocks, axis=1)
        ranks = np.where(has_experts[:, None], of_neurons, ranks)
    turn = np.where(is_whole, np.arange(len(is_whole))[::-1], len(is_whole))
    found: np.ndarray = ranks + turn[:, None] * (ranks.max() + 1)
    return found


def _spread_ranks(shape: tuple[int, ...]) -> np.ndarray:
    """Ranks (L, N): low ones are spread over all layers, and far apart within each."""
    num_layers, num_neurons = shape
    golden = 0.6180339887498949
    places = np.argsort(np.argsort((np.arange(num_neurons) * golden) % 1.0))
    ranks: np.ndarray = places[None, :] * num_layers + np.arange(num_layers)[:, None]
    return ranks


def service_stripes(
    config: ModelConfig, threads: Sequence[int], planned: list[Layers] | None
) -> list[Stripes]:
    """Each CPU service's stripes: in proportion to its planned neurons, or to its threads."""
    weights = [sum(ids.size for ids in layers) for layers in planned or []]
    total, at_once = num_stripes(config), num_stripes(config) // num_shares(config)
    return share_stripes(total, weights if any(weights) else threads, at_once)


def cold_shards(
    config: ModelConfig, planned: list[Layers] | None, others: Layers, stripes: Sequence[Stripes]
) -> list[Layers]:
    """Each CPU service's neurons in loading order: those of `planned` and `others` in its stripes.

    A plan says how many neurons each service has, not which: in which order they are added must not
    depend on it.
    """
    shards: list[Layers] = [[] for _ in stripes]
    for layer, ids in enumerate(others):
        sizes = config.layers[layer].ffn.block_sizes
        every = np.unique(np.concatenate([ids, *(own[layer] for own in planned or [])]))
        for shard, own_stripes in zip(shards, stripes, strict=True):
            shard.append(in_loading_order(every, sizes, own_stripes))
    return shards


def require_partition(config: ModelConfig, held: Sequence[Sequence[np.ndarray] | None]) -> None:
    """Check that every neuron is held by exactly one service: else sums would silently be wrong.

    held[s][l]: the neurons of layer l that service s holds, in any order; None: it holds none.
    Errors:  ServiceError
    """
    shards = [layers for layers in held if layers is not None]
    for layer, size in enumerate(config.ffn_sizes):
        every = np.arange(size)
        ids = np.sort(np.concatenate([every[:0], *(layers[layer] for layers in shards)]))
        if not np.array_equal(ids, every):
            num_held = np.intersect1d(ids, every).size
            raise ServiceError(
                f"of the {every.size} neurons of layer {layer}, {every.size - num_held} are in no "
                f"service and {ids.size - num_held} too many: answers would be wrong; start again"
            )


def neuron_owners(config: ModelConfig, topology: Topology) -> tuple[list[str], np.ndarray]:
    """The names of the services that hold neurons, and the owner of each neuron.

    Shapes:  owners (L, N), indices into the names; N of the largest layer, -1 where others end
    Dtypes:  int16
    """
    parts = topology.parts
    holding = [(part.name, part.neuron_ids) for part in parts if part.neuron_ids is not None]
    owners = np.full(neurons.shape(config), -1, np.int16)
    for index, (_, layers) in enumerate(holding):
        for layer, ids in enumerate(layers):
            owners[layer, ids] = index
    return [name for name, _ in holding], owners
