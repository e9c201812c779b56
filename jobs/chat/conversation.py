"""A conversation: what was said, how answers are drawn, and what they took."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hotcold.actors.protocol.messages import GenerateRequest, Generation, TokenEvent
from hotcold.model.sampling import REPEATS, SamplingParams

Message = dict[str, str]
_JOINT = "\n\n"  # between a question and what is attached to it
_GO_ON = {"continue_final_message": True, "add_generation_prompt": False}  # of chat templates


class Running(Protocol):
    """A system that answers: one of the command's own, or one that stays."""

    def generate(self, request: GenerateRequest) -> Iterator[TokenEvent]:
        """Stream a request. Errors: PromptError; RequestError; ServiceError."""

    def cancel(self, request_id: str) -> None:
        """End a request; its events end soon."""


@dataclass(frozen=True)
class Facts:
    """What is told of the system behind a conversation."""

    model: str
    mode: str
    device: str
    context_length: int
    max_positions: int = 0  # that the model allows


@dataclass
class Counts:
    """Of all answers of a conversation's session."""

    num_answers: int = 0
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    seconds: float = 0.0


@dataclass
class Answering:
    """The answer that is being read."""

    num_tokens: int = 0
    num_prompt_tokens: int = 0  # known from the first event on
    _first_at: float = 0.0
    _num_first: int = 0
    _last_at: float = 0.0

    def count(self, event: TokenEvent) -> None:
        """Take an event."""
        self._last_at = time.monotonic()
        if not self.num_tokens:
            self._first_at, self._num_first = self._last_at, event.num_tokens
        self.num_tokens += event.num_tokens
        self.num_prompt_tokens = event.num_prompt_tokens

    @property
    def num_context_tokens(self) -> int | None:
        """Of prompt and answer; None before they are known."""
        return self.num_prompt_tokens + self.num_tokens if self.num_prompt_tokens else None

    @property
    def tokens_per_s(self) -> float:
        """Since the first event; 0 before the second."""
        passed_s = self._last_at - self._first_at
        return (self.num_tokens - self._num_first) / passed_s if passed_s > 0 else 0.0


