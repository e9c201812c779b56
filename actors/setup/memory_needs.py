"""The memory that a system needs on a host, computed before anything is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.offloaded_neurons import WORD_BYTES
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS
from hotcold.actors.setup.gpu_share import beside_gpu, beside_share, expected_share
from hotcold.actors.setup.shards import arena_layout, draft_config, system_kv_bytes
from hotcold.actors.setup.storage_shares import bytes_in_memory, offloaded_ffn_bytes
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.checkpoint import needs_torch
from hotcold.model.weights.sizes import attention_bytes, ffn_bytes, head_bytes
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS, SEGMENT_POSITIONS
from hotcold.placement.memory import MemoryNeed, memory_need, weight_bytes

# Measured after long prompts beyond what is counted: of each service; of Ray and the command.
_SERVICE_BYTES, _OTHERS_BYTES = 50 << 20, 200 << 20
_TILED = 128 + 16  # vectors and rows that a thread packs at once for the byte tiles of AMX
_TORCH_BYTES = 130 << 20  # of a process that imports it, for .bin files
CUDA_BYTES = 512 << 20  # host memory of CUDA, CuPy and cuBLAS; not measured


def system_need(system: SystemConfig, config: ModelConfig) -> MemoryNeed:
    """The memory that the system needs on the driver's host, which needs most of several."""
    if system.storage is not None:
        share = expected_gpu(system, config)
        need = beside_share(_whole_need(system, config), share, config)
        need = replace(
            need,
            ffn_bytes=offloaded_ffn_bytes(share, config, system.storage),
            process_bytes=need.process_bytes + more_process_bytes(share, config),
        )
        return _of_one_host(need, system)
    need = _whole_need(system, config)
    if system.device == "cuda":
        need = beside_gpu(need, system.gpu_memory_bytes)
    return _of_one_host(need, system)


def loaded_bytes(system: SystemConfig, config: ModelConfig) -> int:
    """Bytes of weights that the services load; of offloaded neurons those kept in memory."""
    num_bytes = draft_bytes(system, config)
    if system.storage is None:
        return num_bytes + weight_bytes(config)
    share = expected_gpu(system, config)
    kept = bytes_in_memory(config, system.storage)
    return num_bytes + weight_bytes(config, kept + ffn_bytes(config, max(0, share.num_hot_neurons)))


def draft_bytes(system: SystemConfig, config: ModelConfig) -> int:
    """Bytes of the second weights, of drafts; all of them are in memory."""
    drafting = draft_config(system, config)
    return 0 if drafting is None else weight_bytes(drafting)


def memory_beside_gpu(system: SystemConfig, config: ModelConfig) -> MemoryNeed:
    """`system_need` with all cold neurons in memory, and on the GPU what surely fits."""
    need = beside_share(_whole_need(system, config), expected_gpu(system, config), config)
    return _of_one_host(need, system)


def expected_gpu(system: SystemConfig, config: ModelConfig) -> SystemConfig:
    """`system` with the share that its GPU holds or surely will hold."""
    return expected_share(_whole_need(system, config), system, config)


def more_process_bytes(system: SystemConfig, config: ModelConfig) -> int:
    """Upper bound of process memory on the driver's host, beyond what `MemoryNeed` counts.

    A service with a GPU holds part of the GPU's share while it loads: one layer's attention, one
    layer's neurons, or the head.
    """
    num_services = 1 + system.num_cpu_actors // max(1, len(system.hosts))
    num_bytes = num_services * _SERVICE_BYTES + _OTHERS_BYTES
    if system.device == "cuda":
        num_neurons = min(config.largest_ffn, max(0, system.num_hot_neurons))
        layer = -(-attention_bytes(config) // config.num_layers)
        parts = layer, ffn_bytes(config, num_neurons), head_bytes(config)
        num_bytes += CUDA_BYTES + max(parts)
    return num_bytes


def _of_one_host(need: MemoryNeed, system: SystemConfig) -> MemoryNeed:
    """Services on other hosts check their own memory (`actors/setup/host_files.py`)."""
    return replace(need, ffn_bytes=-(-need.ffn_bytes // max(1, len(system.hosts))))


def _whole_need(system: SystemConfig, config: ModelConfig) -> MemoryNeed:
    """The need of the driver's host and GPU together, with all hosts' neurons there."""
    num_hosts = max(1, len(system.hosts))  # which share the CPU services equally
    num_processes = 2 + system.num_cpu_actors // num_hosts  # driver, attention, CPU services
    # With the exchange by calls every process has its own arena.
    num_arenas = 1 if system.exchange == "arena" else num_processes
    need = memory_need(
        config,
        system_kv_bytes(system, config),
        num_processes,
        num_arenas * arena_layout(system, config).num_bytes,
        _predictor_bytes(system),
        draft_bytes(system, config),
        system.num_cpu_actors,
    )
    more_bytes = attention_parts_bytes(system, config) + _vectors_bytes(system, config)
    if needs_torch(Path(system.model_path)):
        more_bytes += num_processes * _TORCH_BYTES
    return replace(need, process_bytes=need.process_bytes + more_bytes)


def _vectors_bytes(system: SystemConfig, config: ModelConfig) -> int:
    """Upper bound of what threads have for vectors, in attention and in CPU services.

    Their `ActivationSpace`, and what they pack vectors and rows into for AMX's tiles.
    """
    width = max(config.hidden_size, config.num_heads * config.head_dim)
    kept = KERNEL_TOKENS * width * (4 + 1)  # floats, and a byte each
    blocks = (size for layer in config.layers for size in layer.ffn.block_sizes)
    packed = _TILED * max(width, *blocks) * 3 // 2  # a byte each, factors, sums
    return 2 * system.num_threads * (kept + packed)


def attention_parts_bytes(system: SystemConfig, config: ModelConfig) -> int:
    """Upper bound of what attention's service keeps of segments until they are merged.

    That is of a step's tokens at the end of the longest context.
    """
    layout = arena_layout(system, config)
    num_segments = -(-layout.pages_a_slot * PAGE_POSITIONS // SEGMENT_POSITIONS)
    num_tokens = min(KERNEL_TOKENS, layout.max_tokens)
    return num_tokens * num_segments * config.num_heads * (config.head_dim + 2) * 4


def _predictor_bytes(system: SystemConfig) -> int:
    """Predictor bytes in the driver's own memory, without those in the arena."""
    if system.draft_predictors_path:
        return Path(system.draft_predictors_path).stat().st_size
    if not system.predictors_path:
        return 0
    words = system.storage.predictor_words if system.storage is not None else 0
    return Path(system.predictors_path).stat().st_size - words * WORD_BYTES
