"""Schemas of Ollama's requests, and the same requests of OpenAI's API."""

import json
import re
from datetime import datetime
from typing import Annotated, Any

from pydantic import Field, field_validator

from hotcold.model.errors import shown
from hotcold.ui.api.errors import ApiError
from hotcold.ui.api.fields import MAX_MESSAGES, MAX_TOOLS, Request, StrictModel
from hotcold.ui.api.schemas import ChatRequest, CompletionRequest

# As Go writes durations. Nothing that was read is given back: there is one way to read a time.
_UNIT = r"(?:ns|[uµμ]s|ms|s|m|h)"
_TIME = re.compile(rf"[+-]?(?:\d++(?:\.\d*+)?+|(?:(?:\d++(?:\.\d*+)?+|\.\d++){_UNIT})++)")
_MAX_INPUTS = 2048


def written(time: datetime) -> str:
    """A time in UTC, as answers have it."""
    return time.isoformat().replace("+00:00", "Z")


class OllamaModel(Request):
    """The model; older clients send `name`."""

    model: str | None = None
    name: str | None = None

    @property
    def wanted(self) -> str:
        """The model's name. Errors: ApiError 400 without one."""
        if not (found := self.model or self.name):
            raise ApiError(400, "model is required", param="model")
        return found


class OllamaShow(OllamaModel):
    """POST /api/show."""


class OllamaRequest(OllamaModel):
    """Fields of all requests that need the model."""

    keep_alive: str | float | None = None  # only 0 has an effect: the model is unloaded
    options: dict[str, Any] | None = None

    @field_validator("keep_alive")
    @classmethod
    def _is_a_time(cls, given: str | float | None) -> str | float | None:
        if isinstance(given, str) and not _TIME.fullmatch(given):
            raise ValueError(
                f"{shown(given)} is no time; write it like 10m, or a number of seconds"
            )
        return given

    @property
    def stays(self) -> bool:
        """Whether the model stays loaded after this request."""
        given = self.keep_alive
        return given is None or any(digit in str(given) for digit in "123456789")


class _Answered(OllamaRequest):
    """Fields of /api/generate and /api/chat."""

    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def _num_top(self) -> int | None:
        """How many alternatives of each token; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def _as_chat(self, messages: list[dict[str, Any]], tools: Any = None) -> ChatRequest:
        """The same request of a conversation. Errors: ApiError 400, ValidationError."""
        by_effort = isinstance(self.think, str)
        return ChatRequest.model_validate(
            {
                "messages": messages,
                "tools": tools,
                "response_format": self._response_format(),
                "reasoning_effort": (self.think or None) if by_effort else None,
                "enable_thinking": None if by_effort else self.think,
                "logprobs": self.logprobs,
                "top_logprobs": self._num_top,
            }
        )

    def _response_format(self) -> dict[str, Any] | None:
        if self.format is None or self.format == "":
            return None
        if self.format == "json":
            return {"type": "json_object"}
        if isinstance(self.format, str):
            raise ApiError(400, 'format must be "json" or a JSON schema', param="format")
        return {"type": "json_schema", "json_schema": {"schema": self.format}}

    def unable(self, what: str, param: str) -> ApiError:
        """400: this model lacks a capability."""
        return ApiError(400, f'"{self.wanted[:100]}" does not support {what}', param=param)


class OllamaGenerate(_Answered):
    """POST /api/generate. Without a prompt the model is loaded, and nothing more."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None

    @property
    def is_load(self) -> bool:
        """Whether it asks for no answer."""
        return not self.prompt

    def asked(self, has_chat_template: bool) -> ChatRequest | CompletionRequest:
        """As OpenAI's: the latter with `raw` or where the model has no chat template.

        Errors:  ApiError 400, ValidationError
        """
        shape = self._response_format()
        if self.raw or not has_chat_template:
            if self.think:
                raise self.unable("thinking in raw mode", "think")
            if self.system:
                text = "without a chat template there is no place for what system says"
                raise ApiError(400, text, param="system")
            scored = {"logprobs": self._num_top, "response_format": shape}
            return CompletionRequest.model_validate(
                {"prompt": self.prompt, "max_tokens": -1, **scored}
            )
        messages = [{"role": "system", "content": self.system}] if self.system else []
        return self._as_chat([*messages, {"role": "user", "content": self.prompt or ""}])


class OllamaCalled(StrictModel):
    """A called function; its arguments are an object."""

    name: str
    arguments: dict[str, Any] | None = None


class OllamaCall(StrictModel):
    """A call in an earlier answer."""

    id: str | None = None
    function: OllamaCalled


class OllamaMessage(StrictModel):
    """One message of a conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def as_message(self) -> dict[str, Any]:
        """The message for a `ChatRequest`."""
        calls = [
            {
                "id": call.id or f"call_{number}",
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": json.dumps(call.function.arguments or {}, ensure_ascii=False),
                },
            }
            for number, call in enumerate(self.tool_calls or ())
        ]
        return {
            "role": self.role.lower(),
            "content": self.content or "",
            "reasoning_content": self.thinking,
            "name": self.tool_name,
            "tool_calls": calls or None,
            "tool_call_id": self.tool_call_id,
        }


class OllamaChat(_Answered):
    """POST /api/chat. Without messages the model is loaded, and nothing more."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] = (
        Field(default_factory=list)
    )
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _or_none(cls, given: Any) -> Any:
        return [] if given is None else given

    @property
    def is_load(self) -> bool:
        """Whether it asks for no answer."""
        return not self.messages

    def asked(self, has_chat_template: bool) -> ChatRequest:
        """As OpenAI's. Errors: ApiError 400, ValidationError."""
        if any(message.images for message in self.messages):
            raise self.unable("images", "messages.images")
        tools = [{"type": "function", **tool} for tool in self.tools or ()]
        return self._as_chat([message.as_message() for message in self.messages], tools or None)


class OllamaEmbed(OllamaRequest):
    """POST /api/embed. Vectors have length 1; what is too long for the context is cut."""

    input: str | Annotated[list[str], Field(max_length=_MAX_INPUTS, fail_fast=True)] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None

    @property
    def inputs(self) -> list[str]:
        """Each text."""
        if isinstance(self.input, list):
            return self.input
        return [self.input] if self.input else []


class OllamaEmbeddings(OllamaRequest):
    """POST /api/embeddings: one vector, of whatever length; /api/embed took its place."""

    prompt: str | None = None
