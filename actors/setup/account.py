"""The account of a system's bytes, by device and part, made before anything is started.

All that is said of memory comes from here: plans, preflight, `doctor`, several models, a new size,
what a GPU holds, what stays in memory of neurons on storage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from hotcold.actors.protocol.messages import ServiceSpec, SystemConfig
from hotcold.actors.protocol.offloaded_neurons import WORD_BYTES
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS
from hotcold.actors.setup.gpu_share import num_cold_neurons, usable_gpu_bytes
from hotcold.actors.setup.shards import (
    arena_layout,
    draft_config,
    served_config,
    system_kv_bytes,
)
from hotcold.actors.setup.storage_shares import bytes_in_memory, offloaded_ffn_bytes
from hotcold.cuda_kernels.matrix import padded_items
from hotcold.model.byte_sizes import binary_text
from hotcold.model.config.model_config import MatrixKind, ModelConfig
from hotcold.model.errors import MemoryBudgetError
from hotcold.model.files.artifact import ModelIdentity, check_artifact
from hotcold.model.files.checkpoint import Checkpoint, needs_torch
from hotcold.model.weights.draft_layer import draft_input_bytes, own_head
from hotcold.model.weights.memory import available_bytes, memory_limit
from hotcold.model.weights.sizes import (
    attention_bytes,
    ffn_bytes,
    head_bytes,
    neuron_bytes,
    rope_table_shape,
    weight_bytes,
)
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS, SEGMENT_POSITIONS
from hotcold.numba_kernels.formats import DTYPES, row_items
from hotcold.placement.solver.plan_devices import GPU_RESERVE_BYTES
from hotcold.predictors.predictor_file import KINDS

_PROCESS_BYTES = 180 << 20  # of Python and Ray in one actor, its part of their libraries too
# Measured after long prompts beyond what is counted: of each service; of Ray and the command.
_SERVICE_BYTES, _OTHERS_BYTES = 50 << 20, 200 << 20
_TILED = 128 + 16  # vectors and rows that a thread packs at once for the byte tiles of AMX
_TORCH_BYTES = 130 << 20  # of a process that imports it, for .bin files
CUDA_BYTES = 512 << 20  # host memory of CUDA, CuPy and cuBLAS; not measured


@dataclass(frozen=True)
class Account:
    """Bytes of each part of a system on the driver's host; the arena's are shared memory."""

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


def account(
    system: SystemConfig, config: ModelConfig, is_sure: bool = False, extra_bytes: int = 0
) -> Account:
    """The bytes of the system on the driver's host, which needs most of several.

    `config` has the dtype that matrices are loaded in. The KV cache is full. A GPU whose share is
    not known yet is filled to its budget or, where `is_sure` and beside neurons on storage, with
    what surely fits. Other hosts' services check their own memory (`actors/setup/host_files.py`).
    `extra_bytes` of processes are added.
    """
    is_stored = system.storage is not None
    share = expected_gpu(system, config, is_sure or is_stored)
    has_gpu, num_services = share.device == "cuda", system.num_cpu_actors
    on_host = share.num_host_layers / config.num_layers if has_gpu else 1
    if share.storage is None:
        num_cold = num_cold_neurons(share, config)
        of_neurons = ffn_bytes(config, num_cold, num_services)
    else:
        of_neurons = offloaded_ffn_bytes(share, config, share.storage)
        extra_bytes += more_process_bytes(share, config)
    # Driver, attention, CPU services, which hosts share equally.
    num_processes = 2 + num_services // system.num_hosts
    # With the exchange by calls every process has its own arena.
    num_arenas = 1 if system.exchange == "arena" else num_processes
    return Account(
        attention_bytes=round(attention_bytes(config) * on_host),
        head_bytes=head_bytes(config) * (share.head_on_host or not has_gpu),
        ffn_bytes=-(-of_neurons // system.num_hosts),
        kv_cache_bytes=round(system_kv_bytes(system, config) * on_host),
        process_bytes=num_processes * _process_bytes(system)
        + attention_parts_bytes(system, config)
        + (0 if has_gpu else 4 * math.prod(rope_table_shape(config, system.context_length)))
        + _vectors_bytes(system, config)
        + extra_bytes,
        arena_bytes=num_arenas * arena_layout(system, config).num_bytes,
        predictor_bytes=_predictor_bytes(system),
        draft_bytes=draft_bytes(system, config),
    )


def new_services_bytes(system: SystemConfig, config: ModelConfig) -> int:
    """Bytes of the CPU services and their arena alone, where attention's service stays."""
    need, drafting = account(system, config), draft_config(system, config)
    num_bytes = need.ffn_bytes + need.arena_bytes + system.num_cpu_actors * _process_bytes(system)
    return num_bytes + (0 if drafting is None else ffn_bytes(drafting, drafting.num_neurons))


