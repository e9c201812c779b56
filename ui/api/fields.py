"""Fields of requests that change answers, of all APIs whose clients may send them.

A field of `CHANGING` that a route's schema lacks is refused unless its value changes nothing. So is
one whose name is nearly that of a field. All others are ignored. A schema's own field of None
alone is refused as well.
"""

import difflib
import json
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from hotcold.model.sampling import PARAMETERS
from hotcold.ui.api.errors import ApiError

MAX_MESSAGES = 10_000
MAX_TOOLS = 1024
Positive = Annotated[int, Field(ge=1, lt=1 << 31)]


def _or_no_limit(given: Any) -> Any:
    return None if type(given) is int and given == -1 else given


# -1 is no limit, as clients of llama.cpp and LM Studio say it.
NewTokens = Annotated[Positive | None, BeforeValidator(_or_no_limit)]


class StrictModel(BaseModel):
    """Types are strict: a number is no text. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


def _finite(given: Any) -> Any:
    try:
        json.dumps(given, allow_nan=False)
    except ValueError:
        raise ValueError("must hold finite numbers alone") from None
    return given


# Any value of JSON, which has no NaN and no infinity.
AnyJson = Annotated[Any, AfterValidator(_finite)]


class Other(NamedTuple):
    """A field that changes answers, and what a route without it says."""

    instead: str = ""  # the field to give; where a route lacks that one, the one instead of that
    unchanging: tuple[Any, ...] = ()  # values that change nothing, as null and empty ones do


# All fields that change answers, each once. Those without anything to give instead:
_NOTHING_INSTEAD = (
    # OpenAI's
    "audio", "conversation", "dimensions", "prompt", "reasoning", "suffix", "tools",
    "web_search_options",
    # vLLM's, and SGLang's
    "allowed_token_ids", "bad_words", "chat_template", "chat_template_kwargs", "documents",
    "grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "guided_whitespace_pattern", "logits_processors", "lora_request", "mm_processor_kwargs",
    "prompt_logprobs", "stop_regex", "structural_tag", "structured_outputs",
    "truncate_prompt_tokens",
    # llama.cpp's
    "image_data", "input_prefix", "input_suffix", "json_schema", "lora", "response_fields",
    "samplers",
    # Ollama's
    "context", "images", "options", "system", "template",
    "extra_body",
)  # fmt: skip
# The same, with the values that change nothing.
_UNCHANGING: dict[str, tuple[Any, ...]] = {
    **{name: one.unchanging for name, one in PARAMETERS.items() if one.http is not None},
    # OpenAI's
    "background": (False,), "best_of": (1,), "echo": (False,), "logprobs": (False,),
    "max_output_tokens": (-1,), "modalities": (["text"],), "n": (1,),
    "tool_choice": ("none", "auto"), "top_logprobs": (0,), "truncation": ("disabled",),
    # vLLM's, and SGLang's
    "add_generation_prompt": (True,), "add_special_tokens": (True,),
    "continue_final_message": (False,), "early_stopping": (False,), "include_reasoning": (True,),
    "length_penalty": (1,), "return_token_strs": (False,), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "use_beam_search": (False,),
    # llama.cpp's
    "dynatemp_range": (0,), "min_keep": (0,), "n_indent": (0,), "parse_special": (True,),
    "post_sampling_probs": (False,), "reasoning_format": ("auto", "deepseek"),
    "smoothing_factor": (0,), "t_max_predict_ms": (0, -1), "tfs_z": (1,), "top_a": (0,),
    # Ollama's, and Transformers'
    "raw": (False,), "no_repeat_ngram_size": (0,), "num_beams": (1,),
}  # fmt: skip
# The same, with the field to give instead, and the values that change nothing.
_INSTEAD: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "function_call": ("tool_choice", "none", "auto"),
    "functions": ("tools",),
    "max_completion_tokens": ("max_tokens", -1),
    "max_tokens": ("max_output_tokens", -1),
    "reasoning_effort": ("reasoning",),
    "response_format": ("text", {"type": "text"}),
    # vLLM's, and SGLang's
    "ebnf": ("grammar",),
    "enable_thinking": ("think",),
    "max_new_tokens": ("max_tokens",),
    "min_new_tokens": ("min_tokens", 0),
    "regex": ("guided_regex",),
    "return_tokens_as_token_ids": ("return_token_ids", False),
    # llama.cpp's
    "n_cmpl": ("n", 1),
    "n_predict": ("max_tokens", -1),
    "n_probs": ("logprobs", 0),
    "penalty_last_n": ("repeat_last_n",),
    "reasoning_budget": ("thinking_token_budget", -1),
    "reasoning_budget_tokens": ("thinking_token_budget", -1),
    "thinking_budget": ("thinking_token_budget", -1),
    "thinking_budget_tokens": ("thinking_token_budget", -1),
    # Ollama's
    "format": ("response_format",),
    "num_predict": ("max_tokens", -1),
    "think": ("reasoning_effort",),
    # Transformers', Anthropic's, Mistral's and Google's
    "do_sample": ("temperature", True),
    "json_mode": ("response_format", False),
    "max_length": ("max_tokens",),
    "max_tokens_to_sample": ("max_tokens",),
    "num_return_sequences": ("n", 1),
    "random_seed": ("seed",),
    "response_schema": ("response_format",),
    "stop_sequences": ("stop",),
    "thinking": ("enable_thinking",),
}
CHANGING: dict[str, Other] = {
    **dict.fromkeys(_NOTHING_INSTEAD, Other()),
    **{name: Other("", values) for name, values in _UNCHANGING.items()},
    **{name: Other(instead, tuple(values)) for name, (instead, *values) in _INSTEAD.items()},
}
_NO_MISTAKES = ("models",)  # nearly the name of a field, and OpenRouter's own

_NEARLY = 0.9  # of difflib's ratio: one wrong letter in ten
_MAX_LOOKED_AT = 32  # unknown fields of a request: each is compared with all names


class Request(StrictModel):
    """A request's body, which refuses unknown fields of `CHANGING`."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _changes_nothing_else(self) -> "Request":
        others = self.__pydantic_extra__ or {}
        for name, value in others.items():
            is_refused = name in CHANGING and not changes_nothing(name, value)
            if is_refused and not self._is_said(name, value):
                raise ApiError(400, self._unsupported(name), param=name)
        wanted = CHANGING.keys() | type(self).model_fields.keys()
        unknown = (name for name in others if name not in wanted and name not in _NO_MISTAKES)
        for name in islice(unknown, _MAX_LOOKED_AT):
            meant = _nearly(name, wanted)
            if meant and not _is_nothing(others[name]):
                text = f"{name[:50]!a} is not known here; did you mean {meant}?"
                raise ApiError(400, text, param=ascii(name[:50])[1:-1])
        others.clear()
        return self

    @property
    def prompt_field(self) -> str:
        """The field that holds the prompt: errors of it name that."""
        fields = ("messages", "input", "tokens")
        given = (name for name in fields if getattr(self, name, None) is not None)
        return next(given, "prompt")

    def _is_said(self, name: str, value: Any) -> bool:
        """Whether a field of that meaning has the value: some clients send all names of one."""
        return any(getattr(self, other) == value for other in self._instead(name))

    @classmethod
    def _instead(cls, name: str) -> Iterator[str]:
        """The fields of that meaning."""
        while name in CHANGING and (name := CHANGING[name].instead):
            if name in cls.model_fields:
                yield name

    @classmethod
    def _unsupported(cls, name: str) -> str:
        for other in cls._instead(name):
            return f"{name} is not known here; give {other}"
        return f"{name} is not supported here; leave it out"


def changes_nothing(name: str, value: Any) -> bool:
    """Whether a field, or an option of Ollama's, may be ignored with this value."""
    same = CHANGING[name].unchanging if name in CHANGING else ()
    return _is_nothing(value) or any(
        one == value and type(value) in (type(one), int, float) for one in same
    )


def _is_nothing(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _nearly(name: str, known: Collection[str]) -> str | None:
    """The known name that `name` nearly is: of as many words, or written together: maxTokens."""
    if len(name) > 2 * max(map(len, known)):
        return None
    together = {one.replace("_", ""): one for one in known}
    if meant := together.get(name.lower().replace("_", "").replace("-", "")):
        return meant
    alike = [one for one in known if one.count("_") == name.count("_")]
    return next(iter(difflib.get_close_matches(name, alike, 1, _NEARLY)), None)
