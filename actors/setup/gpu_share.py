"""What a GPU is expected to hold of a system, and what is left of that to the host."""

from __future__ import annotations

from dataclasses import replace

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.cuda_kernels.device import first_gpu
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.weights.sizes import ffn_bytes
from hotcold.placement.memory import MemoryNeed

# Left to others where no budget is given: a screen, another program.
RESERVE_BYTES = 512 << 20
# What a GPU has beside weights and KV cache: CUDA's context, graphs, work space. What there is room
# for is found out when it is opened.
_ASIDE_BYTES = 1 << 30


def beside_gpu(need: MemoryNeed, gpu_memory_bytes: int) -> MemoryNeed:
    """What the host holds of `need` when a GPU holds as much as its budget (0: all of it) allows.

    The KV cache and attention are first, then the head, then neurons.
    """
    left, parts = _room(gpu_memory_bytes, 0), {}
    for name in ("kv_cache_bytes", "attention_bytes", "head_bytes", "ffn_bytes"):
        taken = min(left, getattr(need, name))
        parts[name] = getattr(need, name) - taken
        left -= taken
    return replace(need, **parts)


def _room(budget: int, reserve_bytes: int) -> int:
    """Bytes of the GPU that `budget` allows (0: all but the reserve), at most those there are.

    Where no GPU can be seen that is the budget.
    """
    found = first_gpu()
    return budget if isinstance(found, str) else min(budget or found[1] - reserve_bytes, found[1])


def expected_share(need: MemoryNeed, system: SystemConfig, config: ModelConfig) -> SystemConfig:
    """`system` with what its GPU is expected to hold of `need`, or holds, where that is known.

    `need` is of the whole system, wherever its parts are. What the GPU takes beside them is counted
    here, so rather less is expected than there will be.
    """
    if system.device != "cuda" or system.num_hot_neurons >= 0:
        return system
    layers = config.num_layers
    left = max(0, _room(system.gpu_memory_bytes, RESERVE_BYTES) - _ASIDE_BYTES)
    layer_bytes = -(-(need.attention_bytes + need.kv_cache_bytes) // layers)
    num_layers = min(layers, left // layer_bytes)
    left -= num_layers * layer_bytes
    has_head = num_layers == layers and need.head_bytes <= left
    left -= need.head_bytes * has_head
    neuron_bytes = ffn_bytes(config, 1) - ffn_bytes(config, 0)
    return replace(
        system,
        num_hot_neurons=min(left // neuron_bytes, layers * config.ffn_size),
        num_host_layers=layers - num_layers,
        head_on_host=not has_head,
    )


def beside_share(need: MemoryNeed, system: SystemConfig, config: ModelConfig) -> MemoryNeed:
    """What the host holds of `need` beside a GPU that holds what `system` says."""
    if system.device != "cuda":
        return need
    on_host = system.num_host_layers / config.num_layers
    return replace(
        need,
        attention_bytes=round(need.attention_bytes * on_host),
        kv_cache_bytes=round(need.kv_cache_bytes * on_host),
        head_bytes=need.head_bytes * system.head_on_host,
        ffn_bytes=ffn_bytes(config, num_cold_neurons(system, config)),
    )


def num_cold_neurons(system: SystemConfig, config: ModelConfig) -> int:
    """Neurons of all layers that the CPU services hold."""
    num_hot = max(0, system.num_hot_neurons) if system.device == "cuda" else 0
    return config.num_layers * config.ffn_size - num_hot
