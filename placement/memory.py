"""The memory that a system needs, part by part, compared with free memory before loading."""

from collections.abc import Iterable
from dataclasses import dataclass

from hotcold.model.byte_sizes import binary_text
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import MemoryBudgetError
from hotcold.model.weights.memory import available_bytes, memory_limit
from hotcold.model.weights.sizes import attention_bytes, ffn_bytes, head_bytes

_PROCESS_BYTES = 180 << 20  # of Python and Ray in one actor, its part of their libraries too


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of each part of a system."""

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


def weight_bytes(config: ModelConfig, kept_ffn_bytes: int | None = None) -> int:
    """Bytes of weights that all services load; `kept_ffn_bytes` of neurons, by default all."""
    if kept_ffn_bytes is None:
        kept_ffn_bytes = ffn_bytes(config, config.num_neurons)
    return attention_bytes(config) + head_bytes(config) + kept_ffn_bytes


def memory_need(
    config: ModelConfig,
    kv_bytes: int,
    num_processes: int,
    arena_bytes: int,
    predictor_bytes: int = 0,
    draft_bytes: int = 0,
    num_cpu_services: int = 1,
) -> MemoryNeed:
    """The need of a system of so many processes, with its KV cache full.

    `config` has the dtype that matrices are loaded in; `kv_bytes` is that of the KV cache,
    `arena_bytes` that of all arenas; neurons are divided among `num_cpu_services`.
    """
    return MemoryNeed(
        attention_bytes=attention_bytes(config),
        head_bytes=head_bytes(config),
        ffn_bytes=ffn_bytes(config, config.num_neurons, num_cpu_services),
        kv_cache_bytes=kv_bytes,
        process_bytes=num_processes * _PROCESS_BYTES,
        arena_bytes=arena_bytes,
        predictor_bytes=predictor_bytes,
        draft_bytes=draft_bytes,
    )


def require_memory(
    need: MemoryNeed,
    budget_bytes: int | None = None,
    quantized: Iterable[tuple[str, MemoryNeed]] = (),
    kept_bytes: int = 0,
) -> None:
    """Raise MemoryBudgetError if `need` does not fit in free memory and `budget_bytes`.

    `quantized` are the needs of other --dtypes, the preferred first; the error names the first that
    fits. `kept_bytes` of the available memory must stay free.
    """
    free = max(0, available_bytes() - kept_bytes)
    if budget_bytes is not None:
        free = min(free, budget_bytes)
    if need.total_bytes <= free:
        return
    weights = need.attention_bytes + need.head_bytes + need.ffn_bytes
    what = "free" if budget_bytes is None or free < budget_bytes else "allowed by --cpu-memory"
    is_free = what == "free"
    if is_free and (limit_bytes := memory_limit()) is not None:
        what += f" within a control group's limit of {binary_text(limit_bytes)}"
    if is_free and kept_bytes:
        what += f" besides the {binary_text(kept_bytes)} that Ray's memory monitor keeps so"
    draft = f"{binary_text(need.draft_bytes)} of the draft, " if need.draft_bytes else ""
    raise MemoryBudgetError(
        f"this model needs {binary_text(need.total_bytes)} of memory ("
        f"{binary_text(weights)} weights, {draft}{binary_text(need.kv_cache_bytes)} KV cache, "
        f"{binary_text(need.process_bytes)} processes, {binary_text(need.arena_bytes)} arena), "
        f"{binary_text(free)} are {what}; use {_what_fits(free, quantized)}"
    )


def _what_fits(free: int, quantized: Iterable[tuple[str, MemoryNeed]]) -> str:
    """What to use instead: the first --dtype that fits, if one does."""
    for dtype, need in quantized:
        if need.total_bytes <= free:
            return f"--dtype {dtype}, with which it needs {binary_text(need.total_bytes)}"
    return "a smaller model or a smaller --context"