def service_bytes(spec: ServiceSpec, config: ModelConfig) -> int:
    """Bytes of the weights of one service, whose files are here. Errors: CheckpointError."""
    draft = spec.draft
    drafting = 0 if draft is None else service_bytes(draft, spec.system.draft_model(config))
    config = served_config(spec.system, config)
    if spec.storage is not None and spec.cache is None:
        return drafting + bytes_in_memory(config, spec.storage)
    num_bytes = attention_bytes(config) * len(spec.attention) // config.num_layers
    num_bytes += head_bytes(config) * spec.has_head
    if spec.neuron_ids is not None:
        num_neurons = sum(ids.size for ids in spec.neuron_ids)
        num_bytes += ffn_bytes(config, num_neurons, spec.system.num_cpu_actors)
    return drafting + num_bytes


def loaded_bytes(system: SystemConfig, config: ModelConfig) -> int:
    """Bytes of weights that the services load; of offloaded neurons those kept in memory."""
    num_bytes = draft_bytes(system, config)
    if system.storage is None:
        return num_bytes + weight_bytes(config)
    num_hot = max(0, expected_gpu(system, config).num_hot_neurons)
    return (
        num_bytes
        + attention_bytes(config)
        + head_bytes(config)
        + ffn_bytes(config, num_hot)
        + bytes_in_memory(config, system.storage)
    )


def draft_bytes(system: SystemConfig, config: ModelConfig) -> int:
    """Bytes of the second weights, of drafts; all of them are in memory."""
    drafting = draft_config(system, config)
    if drafting is None:
        return 0
    num_bytes = weight_bytes(drafting)
    if drafting.drafts_after:
        checkpoint = Checkpoint(system.model_path)
        num_bytes -= head_bytes(drafting) * (not own_head(checkpoint, drafting))
        num_bytes += draft_input_bytes(drafting)
    return num_bytes


