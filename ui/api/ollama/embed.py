"""POST /api/embed and /api/embeddings."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from hotcold.ui.api.backend import Backend
from hotcold.ui.api.embeddings import embeddings, prompts_to_embed, unit
from hotcold.ui.api.ollama.schemas import OllamaEmbed, OllamaEmbeddings
from hotcold.ui.api.schemas import prompts_of

_MAX_CHARS_A_TOKEN = 1000  # more are cut before encoding, which would take minutes


async def embed_texts(backend: Backend, body: OllamaEmbed) -> dict[str, Any]:
    """A vector of length 1 for each text."""
    started_ns = time.monotonic_ns()
    prompts: list[list[int]] = []
    if body.inputs:
        prompts = await _prompts(backend, body)
        load_ns = time.monotonic_ns() - started_ns
        found = await embeddings(backend, prompts)
        vectors = await asyncio.to_thread(lambda: [unit(one, body.dimensions) for one in found])
    else:
        await backend.ready()
        vectors, load_ns = [], time.monotonic_ns() - started_ns
    backend.keep(body.stays)
    return {
        "model": body.wanted,
        "embeddings": vectors,
        "total_duration": time.monotonic_ns() - started_ns,
        "load_duration": load_ns,
        "prompt_eval_count": sum(map(len, prompts)),
    }


async def embed_text(backend: Backend, body: OllamaEmbeddings) -> dict[str, Any]:
    """The vector of one text, as older clients of Ollama ask for it."""
    vector: list[float] = []
    if body.prompt:
        prompts = await prompts_to_embed(backend, prompts_of(body.prompt))
        (vector,) = await embeddings(backend, prompts)
    else:
        await backend.ready()
    backend.keep(body.stays)
    return {"embedding": vector}


async def _prompts(backend: Backend, body: OllamaEmbed) -> list[list[int]]:
    """Token ids of the texts, cut to the context unless the request says otherwise."""
    if body.truncate is False:
        return await prompts_to_embed(backend, prompts_of(body.inputs))
    prompts, most = backend.prompts, backend.prompts.context_length

    def cut(unwanted: threading.Event) -> list[list[int]]:
        shorter = (text[: most * _MAX_CHARS_A_TOKEN] for text in body.inputs)
        return [prompts.encode(text, unwanted=unwanted)[:most] for text in shorter]

    return await prompts_to_embed(backend, prompts_of(await backend.in_thread(cut)))
