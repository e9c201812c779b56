"""Requests of the system, made from requests of HTTP clients."""

import asyncio
from dataclasses import replace
from typing import Any

from hotcold.actors.protocol.messages import GenerateRequest, Grammar
from hotcold.model.sampling import SamplingParams
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.schemas import ChatRequest, CompletionRequest, SamplingRequest
from hotcold.ui.api.tools.grammar import calls_grammar, schema_grammar
from hotcold.ui.api.tools.thoughts import Thoughts

_LARGEST_SEED = (1 << 63) - 1
_COMPLETION_TOKENS = 16  # without max_tokens, as OpenAI's


async def chat_requests(backend: Backend, body: ChatRequest) -> list[GenerateRequest]:
    """One request for each of `n` answers. Errors: PromptError, UsageError."""
    wanted = body.max_completion_tokens or body.max_tokens
    sampling = _sampling(backend, body, wanted)
    wanted_calls = body.callable
    asked = GenerateRequest(
        sampling,
        messages=[message.for_template for message in body.messages],
        tools=[tool.for_template for tool in body.all_tools] if wanted_calls else None,
        template_variables=body.template_variables,
    )
    ids = await backend.prompt_ids([asked])
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    request = GenerateRequest(sampling, prompt_ids=ids[0], num_logprobs=num_logprobs)
    grammar = await asyncio.to_thread(schema_grammar, body.output_grammar, body.is_schema_strict)
    if wanted_calls is not None:
        schema = None if grammar is None else grammar.text
        syntax = backend.call_syntax
        grammar = await asyncio.to_thread(calls_grammar, wanted_calls, syntax, schema)
    thoughts = Thoughts.of(backend.prompts.tokenizer, ids[0])
    if grammar is not None and thoughts is not None:
        grammar = thoughts.before(grammar)
    return _copies(body, request, grammar)


async def completion_requests(backend: Backend, body: CompletionRequest) -> list[GenerateRequest]:
    """One request for each of `n` answers to each prompt.

    With max_tokens 0 one token is generated and dropped: it costs nothing beside the prompt.
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


def _sampling(backend: Backend, body: SamplingRequest, max_tokens: int | None) -> SamplingParams:
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": 0 if body.top_k == -1 else body.top_k,
        "min_p": body.min_p,
        "ignore_eos": body.ignore_eos,
        "seed": None if body.seed is None else body.seed & _LARGEST_SEED,
        "stop": body.stop,
        "stop_token_ids": body.stop_token_ids,
        "include_stop_str_in_output": body.include_stop_str_in_output,
        "min_tokens": body.min_tokens,
        "logit_bias": body.logit_bias,
    }
    given |= _penalties(body)
    values = {name: value for name, value in given.items() if value is not None}
    return SamplingParams.from_json({**values, "max_tokens": max_tokens}, backend.defaults)


def _penalties(body: SamplingRequest) -> dict[str, Any]:
    """Presence and frequency count the answer's tokens, as OpenAI's.

    `repetition_penalty` counts the prompt's too, as vLLM's. With `repeat_penalty` all three are
    llama.cpp's.
    """
    counted = {
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
    }
    if body.repeat_penalty is not None:
        return {
            **counted,
            "repeat_penalty": body.repeat_penalty,
            "repeat_last_n": body.repeat_last_n,
        }
    found: dict[str, Any] = {}
    if any(counted.values()):
        found = {**counted, "repeat_last_n": -1, "penalize_prompt": False}
    if body.repetition_penalty is not None:
        found |= {"repeat_penalty": body.repetition_penalty, "repeat_last_n": -1}
    return found
