"""The account of a system's bytes, part by part, made before anything is started.

All that is said of memory comes from here: plans, preflight, `doctor`, several models, a new size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.offloaded_neurons import WORD_BYTES
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS
from hotcold.actors.setup.gpu_share import num_cold_neurons, usable_gpu_bytes
from hotcold.actors.setup.shards import arena_layout, draft_config, system_kv_bytes
from hotcold.actors.setup.storage_shares import bytes_in_memory, offloaded_ffn_bytes
from hotcold.model.byte_sizes import binary_text
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import MemoryBudgetError
from hotcold.model.files.checkpoint import needs_torch
from hotcold.model.weights.memory import available_bytes, memory_limit
from hotcold.model.weights.sizes import attention_bytes, ffn_bytes, head_bytes, weight_bytes
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS, SEGMENT_POSITIONS
from hotcold.placement.solver.plan_devices import GPU_RESERVE_BYTES, RESERVE_BYTES

PROCESS_BYTES = 180 << 20  # of Python and Ray in one actor, its part of their libraries too
# Measured after long prompts beyond what is counted: of each service; of Ray and the command.
_SERVICE_BYTES, _OTHERS_BYTES = 50 << 20, 200 << 20
_TILED = 128 + 16  # vectors and rows that a thread packs at once for the byte tiles of AMX
_TORCH_BYTES = 130 << 20  # of a process that imports it, for .bin files
CUDA_BYTES = 512 << 20  # host memory of CUDA, CuPy and cuBLAS; not measured


@dataclass(frozen=True)
class Account:
    """Bytes of each part of a system on the driver's host."""

    attention_bytes: int
    head_bytes: int
    ffn_bytes: int
    kv_cache_bytes: int
    process_bytes: int
    arena_bytes: int
    predictor_bytes: int = 0
    draft_bytes: int = 0  # of weights that are only of drafts

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        return sum(vars(self).values())


