"""How answers are drawn, as the Python API takes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hotcold.model import sampling
from hotcold.model.errors import UsageError, shown, unknown_option
from hotcold.model.parameters import LARGEST_SEED, require_int

if TYPE_CHECKING:
    from hotcold.actors.protocol.messages import Grammar

_MAX_ANSWERS = 2048
_MAX_TOP = 1024  # likeliest tokens beside a logprob
_SHAPES = ("json_schema", "regex", "choice", "grammar")
_HELD = f"one of {', '.join(_SHAPES)}"
_OTHER_NAMES = {  # elsewhere: here
    **dict.fromkeys(("max_new_tokens", "num_predict", "n_predict", "max_length"), "max_tokens"),
    **dict.fromkeys(("structured_outputs", "guided_decoding", "response_format"), _HELD),
    **dict.fromkeys(("thinking_budget", "reasoning_budget"), "thinking_token_budget"),
    "best_of": "n",
}
_NEEDLESS = (  # options of vLLM's
    "disable_log_stats", "distributed_executor_backend", "enforce_eager", "pipeline_parallel_size",
    "swap_space", "tensor_parallel_size", "trust_remote_code",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, repr=False)
class SamplingParams(sampling.SamplingParams):
    """How answers are drawn; what is not given is the model's own default, as in its files.

    `n` answers to each prompt; with a `seed` they have it, and the numbers that follow it.
    `logprobs`: each token's log-probability, and those of so many likeliest tokens beside it;
    `prompt_logprobs`: the same of the prompt's tokens. `repetition_penalty` is vLLM's: it counts
    all of prompt and answer. Presence and frequency penalties count all of the answer, unless
    `repeat_last_n` or `penalize_prompt` say otherwise.

    An answer may be held to one of: `json_schema`, an object, JSON text or a Pydantic class;
    `regex`, which all of it matches; `choice`, of some texts; `grammar`, in Lark's language.

    A prompt that begins as an earlier one did takes that from the KV cache, where it still is; with
    `cache` False it is computed anew, and kept for no other. Prompts of another `cache_salt` have
    nothing in common.
    Errors:  UsageError naming the option that is unknown or out of range
    """

    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float | None = None
    json_schema: dict[str, Any] | bool | str | type[Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    cache: bool = True
    cache_salt: str = ""

    def __new__(cls, *unnamed: Any, **given: Any) -> SamplingParams:
        """Note which options are given. A copy gets its options otherwise."""
        if unnamed:
            raise UsageError("SamplingParams takes options by name, like SamplingParams(seed=1)")
        known = [field.name for field in fields(cls)] if given else []
        if unknown := sorted(set(given).difference(known)):
            raise UsageError(unknown_option("SamplingParams", unknown[0], known, _OTHER_NAMES))
        made = super().__new__(cls)
        object.__setattr__(made, "_given", tuple(given))
        return made

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("n", self.n, 1, _MAX_ANSWERS)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 0, _MAX_TOP)
        for name, is_right, wanted in (
            ("cache", isinstance(self.cache, bool), "True or False"),
            ("cache_salt", isinstance(self.cache_salt, str), "a text"),
            ("regex", isinstance(self.regex, str | None), "a text"),
            ("grammar", isinstance(self.grammar, str | None), "a text"),
            ("choice", self.choice is None or _are_texts(self.choice), "a list of texts"),
        ):
            if not is_right:
                raise UsageError(f"{name} is {shown(getattr(self, name))}; give {wanted}")
        if self.repetition_penalty is not None:
            known = sampling.PARAMETERS[sampling.REPETITION]
            known.kind.check(sampling.REPETITION, self.repetition_penalty)
        sampling.require_one_repeat(name for name, one in self._own.items() if one is not None)
        shapes = [name for name in _SHAPES if getattr(self, name) is not None]
        if len(shapes) > 1:
            raise UsageError(f"{shapes[0]} and {shapes[1]} were both given; leave one out")

    @property
    def _own(self) -> dict[str, Any]:
        """The options that were given, as they are kept."""
        names: tuple[str, ...] = getattr(self, "_given")  # noqa: B009  # not a field
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{k}={v!r}' for k, v in self._own.items())})"

    def changed(self, **options: Any) -> SamplingParams:
        """The same with some options changed."""
        return SamplingParams(**self._own | options)

    @classmethod
    def of_model(cls, own: sampling.SamplingParams) -> SamplingParams:
        """What a model's own sampling says beside the defaults."""
        plain = sampling.SamplingParams()
        names = (one.name for one in fields(plain))
        given = {name: getattr(own, name) for name in names}
        return cls(**{name: one for name, one in given.items() if one != getattr(plain, name)})

    def of_requests(self, defaults: sampling.SamplingParams) -> list[sampling.SamplingParams]:
        """The sampling of each of `n` requests; `defaults` are the model's own."""
        given = {name: one for name, one in self._own.items() if name in sampling.PARAMETERS}
        base = sampling.SamplingParams.of_given(given, defaults)
        if base.seed is None:
            return [base] * self.n
        return [replace(base, seed=(base.seed + i) & LARGEST_SEED) for i in range(self.n)]

    @property
    def has_shape(self) -> bool:
        """Whether answers are held to something."""
        return any(getattr(self, name) is not None for name in _SHAPES)

    def shape(self) -> Grammar | None:
        """What answers are held to. Errors: UsageError for what answers cannot be held to."""
        if not self.has_shape:
            return None
        from hotcold.actors.protocol.messages import Grammar

        if self.json_schema is not None:
            text = Grammar("json_schema", _json_text(self.json_schema))
            return grammars().schema_grammar(text, None)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.choice is not None:
            return grammars().choice_grammar(list(self.choice))
        return Grammar("lark", self.grammar or "")


def grammars() -> ModuleType:
    """What makes grammars; importing it takes a while."""
    from hotcold.actors.driver.grammars import grammar

    return grammar


def unknown_argument(
    owner: str, name: str, known: Sequence[str], others: Mapping[str, str] | None = None
) -> str:
    """As `unknown_option`, of what may belong in SamplingParams, or is needed elsewhere alone."""
    own = name if name in (one.name for one in fields(SamplingParams)) else _OTHER_NAMES.get(name)
    if own:
        told = f"{own} in SamplingParams" if own == _HELD else f"SamplingParams({own}=...)"
        return f"{owner} has no option {name!r}; give {told}"
    if name in _NEEDLESS:
        return f"{owner} has no option {name!r}, and needs none like it; leave it out"
    return unknown_option(owner, name, known, others)


def _are_texts(given: Any) -> bool:
    is_list = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    return is_list and all(isinstance(one, str) for one in given)


def _json_text(schema: Any) -> str:
    """A schema as JSON text; a Pydantic class has one. Errors: UsageError."""
    try:
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        return json.dumps(json.loads(schema) if isinstance(schema, str) else schema)
    except Exception:  # Pydantic's own, too
        raise UsageError(f"json_schema is {shown(schema)}; give a JSON schema") from None
