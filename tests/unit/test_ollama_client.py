"""Ollama's own client over its routes."""

from __future__ import annotations

import ollama
import pytest

from hotcold.actors.protocol.messages import TokenEvent
from tests.unit.ollama_routes import (
    CALLED,
    CONTEXT,
    HELLO,
    RESULT,
    Embedding,
    Recording,
    with_ollama,
)


def test_ollamas_client_reads_it_all() -> None:
    async def work(client: ollama.AsyncClient) -> None:
        whole = await client.chat("demo", HELLO)
        assert whole.message.content == "ab" and whole.done_reason == "stop"
        stream = await client.generate("demo:latest", "Hello", stream=True)
        assert "".join([piece.response or "" async for piece in stream]) == "ab"
        assert [model.model for model in (await client.list()).models] == ["demo:latest"]
        assert (await client.ps()).models[0].context_length == CONTEXT
        shown = await client.show("demo")
        assert shown.capabilities == ["completion", "tools"] and shown.modelinfo
        with pytest.raises(ollama.ResponseError, match="model 'x' not found") as missing:
            await client.chat("x", HELLO)
        assert missing.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="hotcold pull"):
            await client.pull("x")

    with_ollama(Recording(), work)


def test_ollamas_client_reads_calls_and_vectors() -> None:
    def look_up(a: int) -> str:
        """Looks up."""
        return str(a)

    async def called(client: ollama.AsyncClient) -> None:
        answer = await client.chat("demo", HELLO, tools=[look_up])
        first, second = answer.message.tool_calls or ()
        assert (first.function.name, dict(first.function.arguments)) == ("look_up", {"a": 1})
        assert dict(second.function.arguments) == {"a": 2}
        result = {"role": "tool", "tool_name": "look_up", "content": "1"}
        await client.chat("demo", [*HELLO, answer.message, result], tools=[look_up])

    with_ollama(Recording(TokenEvent(CALLED, RESULT)), called)

    async def embedded(client: ollama.AsyncClient) -> None:
        assert len((await client.embed("demo", ["a", "b"])).embeddings) == 2
        assert len((await client.embeddings("demo", "a")).embedding) == 2

    with_ollama(Embedding(), embedded)
