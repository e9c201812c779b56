"""What comes of prompts: requests, answers put together from their events, and a progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hotcold.actors.protocol.messages import GenerateRequest, Generation, TokenEvent, TokenLogprob
from hotcold.actors.protocol.options import in_keywords
from hotcold.model.errors import HotcoldError, ServiceError
from hotcold.outputs import CompletionOutput, RequestOutput, StreamPiece, ToolCall, work_of

if TYPE_CHECKING:
    from hotcold.chats import Chat

_BAR_AFTER_S = 2.0


@dataclass
class Task:
    """A prompt, and a request for each of its answers, or the problem that it has."""

    prompt: Any
    requests: list[GenerateRequest] = field(default_factory=list)
    chat: Chat | None = None
    problem: Exception | None = None


class Answer:
    """One answer, as it comes."""

    def __init__(self, task: Task, index: int) -> None:
        self._task = task
        self._index = index
        self._reader = None if task.chat is None else task.chat.reader()
        self._logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.result: Generation | None = None

    def add(self, event: TokenEvent) -> StreamPiece:
        """Take the next event; returns what it brings."""
        said, thought = event.text, ""
        if self._reader is not None:
            said, thought = self._reader.texts(event)
        self._logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs
        self.result = event.result
        piece = StreamPiece(said, thought, event.token_ids, event.logprobs)
        if event.result is None:
            return piece
        output = self.output()
        whole = request_output(self._task, [self])
        return replace(piece, finish_reason=output.finish_reason, output=whole)

    def output(self) -> CompletionOutput:
        """The whole answer, once it has ended."""
        result = self.result
        assert result is not None
        request, reader = self._task.requests[self._index], self._reader
        found = () if reader is None else reader.calls
        calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in found)
        return CompletionOutput(
            self._index,
            result.text if reader is None else reader.said,
            tuple(result.ids),
            "tool_calls" if calls and result.finish_reason == "stop" else result.finish_reason,
            None if request.num_logprobs is None else tuple(self._logprobs),
            "" if reader is None else reader.thought,
            calls,
            result.queued_s,
            result.prefill_s,
            result.decode_s,
            work_of(result),
        )


class Answers:
    """All answers to one prompt."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.answers = [Answer(task, index) for index in range(len(task.requests))]
        self.problem = task.problem

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self.problem is not None or all(one.result is not None for one in self.answers)

    def take(self, index: int, event: TokenEvent | BaseException) -> None:
        """Take an event of one answer. Errors: what is not this prompt's own fault."""
        if isinstance(event, TokenEvent):
            self.answers[index].add(event)
            return
        problem = in_keywords(event) if isinstance(event, HotcoldError) else event
        if not isinstance(problem, HotcoldError) or isinstance(problem, ServiceError):
            raise problem
        self.problem = problem

    def output(self) -> RequestOutput:
        """All of it."""
        if self.problem is not None:
            return RequestOutput(self.task.prompt, error=str(self.problem), problem=self.problem)
        return request_output(self.task, self.answers)


def request_output(task: Task, answers: Sequence[Answer]) -> RequestOutput:
    """The answers to a prompt, which have all ended."""
    first, request = answers[0], task.requests[0]
    assert first.result is not None
    scored = None if request.num_prompt_logprobs is None else tuple(first.prompt_logprobs)
    outputs = tuple(answer.output() for answer in answers)
    return RequestOutput(
        task.prompt,
        outputs,
        first.result.num_prompt_tokens,
        scored,
        num_cached_tokens=first.result.num_cached_tokens,
    )


@contextmanager
def progress_bar(count: int, shown: bool | None) -> Iterator[Callable[[int], None]]:
    """A bar on standard error for what takes more than two seconds; `shown` None: at a terminal."""
    if shown is None:
        shown = sys.stderr is not None and sys.stderr.isatty()
    began = time.monotonic()
    bar: Any = None
    task: Any = None

    def show(num_done: int) -> None:
        nonlocal bar, task
        if not shown or count < 2:
            return
        if task is None and time.monotonic() - began > _BAR_AFTER_S:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

            columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            bar = Progress(*columns, console=Console(stderr=True))
            bar.start()
            task = bar.add_task("", total=count)
        if task is not None:
            bar.update(task, completed=num_done)

    try:
        yield show
        show(count)
    finally:
        if task is not None:
            bar.stop()
