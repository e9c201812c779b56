"""OpenAI's completions: POST /v1/completions, and what chat completions share with it."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from starlette.responses import Response

from hotcold.actors.protocol.messages import GenerateRequest, Generation, TokenEvent
from hotcold.ui.api import sse
from hotcold.ui.api.answer import Answer, answer_of, usage
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.logprobs import CompletionLogprobs
from hotcold.ui.api.schemas import ChatRequest, CompletionRequest

Choice = dict[str, Any]


async def complete(backend: Backend, body: CompletionRequest) -> Response:
    """Continue a text, as OpenAI's completions do."""
    return await answer_of(CompletionAnswer(backend, body), body.stream)


class ChoicesAnswer(Answer):
    """An answer of choices: chunks of one choice each, the last of them with the usage."""

    kinds: tuple[str, str, str]  # what ids begin with, of whole answers, of chunks
    end = sse.DONE
    most_counted = 1 << 31  # new tokens of a choice, in the usage

    def __init__(self, backend: Backend, body: ChatRequest | CompletionRequest) -> None:
        super().__init__(backend, body)
        prefix, self._whole_kind, self._chunk_kind = self.kinds
        self._has_usage_chunk = body.has_usage_chunk
        self._results: dict[int, Generation] = {}
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": backend.settings.model_name,
            "system_fingerprint": None,
        }

    def take(self, index: int, event: TokenEvent) -> Iterator[Any]:
        """Take the next event of a choice."""
        if event.result is not None:
            self._results[index] = event.result
        for choice in self.choices(index, event):
            yield self.chunk([choice])

    @abstractmethod
    def choices(self, index: int, event: TokenEvent) -> Iterator[Choice]:
        """What chunks tell of an event."""

    @abstractmethod
    def whole_choice(self, index: int) -> Choice:
        """A choice of the whole answer."""

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts of all."""
        results = [self._results[index] for index in range(self._count)]
        return usage(results, self._asked.n or 1, self.most_counted)

    def closing(self) -> Iterable[Any]:
        """The usage, where it is asked for."""
        return [self.chunk([], usage=self.usage)] if self._has_usage_chunk else ()

    def whole(self) -> dict[str, Any]:
        """The whole answer."""
        choices = [self.whole_choice(index) for index in range(self._count)]
        found = {"object": self._whole_kind, "choices": choices, "usage": self.usage}
        return self._head | found

    def chunk(self, choices: list[Choice], **more: Any) -> dict[str, Any]:
        """A chunk of a stream."""
        if self._has_usage_chunk:
            more = {"usage": None, **more}
        return {**self._head, "object": self._chunk_kind, "choices": choices, **more}


class CompletionAnswer(ChoicesAnswer):
    """The answer to a request of /v1/completions."""

    kinds = ("cmpl", "text_completion", "text_completion")

    def __init__(self, backend: Backend, body: CompletionRequest) -> None:
        super().__init__(backend, body)
        self._body = body
        self._wants_none = body.max_tokens == 0
        if self._wants_none:
            self.most_counted = 0
        self._echoed: list[str] = []
        self._logprobs = [CompletionLogprobs(backend.texts) for _ in range(self._count)]
        self._choices: dict[int, Choice] = {}

    async def requests(self) -> list[GenerateRequest]:
        """A request for each answer to each prompt, whose texts are found where they are echoed."""
        made = await super().requests()
        if self._body.echo:
            self._echoed = await asyncio.to_thread(lambda: list(map(self._prompt_text, made)))
        return made

    def choices(self, index: int, event: TokenEvent) -> Iterator[Choice]:
        """The next piece of a choice; the echoed prompt is in the first."""
        text, tokens = ("", ()) if self._wants_none else (event.text, event.logprobs)
        if self._echoed:
            text, self._echoed[index] = self._echoed[index] + text, ""
        scored = [*event.prompt_logprobs, *tokens]
        choice: Choice = {
            "index": index,
            "text": text,
            "logprobs": (
                None if self._body.logprobs is None else self._logprobs[index].piece(scored)
            ),
            "finish_reason": None,
        }
        if (result := event.result) is not None:
            choice["finish_reason"] = "length" if self._wants_none else result.finish_reason
            if self._body.return_token_ids:
                choice["token_ids"] = [] if self._wants_none else result.ids
        self._choices[index] = choice
        yield choice

    def whole_choice(self, index: int) -> Choice:
        """A whole answer comes as one event, so that its last piece is all of it."""
        return self._choices[index]

    def _prompt_text(self, request: GenerateRequest) -> str:
        """The text of the prompt's tokens, those that the tokenizer added included."""
        ids = request.prompt_ids or []
        if self._body.logprobs is not None:  # so that tokens and text agree
            return b"".join(map(self._backend.texts.bytes_of, ids)).decode("utf-8", "replace")
        tokenizer = self._backend.prompts.tokenizer
        return tokenizer.decode(ids) if tokenizer is not None else ""
