"""POST /api/embed and /api/embeddings."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from hotcold.ui.api.backend import Backend
from hotcold.ui.api.embeddings import prompts_to_embed, start, unit, vectors
from hotcold.ui.api.ollama.schemas import OllamaEmbed, OllamaEmbeddings

_MAX_CHARS_A_TOKEN = 1000  # more are cut before encoding, which would take minutes


async def embed_texts(backend: Backend, body: OllamaEmbed) -> dict[str, Any]:
    """A vector of length 1 for each text, cut to the context unless the request says otherwise."""
    started_ns = time.monotonic_ns()
    texts: list[Any] = body.inputs
    if body.truncate is not False:
        texts = await backend.in_thread(lambda unwanted: _cut(backend, texts, unwanted))
    prompts = await prompts_to_embed(backend, texts)
    answers = await start(backend, prompts)
    load_ns = time.monotonic_ns() - started_ns
    found = await vectors(answers)
    units = await asyncio.to_thread(lambda: [unit(one, body.dimensions) for one in found])
    backend.keep(body.stays)
    return {
        "model": body.wanted,
        "embeddings": units,
        "total_duration": time.monotonic_ns() - started_ns,
        "load_duration": load_ns,
        "prompt_eval_count": sum(map(len, prompts)),
    }


async def embed_text(backend: Backend, body: OllamaEmbeddings) -> dict[str, Any]:
    """The vector of one text, as older clients of Ollama ask for it."""
    texts = [body.prompt] if body.prompt else []
    found = await vectors(await start(backend, await prompts_to_embed(backend, texts)))
    backend.keep(body.stays)
    return {"embedding": found[0] if found else []}


def _cut(backend: Backend, texts: list[str], unwanted: threading.Event) -> list[list[int]]:
    """Token ids of the texts, as many as the context holds."""
    prompts, most = backend.prompts, backend.prompts.context_length
    shorter = (text[: most * _MAX_CHARS_A_TOKEN] for text in texts)
    return [prompts.encode(text, unwanted=unwanted)[:most] for text in shorter]
