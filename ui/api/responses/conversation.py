"""A request of /v1/responses as a chat: its items as messages, its tools in one flat list."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hotcold.ui.api.errors import ApiError
from hotcold.ui.api.parts import text_of
from hotcold.ui.api.responses.schemas import (
    AgentMessage,
    CustomCall,
    CustomTool,
    FunctionTool,
    InputCall,
    InputMessage,
    InputResult,
    Item,
    NamedTool,
    NamespaceTool,
    Other,
    ReasoningItem,
    ResponsesRequest,
)
from hotcold.ui.api.schemas import ChatRequest

_SAME = ("parallel_tool_calls", "chat_template_kwargs", "cache", "cache_salt")  # in a chat
_ENCODED = "text:"  # what `encrypted_content` of this server begins with
Message = dict[str, Any]


class Offered(NamedTuple):
    """A tool that the answer may call; a call tells it by its flat name."""

    tool: FunctionTool | CustomTool
    namespace: str | None = None
    about_namespace: str = ""  # with the first tool of each

    @property
    def flat_name(self) -> str:
        """The name that the model calls."""
        return flat_name(self.namespace, self.tool.name)

    @property
    def in_chat(self) -> dict[str, Any]:
        """The tool of a chat completion."""
        tool, kind = self.tool, self.tool.type
        told = "\n\n".join(filter(None, (self.about_namespace, tool.description)))
        named: dict[str, Any] = {"name": self.flat_name, "description": told}
        if isinstance(tool, FunctionTool):
            named |= {"parameters": tool.parameters, "strict": tool.strict}
        elif tool.format is not None and tool.format.type == "grammar":
            grammar = tool.format.model_dump(include={"syntax", "definition"})
            named["format"] = {"type": "grammar", "grammar": grammar}
        return {"type": kind, kind: named}


def flat_name(namespace: str | None, name: str) -> str:
    """The name of a tool with its namespace's before it, as agents themselves join them."""
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}" if namespace else name


def offered(body: ResponsesRequest) -> dict[str, Offered]:
    """The tools that an answer may call, by flat name. Errors: ApiError 400: two have one."""
    found: dict[str, Offered] = {}
    for one in _offered(body.tools or ()):
        if found.setdefault(one.flat_name, one) is not one:
            text = (
                f"two of the tools are {one.flat_name[:100]!a}, as the model calls them: the name "
                "of a namespace stands before those of its tools; rename one"
            )
            raise ApiError(400, text, param="tools")
    return found


def _offered(tools: Iterable[Any]) -> Iterator[Offered]:
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            about = tool.description or ""
            for one in _offered(tool.tools):
                yield Offered(one.tool, tool.name, about)
                about = ""
        elif not isinstance(tool, Other):
            yield Offered(tool)


def told(tools: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """The tools as a response tells them."""
    for tool in tools:
        match tool:
            case FunctionTool():
                yield tool.model_dump() | {"strict": tool.strict is True}
            case CustomTool():
                yield tool.model_dump(exclude_none=True)
            case NamespaceTool():
                yield tool.model_dump(exclude={"tools"}) | {"tools": list(told(tool.tools))}


def as_chat(
    body: ResponsesRequest, items: Sequence[Item], tools: Mapping[str, Offered]
) -> ChatRequest:
    """The same request of a conversation. Errors: ValidationError, ApiError 400."""
    if body.tool_choice == "required" and body.tools and not tools:
        text = "tool_choice asks for a call, but there is no function among the tools to call"
        raise ApiError(400, text, param="tool_choice")
    shape = body.text.format if body.text is not None else None
    return ChatRequest.model_validate(
        {
            **body.drawn(),
            **{name: getattr(body, name) for name in _SAME},
            "messages": messages_of(body.instructions, items),
            "max_tokens": body.max_output_tokens,
            "tools": [one.in_chat for one in tools.values()] or None,
            "tool_choice": _choice(body.tool_choice, tools),
            "response_format": None if shape is None else shape.in_chat,
            "reasoning": None if body.reasoning is None else body.reasoning.model_dump(),
        }
    )


def _choice(choice: Any, tools: Mapping[str, Offered]) -> Any:
    """`tool_choice` as a chat completion has it: a tool is named by its flat name."""
    if not isinstance(choice, NamedTool):
        return choice
    for name, (tool, namespace, _) in tools.items():
        if tool.type == choice.type and (
            name == choice.name
            or (choice.name == tool.name and (choice.namespace or namespace) == namespace)
        ):
            break
    else:
        name = choice.name
    return {"type": choice.type, choice.type: {"name": name}}


def messages_of(instructions: str | None, items: Sequence[Item]) -> list[Message]:
    """Instructions, then the conversation.

    What an assistant says and calls until a result comes, or another's message, is one message. The
    results of its calls follow it, wherever they stand.
    """
    turns: list[list[Message]] = []  # a message, and the results of its calls
    turn_of: dict[str | None, list[Message]] = {}  # by a call's id
    thought = ""
    for item in items:
        message, thought_before = _message(item), thought
        thought = _thought(item) if isinstance(item, ReasoningItem) else ""
        if message is None:
            continue
        if message.get("tool_call_id") in turn_of:
            turn_of[message["tool_call_id"]].append(message)
            continue
        texts, calls = [message["content"]], message.get("tool_calls", [])
        is_answer = message["role"] == "assistant"
        if is_answer and turns and len(turns[-1]) == 1 and turns[-1][0]["role"] == "assistant":
            message = turns[-1][0]
            message["content"] += texts
            message["tool_calls"] += calls
        else:
            message |= {"content": texts} | ({"tool_calls": calls} if is_answer else {})
            turns.append([message])
        if is_answer and thought_before:
            message.setdefault("reasoning_content", thought_before)
        turn_of |= {call["id"]: turns[-1] for call in calls}
    for message, *_ in turns:
        message["content"] = "\n".join(filter(None, message["content"]))
        if not message.get("tool_calls", True):
            del message["tool_calls"]
    opening = [{"role": "system", "content": instructions}] if instructions else []
    return [*opening, *(message for turn in turns for message in turn)]


def _message(item: Item) -> Message | None:
    """The message of a chat; None where an item has none of its own."""
    match item:
        case InputMessage():
            return {"role": item.role, "content": text_of(item.content)}
        case AgentMessage():
            return {"role": "user", "content": text_of(item.content)}
        case InputResult():
            text = text_of(item.output)
            return {"role": "tool", "tool_call_id": item.call_id, "content": text}
        case InputCall():
            kind, given = "function", {"arguments": item.arguments}
        case CustomCall():
            kind, given = "custom", {"input": item.input}
        case _:
            return None
    called = {"name": flat_name(item.namespace, item.name), **given}
    call = {"id": item.call_id, "type": kind, kind: called}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _thought(item: ReasoningItem) -> str:
    """Its text, of whichever field has it."""
    if not item.content and (own := _decoded(item.encrypted_content)):
        return own
    return "".join(str(part.get("text", "")) for part in item.content or item.summary or ())


def encoded(thought: str) -> str:
    """Reasoning as `encrypted_content`: so written that it comes back whole, but not secret."""
    return _ENCODED + base64.b64encode(thought.encode(errors="replace")).decode()


def _decoded(content: str | None) -> str:
    """The reasoning in `encrypted_content`; empty where another server wrote it."""
    if content is None or not content.startswith(_ENCODED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_ENCODED), validate=True).decode()
    except ValueError:
        return ""
