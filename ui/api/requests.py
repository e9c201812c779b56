"""Requests of the system, made from the two forms that all APIs bring theirs into."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hotcold.actors.driver.grammars.grammar import calls_grammar, schema_grammar
from hotcold.actors.protocol.messages import GenerateRequest, Grammar
from hotcold.model.parameters import LARGEST_SEED
from hotcold.model.sampling import SamplingParams
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.schemas import ChatRequest, CompletionRequest


async def requests_of(
    backend: Backend, body: ChatRequest | CompletionRequest, options: Mapping[str, Any]
) -> list[GenerateRequest]:
    """One request for each of `n` answers to each prompt; `options` as of an `Answer`.

    Errors:  PromptError, UsageError
    """
    sampling = replace(body.sampling(body.most_new_tokens, backend.defaults), **options)
    asked = [GenerateRequest(sampling, **prompt) for prompt in body.prompts]
    all_ids = await backend.prompt_ids(asked)
    grammar = await asyncio.to_thread(_grammar, backend, body)
    request = GenerateRequest(sampling, grammar=grammar, **body.request_fields)
    samplings = _copies(sampling, body.n or 1)
    return [replace(request, prompt_ids=ids, sampling=one) for ids in all_ids for one in samplings]


def _grammar(backend: Backend, body: ChatRequest | CompletionRequest) -> Grammar | None:
    """What holds the answers: with tools, calls and beside them JSON of the schema, if any."""
    wanted = body.constraint
    grammar = schema_grammar(wanted and wanted.make(wanted.value), body.is_schema_strict)
    if body.callable is None:
        return grammar
    schema = None if grammar is None else grammar.text
    return calls_grammar(body.callable, backend.call_syntax, schema)


def _copies(sampling: SamplingParams, count: int) -> list[SamplingParams]:
    """`sampling` for each of `count` answers; seeds are counted up from the one that was given."""
    if sampling.seed is None:
        return [sampling] * count
    return [replace(sampling, seed=(sampling.seed + i) & LARGEST_SEED) for i in range(count)]