def account(system: SystemConfig, config: ModelConfig) -> Account:
    """The bytes of the system on the driver's host, which needs most of several.

    `config` has the dtype that matrices are loaded in. The KV cache is full, and a GPU whose share
    is not known yet is filled to its budget. Other hosts' services check their own memory
    (`actors/setup/host_files.py`).
    """
    if system.storage is None:
        return in_memory_account(expected_gpu(system, config, is_sure=False), config)
    share = expected_gpu(system, config)
    of_all = offloaded_ffn_bytes(share, config, system.storage)
    need = in_memory_account(share, config)
    return replace(
        need,
        ffn_bytes=-(-of_all // _num_hosts(system)),
        process_bytes=need.process_bytes + more_process_bytes(share, config),
    )


def in_memory_account(system: SystemConfig, config: ModelConfig) -> Account:
    """`account` with all cold neurons in memory, and on the GPU what surely fits."""
    need, share = _everything(system, config), expected_gpu(system, config)
    if share.device == "cuda":
        on_host = share.num_host_layers / config.num_layers
        need = replace(
            need,
            attention_bytes=round(need.attention_bytes * on_host),
            kv_cache_bytes=round(need.kv_cache_bytes * on_host),
            head_bytes=need.head_bytes * share.head_on_host,
            ffn_bytes=ffn_bytes(config, num_cold_neurons(share, config)),
        )
    return replace(need, ffn_bytes=-(-need.ffn_bytes // _num_hosts(system)))


def expected_gpu(system: SystemConfig, config: ModelConfig, is_sure: bool = True) -> SystemConfig:
    """`system` with the share that its GPU holds, or surely will hold; else at most.

    Layers' attention with its cache go first, the last layers' before others', then the head, then
    neurons. What is sure is a lower estimate, but for rows that are padded there.
    """
    if system.device != "cuda" or system.num_hot_neurons >= 0:
        return system
    need, layers = _everything(system, config), config.num_layers
    reserve, aside = (RESERVE_BYTES, GPU_RESERVE_BYTES) if is_sure else (0, 0)
    left = max(0, usable_gpu_bytes(system.gpu_memory_bytes, reserve) - aside)
    layer_bytes = -(-(need.attention_bytes + need.kv_cache_bytes) // layers)
    num_layers = min(layers, left // layer_bytes)
    left -= num_layers * layer_bytes
    has_head = num_layers == layers and need.head_bytes <= left
    left -= need.head_bytes * has_head
    neuron_bytes = ffn_bytes(config, 1) - ffn_bytes(config, 0)
    return replace(
        system,
        num_hot_neurons=min(left // neuron_bytes, config.num_neurons),
        num_host_layers=layers - num_layers,
        head_on_host=not has_head,
    )


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


def more_process_bytes(system: SystemConfig, config: ModelConfig) -> int:
    """Upper bound of process memory on the driver's host, beyond what `Account` counts.

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


def _num_hosts(system: SystemConfig) -> int:
    return max(1, len(system.hosts))


def _everything(system: SystemConfig, config: ModelConfig) -> Account:
    """The account of the driver's host and GPU together, with all hosts' neurons there."""
    # Driver, attention, CPU services, which hosts share equally.
    num_processes = 2 + system.num_cpu_actors // _num_hosts(system)
    process_bytes = PROCESS_BYTES
    if needs_torch(Path(system.model_path)):
        process_bytes += _TORCH_BYTES
    # With the exchange by calls every process has its own arena.
    num_arenas = 1 if system.exchange == "arena" else num_processes
    return Account(
        attention_bytes=attention_bytes(config),
        head_bytes=head_bytes(config),
        ffn_bytes=ffn_bytes(config, config.num_neurons, system.num_cpu_actors),
        kv_cache_bytes=system_kv_bytes(system, config),
        process_bytes=num_processes * process_bytes
        + attention_parts_bytes(system, config)
        + _vectors_bytes(system, config),
        arena_bytes=num_arenas * arena_layout(system, config).num_bytes,
        predictor_bytes=_predictor_bytes(system),
        draft_bytes=draft_bytes(system, config),
    )


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


def require_memory(
    need: Account,
    budget_bytes: int | None = None,
    quantized: Iterable[tuple[str, Account]] = (),
    monitor_bytes: int = 0,
) -> None:
    """Raise MemoryBudgetError if `need` does not fit in free memory and `budget_bytes`.

    `quantized` are the needs of other --dtypes, the preferred first; the error names the first that
    fits. `monitor_bytes` of the available memory must stay free.
    """
    free = max(0, available_bytes() - monitor_bytes)
    if budget_bytes is not None:
        free = min(free, budget_bytes)
    if need.total_bytes <= free:
        return
    weights = need.attention_bytes + need.head_bytes + need.ffn_bytes
    what = "free" if budget_bytes is None or free < budget_bytes else "allowed by --cpu-memory"
    is_free = what == "free"
    if is_free and (limit_bytes := memory_limit()) is not None:
        what += f" within a control group's limit of {binary_text(limit_bytes)}"
    if is_free and monitor_bytes:
        what += f" besides the {binary_text(monitor_bytes)} that Ray's memory monitor keeps so"
    draft = f"{binary_text(need.draft_bytes)} of the draft, " if need.draft_bytes else ""
    raise MemoryBudgetError(
        f"this model needs {binary_text(need.total_bytes)} of memory ("
        f"{binary_text(weights)} weights, {draft}{binary_text(need.kv_cache_bytes)} KV cache, "
        f"{binary_text(need.process_bytes)} processes, {binary_text(need.arena_bytes)} arena), "
        f"{binary_text(free)} are {what}; use {_what_fits(free, quantized)}"
    )


def _what_fits(free: int, quantized: Iterable[tuple[str, Account]]) -> str:
    """What to use instead: the first --dtype that fits, if one does."""
    for dtype, need in quantized:
        if need.total_bytes <= free:
            return f"--dtype {dtype}, with which it needs {binary_text(need.total_bytes)}"
    return "a smaller model or a smaller --context"
