"""Answers collected from their events, for both kinds of completions."""

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from hotcold.actors.protocol.messages import GenerateRequest, Generation, TokenEvent, TokenLogprob
from hotcold.model.errors import ServiceError
from hotcold.ui.api.backend import Answers


class Answer:
    """The events of one answer so far, joined."""

    def __init__(self) -> None:
        self.text = ""
        self.thought = ""
        self.said_at = 0
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.num_tokens = 0
        self.result: Generation | None = None

    def add(self, event: TokenEvent) -> None:
        """Add the next event."""
        self.text += event.text
        self.thought += event.thought
        self.said_at += event.said_at
        self.num_tokens += event.num_tokens
        self.logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs
        self.result = event.result

    @property
    def event(self) -> TokenEvent:
        """All of a finished answer as one event."""
        return TokenEvent(
            self.text,
            self.whole,
            logprobs=tuple(self.logprobs),
            thought=self.thought,
            said_at=self.said_at,
        )

    @property
    def finish_reason(self) -> str:
        """ "stop" or "length", of a finished answer."""
        return self.whole.finish_reason

    @property
    def ids(self) -> list[int]:
        """The tokens of a finished answer."""
        return self.whole.ids

    @property
    def num_cached_tokens(self) -> int:
        """The tokens of its prompt that were in the KV cache before; of a finished answer."""
        return self.whole.num_cached_tokens

    @property
    def whole(self) -> Generation:
        """The result of a finished answer."""
        if self.result is None:
            raise ServiceError("an answer ended without a result")
        return self.result


async def collect(answers: Answers) -> list[Answer]:
    """Wait for all answers. Errors: ApiError, HotcoldError."""
    found: dict[int, Answer] = {}
    try:
        async with aclosing(answers.events()) as events:
            async for index, event in events:
                found.setdefault(index, Answer()).add(event)
    finally:
        answers.close()
    return [found[index] for index in range(len(found))]


def usage(
    requests: Sequence[GenerateRequest], answers: Sequence[Answer], copies: int, most: int = 1 << 31
) -> dict[str, Any]:
    """Token counts: a prompt of `copies` answers counts once, an answer `most` tokens at most.

    Of a prompt that counts once, what its first answer found in the KV cache.
    """
    prompt = sum(len(request.prompt_ids or ()) for request in requests[::copies])
    new = sum(min(len(answer.ids), most) for answer in answers)
    cached = sum(answer.num_cached_tokens for answer in answers[::copies])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
