"""POST /v1/embeddings."""

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import Field

from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.model.errors import ServiceError
from hotcold.ui.api.answer import collect
from hotcold.ui.api.backend import Answers, Backend
from hotcold.ui.api.fields import Request
from hotcold.ui.api.schemas import Prompt, prompts_of

POOLING = "mean of the hidden states after the last layer and its norm"


class EmbeddingsRequest(Request):
    """POST /v1/embeddings: a text, or token ids, or several of them."""

    input: Prompt = Field(union_mode="left_to_right")
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: None = None  # all numbers of the model's hidden states


async def embed(backend: Backend, body: EmbeddingsRequest) -> dict[str, Any]:
    """A vector for each text: the mean of the model's last hidden states."""
    prompts = await prompts_to_embed(backend, body.input)
    shown: list[Any] = await vectors(await start(backend, prompts))
    if body.encoding_format == "base64":
        shown = await asyncio.to_thread(lambda found: list(map(_packed, found)), shown)
    num_tokens = sum(map(len, prompts))
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": one}
            for index, one in enumerate(shown)
        ],
        "model": backend.settings.model_name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


async def prompts_to_embed(backend: Backend, given: Any) -> list[list[int]]:
    """Token ids of each of a `Prompt`, checked. Errors: PromptError."""
    return await backend.prompt_ids(
        [replace(_request(backend), **one) for one in prompts_of(given)]
    )


async def start(backend: Backend, prompts: Sequence[list[int]]) -> Answers:
    """Load the model and queue a request for each prompt. Errors: ApiError, HotcoldError."""

    async def make() -> list[GenerateRequest]:
        return [replace(_request(backend), prompt_ids=ids) for ids in prompts]

    return await backend.start(len(prompts), make)


async def vectors(answers: Answers) -> list[list[float]]:
    """The vector of each prompt. Errors: ApiError, HotcoldError."""
    found = []
    for answer in await collect(answers):
        vector = None if answer.result is None else answer.result.embedding
        if vector is None:
            raise ServiceError("an embedding ended without a vector")
        found.append(vector)
    return found


def unit(vector: Sequence[float], most: int | None = None) -> list[float]:
    """Its first `most` numbers, or all of them, as a vector of length 1."""
    found = np.asarray(vector[: most or None], np.float64)
    found /= max(float(np.linalg.norm(found)), 1e-12)
    numbers: list[float] = found.astype(np.float32).tolist()
    return numbers


def _request(backend: Backend) -> GenerateRequest:
    """A request without its prompt; every server allows its one token."""
    return GenerateRequest(replace(backend.defaults, max_tokens=1), wants_embedding=True)


def _packed(vector: list[float]) -> str:
    """Little-endian float32 in base64."""
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
