"""Schemas of completion requests, by OpenAI's and vLLM's names."""

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, ValidationError, model_validator

from hotcold.model.text.roles import ALWAYS_SAY, TEMPLATE_ROLES
from hotcold.ui.api.cached import Cached
from hotcold.ui.api.drawn import Drawn, TokenId
from hotcold.ui.api.errors import ApiError, refusal
from hotcold.ui.api.fields import MAX_MESSAGES, NewTokens, Request, StrictModel
from hotcold.ui.api.parts import Content, text_of
from hotcold.ui.api.structured_output import ConstrainedRequest
from hotcold.ui.api.tools.schemas import (
    Callable,
    CalledFunction,
    ToolCall,
    ToolCalls,
    ToolChoice,
    Tools,
    callable_functions,
)

_COMPLETION_TOKENS = 16  # without max_tokens, as OpenAI's
_MAX_CHOICES = 128
_MAX_TOP = 20
_MAX_PROMPTS = 2048
_MAX_IDS = 1 << 20
# Of a whole body, checked before it is parsed: each costs memory many times its bytes.
_MAX_NESTED = 20_000  # lists and objects
_MAX_VALUES = 2 << 20
_NO_STRUCTURE = bytes(set(range(256)) - set(b'"[{,'))

# Lists stop at the first wrong item: each would be an error otherwise.
_TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=_MAX_IDS, fail_fast=True)]
Prompt = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=_MAX_PROMPTS, fail_fast=True)]
    | _TokenIds
    | Annotated[list[_TokenIds], Field(min_length=1, max_length=_MAX_PROMPTS, fail_fast=True)]
)


_Budget = Annotated[int, Field(ge=-1, lt=1 << 31)]


class StreamOptions(StrictModel):
    """Options of a stream."""

    include_usage: bool | None = None


