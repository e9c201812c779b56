"""From what a client asks to what the system is asked."""

import asyncio
from dataclasses import replace
from typing import Any

from actors.protocol.messages import GenerateRequest, Grammar
from model.sampling import SamplingParams
from ui.api.backend import Backend
from ui.api.schemas import ChatRequest, CompletionRequest, SamplingRequest
from ui.api.tools.grammar import calls_grammar, shape_grammar

_LARGEST_SEED = (1 << 63) - 1
_COMPLETION_TOKENS = 16  # without max_tokens, as OpenAI's


async def chat_requests(backend: Backend, body: ChatRequest) -> list[GenerateRequest]:
    """One request for each of `n` answers. Errors: PromptError, UsageError."""
    wanted = body.max_completion_tokens or body.max_tokens
    sampling = _sampling(backend, body, wanted or backend.settings.max_tokens)
    messages = [message.for_template for message in body.messages]
    wanted_calls = body.callable
    tools = [tool.for_template for tool in body.tools or ()] if wanted_calls else None
    asked = GenerateRequest(sampling, messages=messages, tools=tools)
    ids = await backend.prompt_ids([asked])
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    request = GenerateRequest(sampling, prompt_ids=ids[0], num_logprobs=num_logprobs)
    grammar = await asyncio.to_thread(_grammar, body)
    if wanted_calls is not None:
        shape = None if grammar is None else grammar.text
        syntax = backend.call_syntax
        grammar = await asyncio.to_thread(calls_grammar, wanted_calls, syntax, shape)
    return _copies(body, request, grammar)


async def completion_requests(backend: Backend, body: CompletionRequest) -> list[GenerateRequest]:
    """One request for each of `n` answers to each prompt.

    Where no new token is wanted one is asked for nevertheless: it costs nothing beside the prompt.
    Errors:  PromptError, UsageError
    """
    wanted = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = _sampling(backend, body, max(wanted, 1))
    asked = [
        GenerateRequest(sampling, prompt=prompt)
        if isinstance(prompt, str)
        else GenerateRequest(sampling, prompt_ids=prompt)
        for prompt in body.prompts
    ]
    all_ids = await backend.prompt_ids(asked)
    num_prompt_logprobs = body.logprobs if body.echo else None
    grammar = await asyncio.to_thread(_grammar, body)
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
    seeds = [(sampling.seed + i) & _LARGEST_SEED for i in range(count)]
    return [replace(request, sampling=replace(sampling, seed=seed)) for seed in seeds]


def _sampling(backend: Backend, body: SamplingRequest, max_tokens: int) -> SamplingParams:
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": 0 if body.top_k == -1 else body.top_k,
        "min_p": body.min_p,
        "ignore_eos": body.ignore_eos,
        "seed": None if body.seed is None else body.seed & _LARGEST_SEED,
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop,
    }
    given |= _penalties(body)
    values = {name: value for name, value in given.items() if value is not None}
    return SamplingParams.from_json({**values, "max_tokens": max_tokens}, backend.defaults)


def _penalties(body: SamplingRequest) -> dict[str, Any]:
    """As OpenAI defines them: of all tokens of the answer so far, and of none of the prompt."""
    given = {"presence_penalty": body.presence_penalty, "frequency_penalty": body.frequency_penalty}
    if not any(given.values()):
        return {}
    return {**given, "repeat_last_n": -1, "penalize_prompt": False}


def _grammar(body: SamplingRequest) -> Grammar | None:
    if body.grammar is not None:
        return Grammar("lark", body.grammar)
    shape = body.response_format
    if shape is None or shape.type == "text":
        return None
    if shape.json_schema is None:
        return Grammar("json_schema", '{"type": "object"}')
    return shape_grammar(shape.json_schema.content, shape.json_schema.strict)
