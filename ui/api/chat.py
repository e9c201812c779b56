"""POST /v1/chat/completions."""

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from actors.protocol.messages import TokenEvent
from ui.api import sse
from ui.api.answer import Answer, collect, first_then_rest, usage
from ui.api.backend import Backend
from ui.api.errors import as_api_error
from ui.api.requests import chat_requests
from ui.api.schemas import ChatRequest
from ui.api.tokens import TokenTexts, chat_logprobs


class ChatRoute:
    """Answers conversations."""

    def __init__(self, backend: Backend, texts: TokenTexts) -> None:
        """`texts` are the model's."""
        self._backend = backend
        self._texts = texts

    async def whole(self, body: ChatRequest) -> dict[str, Any]:
        """The whole answer. Errors: ApiError, HotcoldError."""
        requests = await chat_requests(self._backend, body)
        answers = await collect(await self._backend.start(requests))
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._logprobs(body, answer),
                "finish_reason": answer.finish_reason,
            }
            | ({"token_ids": answer.ids} if body.return_token_ids else {})
            for index, answer in enumerate(answers)
        ]
        head = self._head("chat.completion")
        return {**head, "choices": choices, "usage": usage(requests, answers, len(requests))}

    async def stream(self, body: ChatRequest) -> sse.EventStream:
        """The answer as events; it has begun. Errors: ApiError, HotcoldError."""
        requests = await chat_requests(self._backend, body)
        answers = await self._backend.start(requests)
        events = await first_then_rest(answers)
        head = self._head("chat.completion.chunk")
        if body.has_usage_chunk:
            head["usage"] = None

        def chunk(index: int, delta: dict[str, Any], **more: Any) -> bytes:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            return sse.event({**head, "choices": [{**choice, **more}]})

        async def pieces() -> AsyncGenerator[bytes, None]:
            done = [Answer() for _ in requests]
            try:
                for index in range(len(requests)):
                    yield chunk(index, {"role": "assistant", "content": ""})
                async for index, event in events:
                    done[index].add(event)
                    if event.text or event.logprobs:
                        delta = {"content": event.text}
                        yield chunk(index, delta, logprobs=self._logprobs(body, event))
                    if event.result is not None:
                        more = {"token_ids": event.result.ids} if body.return_token_ids else {}
                        yield chunk(index, {}, finish_reason=event.result.finish_reason, **more)
                if body.has_usage_chunk:
                    told = usage(requests, done, len(requests))
                    yield sse.event({**head, "choices": [], "usage": told})
                yield sse.DONE
            except Exception as error:
                yield sse.event(as_api_error(error).body)
            finally:
                answers.close()

        return sse.EventStream(pieces())

    def _logprobs(self, body: ChatRequest, event: TokenEvent | Answer) -> dict[str, Any] | None:
        """Without the end token, which is no content."""
        if not body.logprobs:
            return None
        tokens, result = list(event.logprobs), event.result
        has_ended = result is not None and result.finish_reason == "stop"
        if tokens and has_ended and tokens[-1].token_id in self._backend.eos_ids:
            del tokens[-1]
        return chat_logprobs(self._texts, tokens)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self._backend.settings.model_name,
            "system_fingerprint": None,
        }
