"""POST /v1/completions."""

import asyncio
from collections.abc import Sequence
from typing import Any

from hotcold.actors.protocol.messages import GenerateRequest, TokenEvent, TokenLogprob
from hotcold.ui.api import sse
from hotcold.ui.api.answer import Answer, collect, usage
from hotcold.ui.api.backend import Answers
from hotcold.ui.api.logprobs import CompletionLogprobs, TokenTexts
from hotcold.ui.api.requests import completion_requests
from hotcold.ui.api.route import Route
from hotcold.ui.api.schemas import CompletionRequest


class CompletionRoute(Route):
    """The answers of /v1/completions."""

    prompt = "prompt"

    async def whole(self, body: CompletionRequest) -> dict[str, Any]:
        """The whole answer. Errors: ApiError, HotcoldError."""
        started = await self._start(body)
        answers = await collect(started)
        requests = started.requests
        choices = await asyncio.to_thread(
            lambda: [
                self._writer(body, request).choice(index, answer)
                for index, (request, answer) in enumerate(zip(requests, answers, strict=True))
            ]
        )
        head = self._head("cmpl", "text_completion")
        return {**head, "choices": choices, "usage": _usage(body, requests, answers)}

    async def stream(self, body: CompletionRequest) -> sse.EventStream:
        """The answer as events; it is queued. Errors: ApiError, HotcoldError."""
        started = await self._start(body)
        try:
            writers = await asyncio.to_thread(
                lambda: [self._writer(body, request) for request in started.requests]
            )
        except BaseException:
            started.close()
            raise

        def choices_of(index: int, event: TokenEvent) -> list[dict[str, Any]]:
            piece = Answer()
            piece.add(event)
            return [writers[index].choice(index, piece)]

        return self._chunks(
            body,
            started,
            self._head("cmpl", "text_completion"),
            choices_of,
            lambda answers: _usage(body, started.requests, answers),
        )

    async def _start(self, body: CompletionRequest) -> Answers:
        count = len(body.prompts) * (body.n or 1)
        return await self._backend.start(count, lambda: completion_requests(self._backend, body))

    def _writer(self, body: CompletionRequest, request: GenerateRequest) -> "_Writer":
        echoed = self._prompt_text(body, request) if body.echo else ""
        return _Writer(body, echoed, self._texts)

    def _prompt_text(self, body: CompletionRequest, request: GenerateRequest) -> str:
        """The text of the prompt's tokens, those that the tokenizer added included."""
        ids = request.prompt_ids or []
        if body.logprobs is not None:  # so that tokens and text agree
            return b"".join(map(self._texts.bytes_of, ids)).decode("utf-8", "replace")
        tokenizer = self._backend.prompts.tokenizer
        return tokenizer.decode(ids) if tokenizer is not None else ""


class _Writer:
    """Makes the choices of one answer; the echoed prompt is in the first."""

    def __init__(self, body: CompletionRequest, echoed: str, texts: TokenTexts) -> None:
        self._body = body
        self._echoed = echoed
        self._logprobs = CompletionLogprobs(texts)
        self._wants_none = body.max_tokens == 0

    def choice(self, index: int, piece: Answer) -> dict[str, Any]:
        text = self._echoed + ("" if self._wants_none else piece.text)
        self._echoed = ""
        tokens: list[TokenLogprob] = list(piece.prompt_logprobs)
        tokens += [] if self._wants_none else piece.logprobs
        result = piece.result
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None if self._body.logprobs is None else self._logprobs.piece(tokens),
            "finish_reason": None,
        }
        if result is not None:
            choice["finish_reason"] = "length" if self._wants_none else result.finish_reason
            if self._body.return_token_ids:
                choice["token_ids"] = [] if self._wants_none else result.ids
        return choice


def _usage(
    body: CompletionRequest, requests: Sequence[GenerateRequest], answers: Sequence[Answer]
) -> dict[str, Any]:
    most = 0 if body.max_tokens == 0 else 1 << 31
    return usage(requests, answers, body.n or 1, most)