class SamplingRequest(ConstrainedRequest, Drawn, Cached):
    """The fields of both kinds of completions."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "SamplingRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for requests with stream true")
        return self

    @property
    def has_usage_chunk(self) -> bool:
        """Whether a stream ends with its token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatMessage(StrictModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None  # of a tool, in its result
    tool_calls: ToolCalls | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None  # OpenAI's older form
    reasoning_content: str | None = None  # the reasoning before it
    reasoning: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and self.role in ALWAYS_SAY:
            raise ValueError(f"content is missing; a message of {self.role} needs one")
        return self

    @property
    def for_template(self) -> dict[str, Any]:
        """The message for a chat template."""
        role = TEMPLATE_ROLES.get(self.role, self.role)
        message: dict[str, Any] = {"role": role, "content": text_of(self.content)}
        if role == "assistant":
            calls = list(self.tool_calls or ())
            if self.function_call is not None:
                calls.append(ToolCall(id="call_0", function=self.function_call))
            if calls:
                message["tool_calls"] = [call.for_template for call in calls]
            if thought := self.reasoning_content or self.reasoning:
                message["reasoning_content"] = thought
        if role == "tool":
            given = {"name": self.name, "tool_call_id": self.tool_call_id}
            message |= {key: value for key, value in given.items() if value is not None}
        return message


Messages = Annotated[
    list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


class Reasoning(StrictModel):
    """Whether and how long a model thinks, as in /v1/responses."""

    effort: str | None = None
    enabled: bool | None = None
    max_tokens: _Budget | None = None
    exclude: Literal[False] | None = None


class Thinking(StrictModel):
    """Whether the model thinks, as GLM's and DeepSeek's clients say it."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["enabled", "disabled"]
    budget_tokens: _Budget | None = None


class Rendered(Request):
    """A request whose conversation a chat template writes."""

    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Annotated[str, Field(max_length=50)] | None = None
    reasoning: Reasoning | None = None
    enable_thinking: bool | None = None
    thinking: Thinking | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        reasoning = self.reasoning or Reasoning()
        effort = self.reasoning_effort or reasoning.effort
        thinks = reasoning.enabled if self.enable_thinking is None else self.enable_thinking
        if thinks is None and self.thinking is not None:
            thinks = self.thinking.type == "enabled"
        if thinks is None and effort is not None:
            thinks = effort != "none"
        found: dict[str, Any] = {} if effort in (None, "none") else {"reasoning_effort": effort}
        if thinks is not None:
            found |= {"enable_thinking": thinks, "thinking": thinks}
        found |= self.chat_template_kwargs or {}
        if self.continue_final_message:
            found |= {"continue_final_message": True, "add_generation_prompt": False}
        elif self.add_generation_prompt is not None:
            found["add_generation_prompt"] = self.add_generation_prompt
        return found

    @model_validator(mode="after")
    def _is_renderable(self) -> "Rendered":
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        return self


class ChatRequest(SamplingRequest, Rendered):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: NewTokens = None
    max_completion_tokens: NewTokens = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MAX_TOP)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_special_tokens: Literal[False] | None = None  # the template writes them

    def drawn(self) -> dict[str, Any]:
        """With the budget of thoughts, also by Anthropic's and OpenRouter's names."""
        found = super().drawn()
        if found["thinking_token_budget"] is None:
            thinking = None if self.thinking is None else self.thinking.budget_tokens
            reasoning = None if self.reasoning is None else self.reasoning.max_tokens
            found["thinking_token_budget"] = reasoning if thinking is None else thinking
        return found

    @cached_property
    def callable(self) -> Callable | None:
        """The functions that the answer may call."""
        return callable_functions(self.tools, self.tool_choice, self.parallel_tool_calls)

    @cached_property
    def prompts(self) -> list[dict[str, Any]]:
        """The conversation, as fields of a `GenerateRequest`."""
        tools = [tool.for_template for tool in self.tools or ()] if self.callable else None
        messages = [message.for_template for message in self.messages]
        variables = self.template_variables
        return [{"messages": messages, "tools": tools, "template_variables": variables}]

    @property
    def most_new_tokens(self) -> int | None:
        """None: as many as there is room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def request_fields(self) -> dict[str, Any]:
        """What more of it a `GenerateRequest` says."""
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return {"is_chat": True, "num_logprobs": num_logprobs, **self.caching()}

    @model_validator(mode="after")
    def _fits(self) -> "ChatRequest":
        if self.callable is not None and self.constraint and not self.constraint.is_json:
            raise ValueError("tools and grammar were both given; leave one out")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is for requests with logprobs true")
        return self


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: Prompt = Field(union_mode="left_to_right")
    max_tokens: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None  # -1: no limit
    logprobs: Annotated[int, Field(ge=0, le=_MAX_TOP)] | None = None
    echo: bool | None = None

    callable: ClassVar[None] = None  # there are no tools

    @cached_property
    def prompts(self) -> list[dict[str, Any]]:
        """Each prompt, a text or token ids, as fields of a `GenerateRequest`."""
        return prompts_of(self.prompt)

    @property
    def most_new_tokens(self) -> int | None:
        """None: as many as there is room for; for 0 one is dropped, free beside the prompt."""
        wanted = _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return None if wanted < 0 else max(wanted, 1)

    @property
    def request_fields(self) -> dict[str, Any]:
        """What more of it a `GenerateRequest` says."""
        of_prompt = self.logprobs if self.echo else None
        return {
            "num_logprobs": self.logprobs, "num_prompt_logprobs": of_prompt, **self.caching(),
        }  # fmt: skip


def prompts_of(prompt: Any) -> list[dict[str, Any]]:
    """Each of a `Prompt`, a text or token ids, as fields of a `GenerateRequest`; of [] none."""
    is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    inputs = [prompt] if is_one else prompt
    return [{"prompt" if isinstance(one, str) else "prompt_ids": one} for one in inputs]


class TokenizeRequest(Rendered):
    """POST /tokenize: `prompt` or `messages`, as vLLM has it."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Request):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=_MAX_IDS, fail_fast=True)]


_Body = TypeVar("_Body", bound=StrictModel)


def parse(schema: type[_Body], body: bytes) -> _Body:
    """Read a request's body. Errors: ApiError 400 that names the field."""
    _require_plain(body)
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise refusal(error) from None


def _require_plain(body: bytes) -> None:
    """Raise ApiError 400 for a small body that takes much memory once it is parsed."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") <= _MAX_NESTED:
        return
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NO_STRUCTURE)
    bare = b"".join(plain.split(b'"')[::2])  # what is in no string
    if bare.count(b"[") + bare.count(b"{") > _MAX_NESTED:
        raise ApiError(400, f"the request has more than {_MAX_NESTED} lists and objects in it")
    if bare.count(b",") > _MAX_VALUES:
        raise ApiError(400, f"the request has more than {_MAX_VALUES} values in it")
