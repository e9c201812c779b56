"""Tools and responses as OpenAI's client and an agent framework use them, on the demo model.

It knows nothing of tools, so that whatever is right about its calls is the grammar's doing.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from typing import Annotated, Any

import httpx
import jsonschema
import pytest
from pydantic import Field

from tests.e2e.server import WAIT_S, Server

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "module": {"type": "string", "maxLength": 12},
        "depth": {"type": "integer", "minimum": 0, "maximum": 9},
        "kind": {"enum": ["class", "function"]},
    },
    "required": ["module", "depth", "kind"],
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "parameters": PARAMETERS},
}
OTHER = {"type": "function", "function": {"name": "now"}}
ASKED = {"role": "user", "content": "What does textwrap.dedent do?"}


@pytest.mark.parametrize("choice", ["auto", "required", TOOL["function"]["name"]])
def test_a_stream_is_the_same_answer(client: Any, choice: str) -> None:
    named = {"type": "function", "function": {"name": choice}}
    line: dict[str, Any] = {
        "model": "demo", "messages": [ASKED], "tools": [TOOL, OTHER], "temperature": 0.8,
        "seed": 5, "max_tokens": 200, "parallel_tool_calls": False,
        "tool_choice": choice if choice in ("auto", "required") else named,
    }  # fmt: skip
    whole = client.chat.completions.create(**line).choices[0]
    with client.chat.completions.stream(**line) as stream:
        stream.until_done()
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == whole.finish_reason

    def calls(message: Any) -> list[tuple[str, str]]:
        return [(one.function.name, one.function.arguments) for one in message.tool_calls or ()]

    assert calls(streamed.message) == calls(whole.message)
    assert (streamed.message.content or None) == (whole.message.content or None)
    assert bool(calls(whole.message)) == (choice != "auto")  # left to itself, it only talks
    for name, arguments in calls(whole.message):
        expected = PARAMETERS if name == "look_up" else {"maxProperties": 0}
        jsonschema.validate(json.loads(arguments), expected)


def test_a_follow_up_reads_only_what_is_new(client: Any) -> None:
    """It is the whole conversation's answer, and most of its prompt was there before."""
    line: dict[str, Any] = {"model": "demo", "temperature": 0, "max_output_tokens": 20}
    question = "What does textwrap.dedent do? " * 20
    first = client.responses.create(input=question, **line)
    with client.responses.stream(input="And indent?", previous_response_id=first.id, **line) as one:
        second = one.until_done().get_final_response()
    asked, found = second.usage.input_tokens, second.usage.input_tokens_details.cached_tokens
    assert second.previous_response_id == first.id
    assert found >= first.usage.input_tokens - 64 > 0 and asked > first.usage.input_tokens
    talk = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And indent?"},
    ]
    whole = client.responses.create(input=talk, store=False, **line)
    assert whole.output_text == second.output_text and whole.usage.input_tokens == asked
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(first.id)
    third = client.responses.create(input="Why?", previous_response_id=second.id, **line)
    assert third.usage.input_tokens > asked


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_agent_frameworks_loop(
    openai: Any, server: Server, kind: str, is_streamed: bool
) -> None:
    """openai-agents: the model is made to call, the framework calls, and gives the result back.

    Of responses it sends what is new alone, within a run and in the next one.
    """
    agents = importlib.import_module("agents")
    agents.set_tracing_disabled(True)
    bodies: list[dict[str, Any]] = []
    called: list[tuple[str, int]] = []

    @agents.function_tool
    def look_up(
        module: Annotated[str, Field(max_length=12)], depth: Annotated[int, Field(ge=0, le=9)]
    ) -> str:
        """Look a module up."""
        called.append((module, depth))
        return f"{module[:3]} is a module"

    async def keep(request: httpx.Request) -> None:
        bodies.append(json.loads(request.content))

    async def run(agent: Any, text: str, **more: Any) -> Any:
        if not is_streamed:
            return await agents.Runner.run(agent, text, **more)
        outcome = agents.Runner.run_streamed(agent, text, **more)
        async for _ in outcome.stream_events():
            pass
        return outcome

    async def talk() -> list[Any]:
        http = httpx.AsyncClient(event_hooks={"request": [keep]}, timeout=WAIT_S)
        api = openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="any", max_retries=0, http_client=http
        )
        agent = agents.Agent(
            name="librarian", instructions="Look things up.", tools=[look_up],
            model=getattr(agents, kind)("demo", api),
            model_settings=agents.ModelSettings(
                tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=200
            ),
        )  # fmt: skip
        async with http:
            if kind != "OpenAIResponsesModel":
                return [await run(agent, "What is textwrap?")]
            first = await run(agent, "What is textwrap?", auto_previous_response_id=True)
            before = first.last_response_id
            return [first, await run(agent, "And zlib?", previous_response_id=before)]

    outcomes = asyncio.run(talk())
    for outcome in outcomes:
        kinds = [item.type for item in outcome.new_items]
        assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert len(called) == len(outcomes) and isinstance(called[0][1], int)
    if kind == "OpenAIResponsesModel":
        assert len(bodies) == 4 and "previous_response_id" not in bodies[0]
        assert [one["type"] for one in bodies[1]["input"]] == ["function_call_output"]
        assert bodies[2]["previous_response_id"] == outcomes[0].last_response_id
        assert [len(body["input"]) for body in bodies[1:]] == [1, 1, 1]
        sizes = [one.usage.input_tokens for each in outcomes for one in each.raw_responses]
        assert sizes == sorted(set(sizes))
