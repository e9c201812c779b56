"""How neurons are dealt to CPU services and their threads, and what each service is to load."""

import numpy as np

from actors.arena import ArenaLayout
from actors.messages import CacheSpec, ServiceSpec, SystemConfig
from model.config import ModelConfig

MAX_LOGITS = 32


def deal_neurons(num_neurons: int, num_services: int, num_threads: int) -> list[np.ndarray]:
    """Ids of one layer for each service, in its loading order.

    Thread i of service s takes an equal run of the service's order. Neighbours in the checkpoint go
    to different threads in turn, so that no thread gets a run of neurons that fire alike.
    Dtypes:  int32
    """
    parts = num_services * num_threads
    ids = np.arange(num_neurons, dtype=np.int32)
    return [
        np.concatenate([ids[s + i * num_services :: parts] for i in range(num_threads)])
        for s in range(num_services)
    ]


def service_specs(system: SystemConfig, config: ModelConfig) -> list[ServiceSpec]:
    """The GPU service and the CPU services of a system."""
    num_threads = max(1, system.num_threads // system.num_cpu_actors)
    shards = deal_neurons(config.ffn_size, system.num_cpu_actors, num_threads)
    cache = CacheSpec(1, system.context_length, system.kv_dtype)
    gpu = ServiceSpec("gpu", 0, system.num_threads, system.model_path, cache=cache)
    cpus = [
        ServiceSpec(
            f"cpu{i}", i + 1, num_threads, system.model_path, neuron_ids=[ids] * config.num_layers
        )
        for i, ids in enumerate(shards)
    ]
    return [gpu, *cpus]


def arena_layout(system: SystemConfig, config: ModelConfig) -> ArenaLayout:
    """The wires that this system needs."""
    return ArenaLayout(
        num_services=1 + system.num_cpu_actors,
        max_tokens=max(1, min(system.prefill_chunk, system.context_length)),
        width=config.hidden_size,
        max_neurons=config.ffn_size,
        vocab_size=config.vocab_size,
        max_logits=MAX_LOGITS,
    )