@dataclass
class Conversation:
    """Questions and answers in turn."""

    running: Running
    facts: Facts
    defaults: SamplingParams  # the model's own
    given: dict[str, Any] = field(default_factory=dict)  # of PARAMETERS: what differs from these
    system_prompt: str = ""
    messages: list[Message] = field(default_factory=list)  # without the system prompt
    attached: list[str] = field(default_factory=list)  # texts that go with the next question
    result: Generation | None = None  # of the last answer, if it has one
    counts: Counts = field(default_factory=Counts)
    num_context_tokens: int | None = 0  # that it takes of the context; None: no answer has told
    tokens_per_s: float = 0.0  # of the last answer, after its first token
    answering: Answering | None = None
    request_id: str = ""  # of what is being answered
    _typed: str = ""  # the last question, without what was attached to it by command:
    _typed_with: list[str] = field(default_factory=list)
    _told: str = ""  # the whole of that question

    @property
    def sampling(self) -> SamplingParams:
        """How answers are drawn."""
        return SamplingParams.of_given(self.given, self.defaults)

    def give(self, name: str, value: Any) -> None:
        """Change how answers are drawn; None: by the model's default. Errors: UsageError."""
        others = {one: old for one, old in self.given.items() if not {one, name} <= REPEATS}
        given = {**others, name: value}
        SamplingParams.of_given(given, self.defaults)  # for its errors
        self.given = given

    @property
    def last_question(self) -> str:
        """What was typed last; "" before the first question."""
        return self._last()[0]

    def is_loaded(self, question: str) -> bool:
        """Whether it is the last one, and was not typed here: files' texts are part of it."""
        return bool(self.messages) and question == self.messages[-2]["content"] != self._told

    def clear(self) -> None:
        """Forget what was said."""
        self.messages, self.attached = [], []
        self.num_context_tokens, self.tokens_per_s, self.result = 0, 0.0, None

    def load(self, system_prompt: str, messages: list[Message]) -> None:
        """Go on with what was said elsewhere."""
        self.clear()
        self.system_prompt, self.messages = system_prompt, messages
        self.num_context_tokens = None if messages else 0

    def begin(self) -> str:
        """Return the id of the next request, by which it can be cancelled."""
        self.request_id = uuid.uuid4().hex
        self.answering = Answering()
        return self.request_id

    def ask(
        self,
        question: str,
        show: Callable[[TokenEvent], None],
        again: bool = False,
        named: Sequence[str] = (),
    ) -> None:
        """Answer a question after `begin`, event by event; a cancelled answer is kept as it is.

        `again`: in place of the last question, whose attached texts go with this one, too.
        `named`: more texts, which go with this one alone
        Errors:  PromptError, and nothing has changed; ServiceError
        """
        before, attached = self.messages, self.attached
        if again:
            before, attached = before[:-2], [*self._last()[1], *attached]
        content = _JOINT.join([question, *attached, *named])
        messages = [*before, {"role": "user", "content": content}]
        answer = self._answer(messages, show, None)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        self._typed, self._typed_with, self._told = question, attached, content
        self.attached = []
        self.counts.num_answers += 1

    def go_on(self, show: Callable[[TokenEvent], None]) -> None:
        """Continue the last answer after `begin`, event by event.

        Errors:  PromptError, and nothing has changed, also where the chat template does not write
                 the answer as it is; ServiceError
        """
        *before, last = self.messages
        begun = last["content"].rstrip()  # as templates have it
        messages = [*before, {**last, "content": begun}]
        self.messages = [*before, {**last, "content": begun + self._answer(messages, show, _GO_ON)}]

    def _answer(
        self,
        messages: list[Message],
        show: Callable[[TokenEvent], None],
        template_variables: dict[str, Any] | None,
    ) -> str:
        """What the system answers to these messages. Errors: PromptError, ServiceError."""
        answering = self.answering or Answering()
        opening = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        request = GenerateRequest(
            self.sampling,
            messages=[*opening, *messages],
            template_variables=template_variables,
            request_id=self.request_id,
        )
        began, answer, result = time.monotonic(), "", None
        try:
            for event in self.running.generate(request):
                answer += event.readable
                answering.count(event)
                result = event.result
                show(event)
        finally:
            self.answering = None
        self._count(answering, result, time.monotonic() - began)
        return answer

    def _last(self) -> tuple[str, list[str]]:
        """The last question as it was typed, and what was attached to it."""
        if not self.messages:
            return "", []
        content = self.messages[-2]["content"]
        # What was loaded has been typed with all that it is.
        return (self._typed, self._typed_with) if content == self._told else (content, [])

    def _count(self, answering: Answering, result: Generation | None, seconds: float) -> None:
        """Take up what an answer took; one that was cancelled may have no result."""
        self.result = result
        self.counts.seconds += seconds
        self.counts.num_new_tokens += answering.num_tokens
        if result is None:
            self.num_context_tokens = answering.num_context_tokens
            self.tokens_per_s = answering.tokens_per_s
            return
        self.counts.num_prompt_tokens += result.num_prompt_tokens
        self.num_context_tokens = result.num_prompt_tokens + len(result.ids)
        self.tokens_per_s = result.decode_tokens_per_s or answering.tokens_per_s

    @property
    def status(self) -> str:
        """Model, mode, context and speed, in a line."""
        facts, used = self.facts, self.num_context_tokens
        speed = self.tokens_per_s
        if self.answering is not None:
            used, speed = self.answering.num_context_tokens, self.answering.tokens_per_s
        told = [facts.model, f"{facts.mode} on {facts.device}"]
        if used is None:
            told.append(f"? of {facts.context_length:,} tokens")
        else:
            share = used / facts.context_length
            told.append(f"{used:,} of {facts.context_length:,} tokens ({share:.0%})")
        told += [f"{speed:.1f} tokens/s"] if speed else []
        return " · ".join(told)
