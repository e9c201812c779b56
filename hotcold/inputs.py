"""What is given to an `LLM`: prompts and conversations, one or a list of them, as requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hotcold.actors.protocol.messages import GenerateRequest, Grammar
from hotcold.actors.protocol.options import in_keywords
from hotcold.answers import Task
from hotcold.jobs.running.in_flight import new_id
from hotcold.model import sampling
from hotcold.model.errors import HotcoldError, PromptError, ServiceError, UsageError, shown
from hotcold.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from hotcold.actors.driver.prompts import Prompts
    from hotcold.chats import ChatOptions, Message

    Prompt = str | list[int] | Mapping[str, Any] | np.ndarray

Params = SamplingParams | Sequence[SamplingParams] | None


class Given(NamedTuple):
    """What one call was given."""

    tasks: Iterator[Task]  # each made when it is wanted
    num_tasks: int
    is_one: bool  # and no list of them


class Inputs:
    """Makes tasks of what is given to one model."""

    def __init__(self, model_path: Path, context_length: int) -> None:
        self._model_path = model_path
        self._context_length = context_length

    @cached_property
    def default_sampling(self) -> sampling.SamplingParams:
        """The model's own."""
        return sampling.SamplingParams.defaults(self._model_path)

    @cached_property
    def prompts(self) -> Prompts:
        """What encodes and checks them."""
        from hotcold.actors.driver.prompts import Prompts
        from hotcold.model.config.build import read_config

        return Prompts(self._model_path, read_config(self._model_path), self._context_length)

    def of_prompts(self, prompts: Any, params: Params) -> Given:
        """A prompt, or a list of them. Errors: UsageError."""
        return _given(prompts, Integral, params, self._of_prompt)

    def of_conversations(self, messages: Any, params: Params, options: ChatOptions) -> Given:
        """A conversation, or a list of them. Errors: UsageError."""
        return _given(messages, Mapping, params, self._of_conversation(options))

    def to_read(self, prompts: Any, **wanted: Any) -> Given:
        """Prompts of which no answer is wanted; a new token costs nothing beside one."""
        drawn = replace(self.default_sampling, max_tokens=1, temperature=0.0)

        def make(prompt: Any, _: SamplingParams) -> Task:
            return Task(prompt, [replace(_request(drawn, prompt), request_id=new_id(), **wanted)])

        return _given(prompts, Integral, None, make)

    def of_stream(self, prompt: Any, params: SamplingParams | None, options: ChatOptions) -> Task:
        """One prompt or conversation. Errors: PromptError, UsageError."""
        params = _params(params)
        if params.n > 1:
            raise UsageError(f"n is {params.n}, but a stream is of one answer; use generate")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
            return self._of_conversation(options)(prompt, params)
        if options:
            from hotcold.chats import tools_of

            tools_of(options)  # which are known at all
            raise UsageError(f"{next(iter(options))} is for conversations")
        return self._of_prompt(prompt, params)

    def _of_prompt(self, prompt: Any, params: SamplingParams) -> Task:
        request = _request(self.default_sampling, prompt)
        return Task(prompt, self._requests(request, params, params.shape()))

    def _of_conversation(self, options: ChatOptions) -> Callable[[Any, SamplingParams], Task]:
        """What makes tasks of conversations. Errors: UsageError for options that are none."""
        from hotcold.chats import Chat, chat_request, tools_of, variables_of

        tools, variables = tools_of(options), variables_of(options)

        def make(messages: Sequence[Message], params: SamplingParams) -> Task:
            asked = chat_request(self.default_sampling, messages, tools, variables)
            ids = self.prompts.ids(asked)
            tokenizer = self.prompts.tokenizer
            assert tokenizer is not None  # or it has no ids
            chat = Chat.of(tokenizer, tools.wanted, params.shape())
            request = GenerateRequest(self.default_sampling, prompt_ids=ids, is_chat=True)
            return Task(messages, self._requests(request, params, chat.grammar), chat)

        return make

    def _requests(
        self, request: GenerateRequest, params: SamplingParams, grammar: Grammar | None
    ) -> list[GenerateRequest]:
        """The request of each of `params.n` answers; the prompt's logprobs are the first's."""
        drawn = params.of_requests(self.default_sampling)
        first = replace(
            request,
            sampling=drawn[0],
            request_id=new_id(),
            grammar=grammar,
            num_logprobs=params.logprobs,
            num_prompt_logprobs=params.prompt_logprobs,
            use_cache=params.cache,
            cache_salt=params.cache_salt,
        )
        later = replace(first, num_prompt_logprobs=None)
        return [first, *(replace(later, sampling=one, request_id=new_id()) for one in drawn[1:])]


def _given(
    given: Any, item: type, params: Params, make: Callable[[Any, SamplingParams], Task]
) -> Given:
    """One input, a text or a sequence of `item`, or several. Errors: UsageError."""
    given = _plain(given)
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        inputs, is_one = [given], True
    else:
        inputs = list(given)
        is_one = bool(inputs) and isinstance(inputs[0], item)
        inputs = [inputs] if is_one else inputs
    if not isinstance(params, list | tuple):
        each = [_params(params)] * len(inputs)
    else:
        each = [_params(one) for one in params]
        if len(each) != len(inputs):
            raise UsageError(
                f"{len(inputs)} prompts and {len(each)} sampling params were given; give one "
                "for all, or one for each"
            )

    def tasks() -> Iterator[Task]:
        for prompt, one in zip(inputs, each, strict=True):
            try:
                yield make(prompt, one)
            except ServiceError:
                raise
            except HotcoldError as problem:
                yield Task(prompt, problem=in_keywords(problem))

    return Given(tasks(), len(inputs), is_one)


def _params(given: Any) -> SamplingParams:
    """Those of one prompt. Errors: UsageError for what are none."""
    if given is None:
        return SamplingParams()
    if not isinstance(given, SamplingParams):
        raise UsageError(f"sampling_params is {shown(given)}; give SamplingParams(...)")
    return given


def _request(drawn: sampling.SamplingParams, prompt: Any) -> GenerateRequest:
    """A prompt as a request. Errors: PromptError for what is none."""
    if isinstance(prompt, Mapping) and len(prompt) == 1:  # as vLLM's prompts
        prompt = prompt.get("prompt", prompt.get("prompt_token_ids", prompt))
    if isinstance(prompt, str):
        return GenerateRequest(drawn, prompt=prompt)
    prompt = _plain(prompt)
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
    if not is_list or any(not isinstance(token_id, Integral) for token_id in prompt):
        raise PromptError(f"{shown(prompt)} is no prompt; give a text or a list of token ids")
    return GenerateRequest(drawn, prompt_ids=[int(token_id) for token_id in prompt])


def _plain(given: Any) -> Any:
    """What an array or a tensor holds, as lists."""
    return given.tolist() if hasattr(given, "tolist") else given
