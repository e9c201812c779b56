"""What a user may choose of a system. Imports nothing, so a command line is read at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEVICES = ("auto", "cpu", "cuda")
PIN_CHOICES = ("auto", "on", "off")


@dataclass(frozen=True)
class SystemOptions:
    """What a user may choose; None: the system chooses."""

    mode: str | None = None
    num_threads: int | None = None
    num_cpu_actors: int | None = None
    context_length: int | None = None
    max_batch: int | None = None
    kv_positions: int | None = None
    kv_dtype: str | None = None
    gpu_memory_bytes: int | None = None
    cpu_memory_bytes: int | None = None
    exchange: str = "arena"
    predictors: Path | None = None
    thresholds: Path | None = None
    plan: Path | None = None
    device: str = "auto"  # of DEVICES
    weight_dtype: str | None = None  # of --dtype; as stored without it
    pin: str = "auto"  # of PIN_CHOICES
    hosts: tuple[str, ...] = ()  # addresses of Ray nodes that share the CPU services