@dataclass(frozen=True)
class GpuParts:
    """Bytes of each part that a GPU may hold, with rows padded as they are there."""

    layer: int  # attention of one, with its KV cache and the norm of its FFN's output
    head: int
    neuron: int
    predictors: int = 0  # of all layers, where it may have them
    predicts: tuple[bool, ...] = ()  # which layers they are of

    @classmethod
    def of(cls, system: SystemConfig, config: ModelConfig) -> GpuParts:
        """`config` has the formats that matrices are loaded in."""
        width = config.hidden_size
        of_all = attention_bytes(config) + system_kv_bytes(system, config)
        padding = config.most_inputs * _padding(config, width, "qkv")
        padding += width * _padding(config, config.heads.heads_size, "out")
        neuron_padding = (1 + config.has_gate) * _padding(config, width, "gate")
        neuron_padding += _padding(config, width, "down")
        head_padding = config.vocab_size * _padding(config, config.embed_size, "head")
        predicts = _predicted_layers(system)
        return cls(
            layer=-(-of_all // config.num_layers) + 4 * width * config.has_output_norms + padding,
            head=head_bytes(config) + head_padding,
            neuron=neuron_bytes(config) + neuron_padding,
            predictors=Path(system.predictors_path).stat().st_size if any(predicts) else 0,
            predicts=predicts,
        )

    def within(self, num_bytes: int, wanted: SystemConfig, config: ModelConfig) -> SystemConfig:
        """`wanted` with as much of its GPU's share as goes into `num_bytes`.

        Layers' attention with its cache goes first, the last layers' before others', then the head,
        then predictors, then neurons: layers without predictors take two exchanges each. But no
        neuron stays away for them alone.
        """
        left, most = max(0, num_bytes), config.num_layers - wanted.num_host_layers
        num_layers = min(most, left // self.layer)
        left -= num_layers * self.layer
        has_head = not wanted.head_on_host and num_layers == most and self.head <= left
        left -= self.head * has_head
        num_hot, beside = (
            min(num_bytes // self.neuron, wanted.num_hot_neurons)
            for num_bytes in (left, left - self.predictors)
        )
        predicts = any(self.predicts) and num_layers > 0 and self.predictors <= left
        predicts &= beside == num_hot or num_hot < config.num_neurons
        return replace(
            wanted,
            num_hot_neurons=beside if predicts else num_hot,
            gpu_predicts=self.predicts if predicts else (),
            num_host_layers=config.num_layers - num_layers,
            head_on_host=not has_head,
        )


def _padding(config: ModelConfig, width: int, kind: MatrixKind) -> int:
    """Unused bytes of a row on the device."""
    dtype = DTYPES[config.dtype_of(kind)]
    items = row_items(dtype, width)
    return (padded_items(dtype, items) - items) * dtype.itemsize


def _predicted_layers(system: SystemConfig) -> tuple[bool, ...]:
    """Of which layers a GPU may have the predictors.

    The services share the driver's memory.
    """
    if not system.predictors_path or not system.shares_arena or system.storage is not None:
        return ()
    identity = ModelIdentity.of(system.model_path)
    facts = check_artifact(Path(system.predictors_path), "predictors", identity)
    kinds = facts.get("kinds")
    return tuple(kind in KINDS for kind in kinds) if isinstance(kinds, list) else ()


def expected_gpu(system: SystemConfig, config: ModelConfig, is_sure: bool = True) -> SystemConfig:
    """`system` with the share that its GPU holds, or surely will hold; else at most."""
    if system.device != "cuda" or system.num_hot_neurons >= 0:
        return system
    num_bytes = usable_gpu_bytes(system.gpu_memory_bytes, is_sure) - GPU_RESERVE_BYTES * is_sure
    every = replace(system, num_hot_neurons=config.num_neurons)
    return GpuParts.of(system, config).within(num_bytes, every, config)


def more_process_bytes(system: SystemConfig, config: ModelConfig) -> int:
    """Upper bound of process memory on the driver's host, where neurons are on storage.

    It is beyond what is counted otherwise. A service with a GPU holds part of the GPU's share while
    it loads: one layer's attention, one layer's neurons, or the head.
    """
    num_services = 1 + system.num_cpu_actors // system.num_hosts
    num_bytes = num_services * _SERVICE_BYTES + _OTHERS_BYTES
    if system.device == "cuda":
        num_neurons = min(config.largest_ffn, max(0, system.num_hot_neurons))
        layer = -(-attention_bytes(config) // config.num_layers)
        parts = layer, ffn_bytes(config, num_neurons), head_bytes(config)
        num_bytes += CUDA_BYTES + max(parts)
    return num_bytes


def _process_bytes(system: SystemConfig) -> int:
    """Of one process, without what it computes."""
    return _PROCESS_BYTES + _TORCH_BYTES * needs_torch(Path(system.model_path))


def _vectors_bytes(system: SystemConfig, config: ModelConfig) -> int:
    """Upper bound of what threads have for vectors, in attention and in CPU services.

    Their `ActivationSpace`, and what they pack vectors and rows into for AMX's tiles.
    """
    width = max(config.matrix_widths)
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
    heads = (layer.attention for layer in config.layers)
    numbers = max(own.num_heads * (own.head_dim + 2) for own in heads)
    return num_tokens * num_segments * numbers * 4


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
        f"{binary_text(free)} are {what}; use {what_fits(free, quantized)}"
    )


def what_fits(free: int, quantized: Iterable[tuple[str, Account]]) -> str:
    """What to use instead: the first --dtype that fits, if one does."""
    for dtype, need in quantized:
        if need.total_bytes <= free:
            return f"--dtype {dtype}, with which it needs {binary_text(need.total_bytes)}"
    return "a smaller model or a smaller --context"
