"""Ollama's own client on the demo model, and vectors as OpenAI's client has them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import ollama
import pytest

from tests.e2e.server import WAIT_S, Server

QUESTION = {"role": "user", "content": "What does textwrap.dedent do?"}
GREEDY = {"temperature": 0}
SHAPE: dict[str, Any] = {
    "type": "object",
    "properties": {"module": {"type": "string", "maxLength": 12}, "depth": {"type": "integer"}},
    "required": ["module", "depth"],
    "additionalProperties": False,
}


@pytest.fixture
def ollamas(server: Server) -> ollama.Client:
    return ollama.Client(server.url, timeout=WAIT_S)


def test_answers_are_those_of_openais_route(ollamas: ollama.Client, client: Any) -> None:
    expected = client.chat.completions.create(model="demo", messages=[QUESTION], temperature=0)
    text = expected.choices[0].message.content
    whole = ollamas.chat("demo", [QUESTION], options=GREEDY)
    assert (whole.message.content, whole.done_reason) == (text, "stop")
    assert whole.eval_count == expected.usage.completion_tokens
    assert whole.prompt_eval_count == expected.usage.prompt_tokens
    assert 0 < (whole.prompt_eval_duration or 0) < (whole.total_duration or 0)
    streamed = list(ollamas.chat("demo:latest", [QUESTION], options=GREEDY, stream=True))
    assert "".join(piece.message.content or "" for piece in streamed) == text
    assert [piece.done for piece in streamed] == [False] * (len(streamed) - 1) + [True]
    generated = ollamas.generate("demo", QUESTION["content"], options=GREEDY)
    assert generated.response == text
    pieces = list(ollamas.generate("demo", QUESTION["content"], options=GREEDY, stream=True))
    assert "".join(piece.response or "" for piece in pieces) == text
    raw = ollamas.generate("demo", "Return the", raw=True, options=GREEDY | {"num_predict": 5})
    continued = client.completions.create(
        model="demo", prompt="Return the", temperature=0, max_tokens=5
    )
    assert raw.response == continued.choices[0].text and raw.done_reason == "length"


def test_formats_and_calls_fit_their_schemas(ollamas: ollama.Client) -> None:
    options = {"temperature": 1, "seed": 3, "num_predict": 300}
    shaped = ollamas.chat("demo", [QUESTION], format=SHAPE, options=options)
    jsonschema.validate(json.loads(shaped.message.content or ""), SHAPE)
    called = {"type": "function", "function": {"name": "look_up", "parameters": SHAPE}}
    answer = ollamas.chat("demo", [QUESTION], tools=[called], options=options)
    for call in answer.message.tool_calls or ():
        jsonschema.validate(dict(call.function.arguments), SHAPE)
    result = {"role": "tool", "tool_name": "look_up", "content": "a function"}
    again = ollamas.chat("demo", [QUESTION, answer.message, result], options=options)
    assert again.done_reason in ("stop", "length")


def test_vectors_of_all_routes_are_the_same(ollamas: ollama.Client, client: Any) -> None:
    texts = ["Return a list.", "Return the first item of a list.", "Close the socket. " * 30]
    made = client.embeddings.create(model="demo", input=texts)  # asks for base64
    vectors = np.array([one.embedding for one in made.data])
    assert vectors.shape == (3, 384)
    plain = client.embeddings.create(model="demo", input=texts[2], encoding_format="float")
    np.testing.assert_array_equal(plain.data[0].embedding, vectors[2])
    np.testing.assert_array_equal(ollamas.embeddings("demo", texts[1]).embedding, vectors[1])
    unit = np.array(ollamas.embed("demo", texts).embeddings)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(unit, vectors / lengths, rtol=1e-6)
    likeness = unit @ unit.T
    assert likeness[0, 1] > likeness[0, 2]
