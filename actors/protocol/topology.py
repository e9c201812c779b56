"""Who does what: which service has a layer's attention, the head, which neurons."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from hotcold.actors.protocol.messages import ServicePart, ServiceSpec
from hotcold.numba_kernels.loops.mailbox import MOST_RUNG, MOST_SHARED


@dataclass(frozen=True, eq=False)
class Topology:
    """The parts of all services, in the order of their rows in the buffers; L layers, S services.

    Services with attention hold the hot neurons, all of which are computed; CPU services hold the
    cold ones.
    Errors:  ValueError unless each layer's attention, and the head, is in one service
    """

    parts: tuple[ServicePart, ...]

    def __post_init__(self) -> None:
        layers = sorted(chain(*(part.attention for part in self.parts)))
        num_heads = sum(part.has_head for part in self.parts)
        if layers != list(range(len(layers))) or num_heads != 1:
            raise ValueError(f"attention of layers {layers} and {num_heads} heads in all services")

    @cached_property
    def services(self) -> list[int]:
        """All services."""
        return list(range(len(self.parts)))

    @cached_property
    def cpu_services(self) -> list[int]:
        """Those with cold neurons alone."""
        return [s for s, part in enumerate(self.parts) if part.is_cpu_service]

    @cached_property
    def cache_services(self) -> list[int]:
        """Those with attention, and with it the KV cache of their layers."""
        return [s for s, part in enumerate(self.parts) if part.attention]

    @cached_property
    def has_gpu(self) -> bool:
        """Whether a GPU computes some of it."""
        return any(isinstance(part, ServiceSpec) and part.on_gpu for part in self.parts)

    @cached_property
    def head(self) -> int:
        """The service with the head."""
        return [part.has_head for part in self.parts].index(True)

    @cached_property
    def attention_of(self) -> np.ndarray:
        """The service with each layer's attention: (L,) int64."""
        pairs = [(layer, s) for s, part in enumerate(self.parts) for layer in part.attention]
        return np.array([s for _, s in sorted(pairs)], np.int64)

    @cached_property
    def num_neurons(self) -> np.ndarray:
        """How many neurons of each layer each service holds: (L, S) int64."""
        none = [np.empty(0, np.int32)] * self.attention_of.size
        found = [[ids.size for ids in part.neuron_ids or none] for part in self.parts]
        return np.array(found, np.int64).T.copy()

    @cached_property
    def num_hot(self) -> np.ndarray:
        """How many neurons of each layer are in services with attention: (L,) int64."""
        found: np.ndarray = np.delete(self.num_neurons, self.cpu_services, axis=1).sum(axis=1)
        return found

    @cached_property
    def ffn_of(self) -> list[list[int]]:
        """Of each layer the services that are asked for its FFN, in the order of their sum.

        Those with hot neurons of the layer come first, then all CPU services.
        """
        others = [s for s in self.services if s not in self.cpu_services]
        return [[*(s for s in others if row[s]), *self.cpu_services] for row in self.num_neurons]

    @cached_property
    def ffn_lists(self) -> tuple[np.ndarray, np.ndarray]:
        """`ffn_of` for compiled code: (L, S + 1), of row l the first sizes[l]; sizes (L,). int64.

        Behind them is the layer's attention service.
        """
        num_layers, num_services = self.num_neurons.shape
        lists = np.zeros((num_layers, num_services + 1), np.int64)
        for row, services, attention in zip(lists, self.ffn_of, self.attention_of, strict=True):
            row[: len(services) + 1] = [*services, attention]
        return lists, np.array([len(services) for services in self.ffn_of], np.int64)

    @cached_property
    def is_chained(self) -> np.ndarray:
        """Whether a layer's attention service may ring those of its FFN: (L,) bool."""
        few = len(self.parts) <= MOST_RUNG
        pairs = zip(self.ffn_of, self.attention_of, strict=True)
        return np.array([few and attention not in ffn for ffn, attention in pairs], bool)

    @cached_property
    def is_whole(self) -> np.ndarray:
        """Whether a GPU has all of a layer, attention and neurons: (L,) bool."""
        found = np.zeros(self.attention_of.size, bool)
        for layer, (s, sizes) in enumerate(zip(self.attention_of, self.num_neurons, strict=True)):
            part = self.parts[s]
            if isinstance(part, ServiceSpec) and part.on_gpu:
                is_there = layer >= part.system.num_host_layers
                found[layer] = is_there and sizes[s] == sizes.sum() > 0
        return found

    @cached_property
    def is_shared(self) -> np.ndarray:
        """Whether a GPU and the CPU services may share a layer: (L,) bool.

        The GPU has its attention. Neurons on storage, and those of other hosts, are asked for layer
        by layer.
        """
        found, cpus = self.is_whole.copy(), [self.parts[s] for s in self.cpu_services]
        if found.size > MOST_SHARED or any(part.host for part in cpus):
            return found
        if any(isinstance(part, ServiceSpec) and part.storage is not None for part in cpus):
            return found
        for layer, s in enumerate(self.attention_of):
            part = self.parts[s]
            if isinstance(part, ServiceSpec) and part.on_gpu and self.cache_services == [s]:
                found[layer] = layer >= part.system.num_host_layers
        return found

    @cached_property
    def sharing(self) -> list[int]:
        """The services that share layers, that with attention first."""
        return [*self.cache_services[:1], *self.cpu_services]

    @cached_property
    def gpu_predicts(self) -> np.ndarray:
        """Of which layers a GPU has predictors, of all neurons: (L,) bool."""
        found, part = np.zeros(self.attention_of.size, bool), self.parts[self.sharing[0]]
        if isinstance(part, ServiceSpec) and part.on_gpu and part.system.gpu_predicts:
            found[:] = part.system.gpu_predicts
        return found

    @cached_property
    def joins_head(self) -> bool:
        """Whether the GPU with the last layer has the head too."""
        part = self.parts[self.head]
        is_there = isinstance(part, ServiceSpec) and part.on_gpu and not part.system.head_on_host
        return is_there and bool(self.attention_of[-1] == self.head)

    @cached_property
    def shards(self) -> Sequence[Sequence[np.ndarray]]:
        """The neurons of each CPU service, layer by layer."""
        return [self.parts[s].neuron_ids or [] for s in self.cpu_services]

    def on_host(self, host: str) -> list[int]:
        """The CPU services on a host."""
        return [s for s in self.cpu_services if self.parts[s].host == host]
