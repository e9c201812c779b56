"""How neurons are dealt to CPU services and their threads, and what each service is to load."""

import numpy as np

from actors.arena import ArenaLayout
from actors.kv_pool import num_pages_of
from actors.messages import CacheSpec, ServiceSpec, SystemConfig
from actors.planning import planned_shards
from model.config import ModelConfig

# Rows of logits in the arena, at least: generation asks for one a request, scoring for as many as
# it can get. Eight cost 4 MiB of shared memory with a vocabulary of 128 thousand.
_LEAST_LOGITS = 8


def deal_neurons(
    num_neurons: int, num_services: int, num_threads: int, num_extra: int = 0
) -> list[np.ndarray]:
    """Ids of one layer for each service, in its loading order.

    A service has `num_threads` threads, the first `num_extra` services one more. Neighbours in the
    checkpoint are dealt to different threads in turn, so that no thread gets a run of neurons that
    fire alike. A service's order is its threads' deals one after the other. Its threads cut that
    order in multiples of four (`numba_kernels.rows.share`), so a cut may stand a few neurons beside
    the end of a deal.
    Dtypes:  int32
    """
    ids = np.arange(num_neurons, dtype=np.int32)
    owners = [*range(num_services)] * num_threads + [*range(num_extra)]  # of the threads, in turn
    deals = [ids[thread :: len(owners)] for thread in range(len(owners))]
    return [
        np.concatenate(
            [deal for deal, owner in zip(deals, owners, strict=True) if owner == service]
        )
        for service in range(num_services)
    ]


def _dealt(ids: np.ndarray, num_threads: int) -> np.ndarray:
    """One service's neurons of a layer in its loading order."""
    return ids[deal_neurons(ids.size, 1, num_threads)[0]]


def service_specs(system: SystemConfig, config: ModelConfig) -> list[ServiceSpec]:
    """The GPU service and the CPU services of a system, with the neurons of its plan if it has one.

    Errors:  ArtifactError
    """
    num_services = system.num_cpu_actors
    num_threads, num_extra = divmod(max(system.num_threads, num_services), num_services)
    dealt = deal_neurons(config.ffn_size, num_services, num_threads, num_extra)
    planned = planned_shards(system, config)
    cache = CacheSpec(num_kv_pages(system), system.context_length, system.kv_dtype)
    dtype = system.weight_dtype
    gpu = ServiceSpec(
        "gpu", 0, system.num_threads, system.model_path, cache=cache, weight_dtype=dtype
    )
    cpus = [
        ServiceSpec(
            f"cpu{i}",
            i + 1,
            num_threads + (i < num_extra),
            system.model_path,
            weight_dtype=dtype,
            neuron_ids=[ids] * config.num_layers
            if planned is None
            else [_dealt(layer_ids, num_threads + (i < num_extra)) for layer_ids in planned[i]],
        )
        for i, ids in enumerate(dealt)
    ]
    return [gpu, *cpus]


def num_kv_pages(system: SystemConfig) -> int:
    """Pages of the KV cache."""
    return num_pages_of(max(system.kv_positions, system.context_length))


def arena_layout(system: SystemConfig, config: ModelConfig) -> ArenaLayout:
    """The wires that this system needs."""
    return ArenaLayout(
        num_services=1 + system.num_cpu_actors,
        max_tokens=max(system.max_batch, min(system.prefill_chunk, system.context_length)),
        width=config.hidden_size,
        max_neurons=config.ffn_size,
        vocab_size=config.vocab_size,
        max_logits=max(system.max_batch, _LEAST_LOGITS),
        num_slots=system.max_batch,
        pages_a_slot=num_pages_of(system.context_length),
        num_layers=config.num_layers,
    )
