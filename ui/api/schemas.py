"""What requests may hold, by OpenAI's names. Fields that are not here are ignored.

Types are strict: a number is no text. What a text means to the model is checked later.
"""

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from ui.api.errors import ApiError
from ui.api.refusals import refusal
from ui.api.tools.schemas import Callable, ToolCalls, ToolChoice, Tools, callable_functions
from ui.strict import StrictModel

_MOST_CHOICES = 128
_MOST_TOP = 20
_MOST_GRAMMAR_CHARS = 1 << 18
_MOST_PROMPTS = 2048
_MOST_MESSAGES = 10_000
_MOST_IDS = 1 << 20
# Of a whole body, looked at before it is read: each costs memory many times its bytes.
_MOST_NESTED = 20_000  # lists and objects
_MOST_VALUES = 2 << 20
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)

# Lists end at their first wrong item: a body of wrong items would have an error for each.
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
_TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=_MOST_IDS, fail_fast=True)]
Prompt = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=_MOST_PROMPTS, fail_fast=True)]
    | _TokenIds
    | Annotated[list[_TokenIds], Field(min_length=1, max_length=_MOST_PROMPTS, fail_fast=True)]
)
_StopText = Annotated[str, Field(min_length=1, max_length=1000)]
_Positive = Annotated[int, Field(ge=1, lt=1 << 31)]


class StreamOptions(StrictModel):
    """What a stream ends with."""

    include_usage: bool | None = None


class JsonSchema(StrictModel):
    """A schema as `response_format` wraps it."""

    content: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """What an answer must be: anything, a JSON object, or JSON that a schema describes."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema must be given with type json_schema")
        return self


class SamplingRequest(StrictModel):
    """What both kinds of completion share. A missing value is the model's own default."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: _StopText | Annotated[list[_StopText], Field(max_length=4, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    grammar: Annotated[str, Field(min_length=1, max_length=_MOST_GRAMMAR_CHARS)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    # Not supported (ui/api/refusals.py), but sent by many clients with the value that does nothing.
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "SamplingRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for requests with stream true")
        is_shaped = self.response_format is not None and self.response_format.type != "text"
        if is_shaped and self.grammar is not None:
            raise ValueError("response_format and grammar were both given; leave one out")
        return self

    @property
    def has_usage_chunk(self) -> bool:
        """Whether a stream tells how many tokens it took."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ContentPart(StrictModel):
    """A part of a message; only text is understood."""

    type: Literal["text"]
    text: str


class ChatMessage(StrictModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None  # of a tool, in its result
    tool_calls: ToolCalls | None = None
    tool_call_id: str | None = None

    @property
    def for_template(self) -> dict[str, Any]:
        """The message for a chat template."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text}
        if role == "assistant" and self.tool_calls:
            message["tool_calls"] = [call.for_template for call in self.tool_calls]
        if role == "tool":
            given = {"name": self.name, "tool_call_id": self.tool_call_id}
            message |= {key: value for key, value in given.items() if value is not None}
        return message


_Messages = Annotated[
    list[ChatMessage], Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)
]


class ChatRequest(SamplingRequest):
    """POST /v1/chat/completions."""

    messages: _Messages
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_TOP)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def callable(self) -> Callable | None:
        """What the answer may call."""
        return callable_functions(self.tools, self.tool_choice, self.parallel_tool_calls)

    @model_validator(mode="after")
    def _has_tools(self) -> "ChatRequest":
        if self.callable is not None and self.grammar is not None:
            raise ValueError("tools and grammar were both given; leave one out")
        return self

    @model_validator(mode="after")
    def _has_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is for requests with logprobs true")
        return self


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: Prompt = Field(union_mode="left_to_right")
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=_MOST_TOP)] | None = None
    echo: bool | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None  # not supported

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, a text or token ids."""
        return prompts_of(self.prompt)


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """Each of a `Prompt`, a text or token ids."""
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    return [prompt] if is_one else prompt


class TokenizeRequest(StrictModel):
    """POST /tokenize: one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _is_one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(StrictModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=_MOST_IDS, fail_fast=True)]


_Body = TypeVar("_Body", bound=StrictModel)


def parse(schema: type[_Body], body: bytes) -> _Body:
    """Read a request's body. Errors: ApiError 400 that names the field."""
    _require_plain(body)
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise refusal(error) from None


def _require_plain(body: bytes) -> None:
    """Raise ApiError 400 for a body that is small only as long as nobody reads it."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") <= _MOST_NESTED:
        return
    bare = _STRING.sub(b"", body)
    if bare.count(b"[") + bare.count(b"{") > _MOST_NESTED:
        raise ApiError(400, f"the request has more than {_MOST_NESTED} lists and objects in it")
    if bare.count(b",") > _MOST_VALUES:
        raise ApiError(400, f"the request has more than {_MOST_VALUES} values in it")
