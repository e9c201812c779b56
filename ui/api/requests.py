"""Requests of the system, made from requests of HTTP clients."""

import asyncio
from dataclasses import replace

from hotcold.actors.protocol.messages import GenerateRequest, Grammar
from hotcold.model.parameters import LARGEST_SEED
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.schemas import ChatRequest, CompletionRequest, SamplingRequest
from hotcold.ui.api.tools.grammar import calls_grammar, schema_grammar

_COMPLETION_TOKENS = 16  # without max_tokens, as OpenAI's


async def chat_requests(backend: Backend, body: ChatRequest) -> list[GenerateRequest]:
    """One request for each of `n` answers. Errors: PromptError, UsageError."""
    wanted_calls = body.callable
    sampling = body.sampling(body.max_completion_tokens or body.max_tokens, backend.defaults)
    asked = GenerateRequest(
        sampling,
        messages=[message.for_template for message in body.messages],
        tools=[tool.for_template for tool in body.tools or ()] if wanted_calls else None,
        template_variables=body.template_variables,
    )
    (ids,) = await backend.prompt_ids([asked])
    request = GenerateRequest(
        sampling,
        prompt_ids=ids,
        is_chat=True,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        **body.caching(),
    )
    grammar = await asyncio.to_thread(schema_grammar, body.output_grammar, body.is_schema_strict)
    if wanted_calls is not None:
        schema = None if grammar is None else grammar.text
        syntax = backend.call_syntax
        grammar = await asyncio.to_thread(calls_grammar, wanted_calls, syntax, schema)
    return _copies(body, request, grammar)


async def completion_requests(backend: Backend, body: CompletionRequest) -> list[GenerateRequest]:
    """One request for each of `n` answers to each prompt.

    With max_tokens 0 one token is generated and dropped: it costs nothing beside the prompt.
    Errors:  PromptError, UsageError
    """
    wanted = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = body.sampling(None if wanted < 0 else max(wanted, 1), backend.defaults)
    asked = [
        GenerateRequest(sampling, prompt=prompt)
        if isinstance(prompt, str)
        else GenerateRequest(sampling, prompt_ids=prompt)
        for prompt in body.prompts
    ]
    all_ids = await backend.prompt_ids(asked)
    num_prompt_logprobs = body.logprobs if body.echo else None
    grammar = await asyncio.to_thread(schema_grammar, body.output_grammar, body.is_schema_strict)
    return [
        request
        for ids in all_ids
        for request in _copies(
            body,
            GenerateRequest(
                sampling,
                prompt_ids=ids,
                num_logprobs=body.logprobs,
                num_prompt_logprobs=num_prompt_logprobs,
                **body.caching(),
            ),
            grammar,
        )
    ]


def _copies(
    body: SamplingRequest, request: GenerateRequest, grammar: Grammar | None
) -> list[GenerateRequest]:
    """`request` for each of `n` answers; seeds are counted up from the one that was given."""
    sampling, count = request.sampling, body.n or 1
    request = replace(request, grammar=grammar)
    if sampling.seed is None:
        return [request] * count
    seeds = [(sampling.seed + i) & LARGEST_SEED for i in range(count)]
    return [replace(request, sampling=replace(sampling, seed=seed)) for seed in seeds]
