"""Sampling options of a request, checked, and a model's defaults; a kernel draws the tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hotcold.model.config.json_reader import ConfigReader, read_json_object
from hotcold.model.errors import HotcoldError, UsageError, shown

if TYPE_CHECKING:
    from hotcold.model.config.model_config import ModelConfig

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request; the defaults are llama.cpp's.

    First `logit_bias`, pairs of a token id and a number, is added to logits. Then the penalties
    lower the logits of the last `repeat_last_n` tokens (-1: all) of prompt and answer; presence and
    frequency penalties of the answer alone without `penalize_prompt`. `repeat_penalty` 1 and the
    others 0 change nothing. Then top_k, top_p and min_p filter, in this order; `top_k` 0 keeps all
    tokens, and `temperature` 0 takes the most likely one.
    Generation ends after `max_tokens` (None: with the context), and from `min_tokens` on at a
    `stop` text, at one of `stop_token_ids`, or at an end token unless `ignore_eos`. The answer
    includes these only with `include_stop_str_in_output`.
    Errors:  UsageError naming the value that is out of range
    """

    max_tokens: int | None = None
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64
    penalize_prompt: bool = True
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    logit_bias: Sequence[tuple[int, float]] | Mapping[int, float] = ()

    def __post_init__(self) -> None:
        self._keep_as_tuples()
        if self.max_tokens is not None:
            require_int("max_tokens", self.max_tokens, 1, 1 << 31)
        require_number("temperature", self.temperature, 0.0, 100.0)
        require_int("top_k", self.top_k, 0, 1 << 31)
        require_number("top_p", self.top_p, 0.0, 1.0)
        require_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            require_int("seed", self.seed, 0, (1 << 63) - 1)
        is_tuple = isinstance(self.stop, tuple)
        if not is_tuple or any(not isinstance(text, str) or not text for text in self.stop):
            raise UsageError(f"stop is {shown(self.stop)}; give texts that are not empty")
        _require_bool("ignore_eos", self.ignore_eos)
        require_number("repeat_penalty", self.repeat_penalty, 0.01, 100.0)
        require_number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        require_number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        require_int("repeat_last_n", self.repeat_last_n, -1, 1 << 31)
        _require_bool("penalize_prompt", self.penalize_prompt)
        if not isinstance(self.stop_token_ids, tuple):
            raise _out_of_range("stop_token_ids", self.stop_token_ids, "a list of token ids")
        for token_id in self.stop_token_ids:
            require_int("stop_token_ids", token_id, 0, (1 << 31) - 1)
        require_int(
            "min_tokens",
            self.min_tokens,
            0,
            (1 << 31) if self.max_tokens is None else self.max_tokens,
        )
        _require_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        is_pairs = isinstance(self.logit_bias, tuple)
        if not is_pairs or any(not isinstance(one, tuple) for one in self.logit_bias):
            raise _out_of_range("logit_bias", self.logit_bias, "an object of token ids and numbers")
        for token_id, bias in self.biases:
            require_int("logit_bias", token_id, 0, (1 << 31) - 1)
            require_number("logit_bias", bias, -100.0, 100.0)

    def _keep_as_tuples(self) -> None:
        for name in ("stop", "stop_token_ids", "logit_bias"):
            given = getattr(self, name)
            if isinstance(given, list):
                object.__setattr__(self, name, tuple(given))
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.logit_bias, Mapping):
            biases = tuple((_token_id(key), bias) for key, bias in self.logit_bias.items())
            object.__setattr__(self, "logit_bias", biases)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is kept."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    @classmethod
    def defaults(cls, path: str | Path) -> SamplingParams:
        """Return the options in the model's generation_config.json, and defaults for others.

        Where it has do_sample the defaults are transformers': greedy for false, temperature 1 and
        top_k 50 for true.
        Errors:  ConfigError for a malformed file
        """
        file = Path(path) / GENERATION_CONFIG
        if not file.exists():
            return cls()
        reader = ConfigReader(read_json_object(file), str(file))
        base = cls()
        if reader.has("do_sample"):
            base = cls(temperature=1.0, top_k=50, top_p=1.0, min_p=0.0)
            if not reader.boolean("do_sample", True):
                return cls(temperature=0.0)
        return cls(
            temperature=reader.number("temperature", base.temperature, low=0.0, high=100.0),
            top_k=reader.integer("top_k", base.top_k, low=0, high=1 << 31),
            top_p=reader.number("top_p", base.top_p, low=0.0, high=1.0),
            min_p=reader.number("min_p", base.min_p, low=0.0, high=1.0),
        )

    @classmethod
    def from_json(cls, values: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
        """Return `defaults` changed by a request's `values`, which are JSON.

        Errors:  UsageError for an unknown key or a value out of range
        """
        known = {field.name: getattr(defaults, field.name) for field in fields(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise UsageError(f"unknown option {shown(unknown[0])}; known are {', '.join(known)}")
        return cls(**(known | values))


def eos_ids(path: str | Path, config: ModelConfig) -> tuple[int, ...]:
    """Return the tokens that end a text: generation_config.json's, else config.json's.

    Errors:  ConfigError for a malformed file or an id outside the vocabulary
    """
    file = Path(path) / GENERATION_CONFIG
    if file.exists():
        reader = ConfigReader(read_json_object(file), str(file))
        if reader.has("eos_token_id"):
            return reader.token_ids("eos_token_id", (), config.vocab_size)
    return config.eos_token_ids


def _token_id(key: str | int) -> int:
    """Also of a text, as JSON has it for a key."""
    if isinstance(key, int):
        return key
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise _out_of_range("logit_bias", key, "token ids, such as 1234, as its keys")
    return int(key)


def _require_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _out_of_range(name, value, "true or false")


def require_int(name: str, value: Any, low: int, high: int) -> None:
    """Raise UsageError unless `value` is a whole number from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:
        raise _out_of_range(name, value, f"a whole number from {low} to {high}")


def require_number(name: str, value: Any, low: float, high: float) -> None:
    """Raise UsageError unless `value` is a number from `low` to `high`."""
    if type(value) not in (int, float) or not low <= value <= high or math.isnan(value):
        raise _out_of_range(name, value, f"a number from {low:g} to {high:g}")


def _out_of_range(name: str, value: Any, wanted: str) -> HotcoldError:
    return UsageError(f"{name} is {shown(value)}; give {wanted}")
