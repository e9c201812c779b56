"""What a user may choose of a system. Imports little, so a command line is read at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

from hotcold.actors.protocol.messages import (
    AUTO_MODE,
    DRAFTS,
    EXCHANGES,
    MODES,
    SPECULATE,
)
from hotcold.model.errors import HotcoldError, UsageError, shown

QUANTIZED = ("q8", "q4_1", "q4", "mxfp4")
DTYPES = ("f16", "bf16", *QUANTIZED)
KV_DTYPES = ("float16", "float32", "q8")
DEVICES = ("auto", "cpu", "cuda")
PIN_CHOICES = ("auto", "on", "off")
AUTO_DRAFT = "auto"  # what takes no more memory

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_TIME = re.compile(r"(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9}(?:\.\d{1,9})?)s?)?")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class Option(NamedTuple):
    """How a field of `SystemOptions` is given: on the command line, in settings, in Python."""

    flag: str  # of the command line, and so the name in settings
    keyword: str  # of the Python API
    about: str
    reads: str  # "choice", "number", "size", "path" or "addresses"
    choices: tuple[str, ...]
    default: Any

    def value_of(self, given: Any) -> Any:
        """A keyword's value as it is kept; None: the default. Errors: UsageError."""
        if given is None:
            return self.default
        if self.reads == "size" and given in self.choices:
            return 0
        if self.reads == "choice" and given not in self.choices:
            raise UsageError(
                f"{self.keyword} is {shown(given)}; give one of {', '.join(self.choices)}"
            )
        if self.reads == "size" and isinstance(given, str):
            try:
                return bytes_of(given)
            except UsageError as problem:
                raise UsageError(f"{self.keyword}: {problem}") from None
        if self.reads == "number" and (isinstance(given, bool) or not isinstance(given, Integral)):
            raise UsageError(f"{self.keyword} is {shown(given)}; give a whole number")
        kept: dict[str, Callable[[Any], Any]] = {"path": Path, "addresses": tuple}
        return kept.get(self.reads, lambda value: value)(given)


def _option(
    flag: str,
    about: str,
    reads: str = "choice",
    choices: tuple[str, ...] = (),
    default: Any = None,
    keyword: str = "",
) -> Any:
    """A field of `SystemOptions`."""
    keyword = keyword or flag.lstrip("-").replace("-", "_")
    one = Option(flag, keyword, about, reads, choices, default)
    return field(default=default, metadata={"option": one})


@dataclass(frozen=True)
class SystemOptions:
    """What a user may choose; None: the system chooses. Each option is declared here alone."""

    # fmt: off
    mode: str | None = _option(
        "--mode", "Which neurons to compute: all; up and down only where the gate fired (the same "
        "tokens); only where they add more than a threshold; what a predictor chooses; auto: the "
        "faster of the model's default and of predictors made for a recall of 0.99 or more, where "
        "such lie beside it.", choices=(*MODES, AUTO_MODE))
    predictors: Path | None = _option(  # noqa: RUF009  # a field
        "--predictors", "The file of predictors for --mode sign and lowrank; the model's own "
        "without it.", "path")
    thresholds: Path | None = _option(  # noqa: RUF009  # a field
        "--thresholds", "The file of thresholds for --mode threshold; the model's own without it.",
        "path")
    weight_dtype: str | None = _option(
        "--dtype", "Cast the weights to 16 bits while they load, or quantize them to 8 or 4 "
        "(q4_1: with a minimum beside each scale); as stored without it.", choices=DTYPES)
    plan: Path | None = _option(  # noqa: RUF009  # a field
        "--plan", "Load by this plan; without it by the one that `hotcold plan` made for these "
        "options, if there is one.", "path")
    num_threads: int | None = _option("--threads", "Threads; one a core without it.", "number")
    num_cpu_actors: int | None = _option(
        "--cpu-actors", "CPU services that share the cold neurons; as many as NUMA nodes without "
        "it.", "number")
    context_length: int | None = _option(
        "--context", "Most tokens of a request, the prompt and the answer together.", "number",
        keyword="context_length")
    max_batch: int | None = _option(
        "--parallel", "Requests that run at once, 1 to 32; 8 without it.", "number")
    kv_positions: int | None = _option(
        "--kv-tokens", "Tokens that the KV cache holds, of all requests together; one context "
        "without it.", "number")
    prefix_cache_bytes: int | None = _option(
        "--prefix-cache", "Keep beginnings of prompts in a file of at most this size, like 20GiB, "
        "for later starts too; off: compute each prompt anew. Without it they are kept in the KV "
        "cache alone.", "size", choices=("off",), keyword="prefix_cache")
    kv_dtype: str | None = _option(
        "--kv-dtype", "KV cache format; q8 is half of float16.", choices=KV_DTYPES)
    device: str = _option(
        "--device", "Where attention, head and hot neurons are; auto: a GPU if there is one.",
        choices=DEVICES, default="auto")
    gpu_memory_bytes: int | None = _option(
        "--gpu-memory", "VRAM to use, like 8GiB; all that is free, but for a reserve, without it; "
        "0: no GPU.", "size")
    cpu_memory_bytes: int | None = _option(
        "--cpu-memory", "Memory to use, with --hosts on each of them.", "size")
    exchange: str = _option(
        "--exchange", "How the driver asks services: doorbells in shared memory, or actor calls.",
        choices=EXCHANGES, default="arena")
    draft: str = _option(
        "--draft", "What drafts tokens for --speculate, beside repeated text (ngram): mtp, the "
        "model's own layer for that, where it has one; q4, its weights in 4 bits, in memory beside "
        "them; predicted, the model with the neurons that its predictors choose; auto is mtp where "
        "it can be, else ngram.", choices=(AUTO_DRAFT, *DRAFTS),
        default=AUTO_DRAFT)
    pin: str = _option(
        "--pin", "Keep services on the cores and memory of their NUMA nodes; auto: with one node, "
        "on cores until another program wants those.", choices=PIN_CHOICES, default="auto")
    speculate: str = _option(
        "--speculate", "How many tokens are proposed beforehand, and verified in one step: as many "
        "as pay, none, or a number. The answer is the same.", choices=SPECULATE, default="auto")
    hosts: tuple[str, ...] = _option(
        "--hosts", "Ray nodes that share the CPU services, like 10.0.0.1,10.0.0.2; the driver's "
        "own without it.", "addresses", default=())
    # fmt: on

    @classmethod
    def of_keywords(cls, **given: Any) -> SystemOptions:
        """The options of the Python API's keywords. Errors: UsageError."""
        values = {name: one.value_of(given[one.keyword]) for name, one in OPTIONS.items()}
        return cls(**values)


OPTIONS: dict[str, Option] = {one.name: one.metadata["option"] for one in fields(SystemOptions)}
_KEYWORDS = {one.flag: one.keyword for one in OPTIONS.values()}
PATHS = tuple(name for name, one in OPTIONS.items() if one.reads == "path")


def in_keywords(error: HotcoldError) -> HotcoldError:
    """The error, which names options as the Python API does: context_length for --context."""

    def keyword(flag: re.Match[str]) -> str:
        return _KEYWORDS.get(flag[0], flag[0])

    error.args = (re.sub(r"--[a-z][a-z-]*", keyword, str(error)),)
    return error


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
