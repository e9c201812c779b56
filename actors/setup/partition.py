"""Every neuron is held by one service: a missing one, or one held twice, is a wrong sum unseen."""

from collections.abc import Sequence

import numpy as np

from hotcold.actors.protocol.messages import ServiceSpec
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ServiceError


def require_partition(config: ModelConfig, held: Sequence[Sequence[np.ndarray] | None]) -> None:
    """held[s][l]: the neurons of layer l that service s holds, in any order; None: it holds none.

    Errors:  ServiceError unless each layer's neurons are each held exactly once
    """
    shards = [layers for layers in held if layers is not None]
    every = np.arange(config.ffn_size)
    for layer in range(config.num_layers):
        ids = np.sort(np.concatenate([every[:0], *(layers[layer] for layers in shards)]))
        if not np.array_equal(ids, every):
            num_held = np.intersect1d(ids, every).size
            raise ServiceError(
                f"of the {every.size} neurons of layer {layer}, {every.size - num_held} are in no "
                f"service and {ids.size - num_held} too many: answers would be wrong; start again"
            )


def neuron_owners(
    config: ModelConfig, specs: Sequence[ServiceSpec]
) -> tuple[list[str], np.ndarray]:
    """The names of the services that hold neurons, and which of them holds each.

    Shapes:  owners (L, N), indices into the names
    Dtypes:  int16
    """
    holding = [(spec.name, spec.neuron_ids) for spec in specs if spec.neuron_ids is not None]
    owners = np.zeros((config.num_layers, config.ffn_size), np.int16)
    for index, (_, layers) in enumerate(holding):
        for layer, ids in enumerate(layers):
            owners[layer, ids] = index
    return [name for name, _ in holding], owners
