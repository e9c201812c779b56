"""/v1/embeddings over a system whose vectors a test can tell, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.text.tokenizer import Tokenizer
from hotcold.ui.api.metrics import metrics_text
from tests.unit.ollama_routes import Embedding, post


def vector(ids: list[int]) -> list[float]:
    """Of a prompt's length and its first token."""
    return [float(len(ids)), float(np.float32(ids[0] / 7))]


def vectors_of(answer: Any) -> list[list[float]]:
    found = answer.json()
    assert [one["index"] for one in found["data"]] == list(range(len(found["data"])))
    assert {one["object"] for one in found["data"]} == {"embedding"}
    assert (found["object"], found["model"]) == ("list", "demo")
    return [one["embedding"] for one in found["data"]]


def text_ids(text: str) -> list[int]:
    tokenizer = Tokenizer.from_model(DEMO_DIRECTORY)
    assert tokenizer is not None
    return tokenizer.encode(text, True)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a list", [text_ids("a list")]),
        (["a", "b c"], [text_ids("a"), text_ids("b c")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_inputs_of_every_form(given: Any, prompts: list[list[int]]) -> None:
    client = Embedding(vector)
    answer = post(client, "/v1/embeddings", input=given, user="me")
    assert vectors_of(answer) == list(map(vector, prompts))
    told = metrics_text([client.backend.metrics]).decode()
    counts = dict(re.findall(r"^vllm:(\w+_count)\{.*\} (\S+)$", told, re.M))
    assert float(counts["e2e_request_latency_seconds_count"]) == len(prompts)
    assert float(counts["time_to_first_token_seconds_count"]) == 0
    num_tokens = sum(map(len, prompts))
    assert answer.json()["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
