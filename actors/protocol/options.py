"""What a user may choose of a system. Imports little, so a command line is read at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hotcold.model.errors import UsageError, shown

QUANTIZED = ("q8", "q4_1", "q4")
DTYPES = ("f16", "bf16", *QUANTIZED)
KV_DTYPES = ("float16", "float32")
DEVICES = ("auto", "cpu", "cuda")
PIN_CHOICES = ("auto", "on", "off")

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_TIME = re.compile(r"(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9}(?:\.\d{1,9})?)s?)?")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


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


def bytes_of(size: str) -> int:
    """A size such as 8GiB (binary), 8GB (decimal) or a number of bytes. Errors: UsageError."""
    match = _SIZE.fullmatch(size.strip())
    if not match:
        raise UsageError(f"{shown(size)} is no size; write it like 8GiB")
    unit = (match[2] or "").lower()
    base = 1024 if unit.endswith("i") else 1000
    return int(float(match[1]) * base ** _POWERS[unit[:1]])


def seconds_of(duration: str) -> float:
    """A time such as 10m, 1h30m or a number of seconds; -1 for one without end. Errors: UsageError.

    One without end is less than 0.
    """
    text = duration.strip().lower()
    match = _TIME.fullmatch(text.removeprefix("-"))
    if not match or not any(match.groups()):
        raise UsageError(f"{shown(duration)} is no time; write it like 10m, 300 or -1")
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return -1.0 if text.startswith("-") else hours * 3600 + minutes * 60 + seconds
