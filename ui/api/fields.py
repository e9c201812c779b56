"""Fields of requests that change answers, of all APIs whose clients may send them.

A field of `CHANGING` that a route's schema lacks is refused unless its value changes nothing. All
other unknown fields are ignored.
"""

import json
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from hotcold.model.sampling import PARAMETERS
from hotcold.ui.api.errors import ApiError

MAX_MESSAGES = 10_000
MAX_TOOLS = 128
Positive = Annotated[int, Field(ge=1, lt=1 << 31)]


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

# Fields that change answers with any value but null and empty texts, lists and objects.
_ALWAYS_CHANGING = (
    # OpenAI's
    "audio", "conversation", "functions", "max_completion_tokens",
    "max_output_tokens", "max_tokens", "prompt", "reasoning", "reasoning_effort",
    "suffix", "tools", "web_search_options",
    # vLLM's, and SGLang's
    "allowed_token_ids", "bad_words", "chat_template", "chat_template_kwargs", "documents",
    "ebnf", "enable_thinking", "grammar", "guided_choice", "guided_grammar", "guided_json",
    "guided_regex", "guided_whitespace_pattern", "logits_processors", "max_new_tokens",
    "mm_processor_kwargs", "prompt_logprobs", "regex", "stop_regex", "structural_tag",
    "structured_outputs", "truncate_prompt_tokens",
    # llama.cpp's
    "image_data", "input_prefix", "input_suffix", "json_schema", "lora", "samplers",
    # Ollama's
    "context", "format", "images", "options", "system", "template", "think",
)  # fmt: skip
# All fields that change answers, with the values that change nothing besides.
CHANGING: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_ALWAYS_CHANGING, ()),
    **{name: one.unchanging for name, one in PARAMETERS.items() if one.http is not None},
    # OpenAI's
    "background": (False,), "best_of": (1,), "echo": (False,),
    "function_call": ("none", "auto"), "logprobs": (False,), "modalities": (["text"],),
    "n": (1,), "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"), "top_logprobs": (0,), "verbosity": ("medium",),
    # vLLM's, and SGLang's
    "add_generation_prompt": (True,), "add_special_tokens": (True,),
    "continue_final_message": (False,), "early_stopping": (False,),
    "include_reasoning": (True,), "length_penalty": (1,), "min_new_tokens": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "thinking_token_budget": (-1,),
    "use_beam_search": (False,),
    # llama.cpp's
    "dynatemp_range": (0,), "min_keep": (0,),
    "n_indent": (0,), "n_predict": (-1,), "n_probs": (0,), "reasoning_budget": (-1,),
    "reasoning_format": ("auto", "deepseek"),
    "smoothing_factor": (0,), "t_max_predict_ms": (0, -1), "tfs_z": (1,), "top_a": (0,),
    # Ollama's
    "raw": (False,),
}  # fmt: skip

# The field to give instead, where a route has it.
INSTEAD = {
    "ebnf": "grammar",
    "format": "response_format",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_tokens": "max_output_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "regex": "guided_regex",
    "response_format": "text",
    "think": "reasoning_effort",
    "reasoning_effort": "reasoning",
}


class Request(StrictModel):
    """A request's body, which refuses unknown fields of `CHANGING`."""

    model_config = ConfigDict(extra="allow")

    # A route's own values in place of those in `CHANGING`.
    unchanging: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="after")
    def _changes_nothing_else(self) -> "Request":
        others = self.__pydantic_extra__ or {}
        for name, value in others.items():
            if name in CHANGING and not self._does_nothing(name, value):
                raise ApiError(400, self._unsupported(name), param=name)
        others.clear()
        return self

    @classmethod
    def _does_nothing(cls, name: str, value: Any) -> bool:
        if value is None or value in ("", [], {}):
            return True
        same = cls.unchanging.get(name, CHANGING[name])
        return any(one == value and type(value) in (type(one), int, float) for one in same)

    @classmethod
    def _unsupported(cls, name: str) -> str:
        other = INSTEAD.get(name)
        if other is None or other not in cls.model_fields:
            return f"{name} is not supported here; leave it out"
        return f"{name} is not known here; give {other}"
