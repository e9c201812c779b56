"""What the Python API returns."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hotcold.actors.protocol.messages import DraftCounts, Generation, TokenLogprob
from hotcold.model.errors import PromptError

_SHOWN_CHARS = 60


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; `arguments` is a JSON object as text, cut off where the answer was."""

    id: str
    name: str
    arguments: str

    @property
    def parsed_arguments(self) -> dict[str, Any]:
        """The arguments. Errors: ValueError where they were cut off."""
        found: dict[str, Any] = json.loads(self.arguments or "{}")
        return found

    @property
    def message(self) -> dict[str, Any]:
        """The call as a message of a conversation holds it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class Work:
    """What an answer's decoding steps computed and read.

    Shares are of all neurons, 0 to 1, and of whole steps: a neuron that one of a step's requests
    needs is computed. Times are for each token that the steps gave the answer. `reads` is of
    neurons on storage, and empty where all are in memory. `drafts`: tokens that were proposed
    beforehand.
    """

    neurons_computed: float = 0.0  # gate, up and down
    gates_computed: float = 0.0
    ups_computed: float = 0.0
    tokens_per_step: float = 1.0  # of all requests together, drafts included
    per_token_ms: dict[str, float] = field(default_factory=dict)
    reads: dict[str, float] = field(default_factory=dict)
    drafts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def bytes_read(self) -> float:
        """From storage, in a step."""
        return self.reads.get("bytes_read", 0.0)


@dataclass(frozen=True, repr=False)
class CompletionOutput:
    """One answer. Times in seconds.

    `text` is the answer of a chat without what the model thought, which is `thinking`.
    `finish_reason`: "stop", "length", "tool_calls" or "cancelled".
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None = None  # of `token_ids`, where they were asked for
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    queued_s: float = 0.0  # before it was begun
    prefill_s: float = 0.0  # until the first token
    decode_s: float = 0.0  # after it
    work: Work = Work()

    @property
    def decode_tokens_per_s(self) -> float:
        """New tokens a second after the first."""
        num_later = len(self.token_ids) - 1
        return num_later / self.decode_s if num_later > 0 and self.decode_s else 0.0

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of `logprobs`."""
        if self.logprobs is None:
            return None
        return math.fsum(one.logprob or 0.0 for one in self.logprobs)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message that the conversation goes on with."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = [call.message for call in self.tool_calls]
        return message

    def __repr__(self) -> str:
        calls = f", {len(self.tool_calls)} tool calls" if self.tool_calls else ""
        return (
            f"CompletionOutput({_cut(self.text)}, {len(self.token_ids)} tokens, "
            f"{self.finish_reason}{calls})"
        )


@dataclass(frozen=True, repr=False)
class RequestOutput:
    """The answers to one prompt or conversation, or the `error` that it ended with.

    `text`, `token_ids` and the other properties are the first answer's. Those of a prompt with an
    `error` raise it. It is also a list of one, itself, which vLLM returns of one prompt.
    """

    prompt: Any
    outputs: tuple[CompletionOutput, ...] = ()
    num_prompt_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # where they were asked for
    error: str = ""
    problem: Exception | None = field(default=None, compare=False)
    num_cached_tokens: int = 0  # of the prompt, which the first answer found in the KV cache

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[RequestOutput]:
        return iter((self,))

    def __getitem__(self, index: Any) -> Any:
        return [self][index]

    @property
    def first(self) -> CompletionOutput:
        """The first answer. Errors: HotcoldError of a prompt that has none."""
        if self.problem is not None:
            raise self.problem
        return self.outputs[0]

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.first.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first answer's tokens."""
        return self.first.token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first answer ended."""
        return self.first.finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """The first answer's."""
        return self.first.logprobs

    @property
    def thinking(self) -> str:
        """What the model thought before the first answer."""
        return self.first.thinking

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The first answer's."""
        return self.first.tool_calls

    @property
    def message(self) -> dict[str, Any]:
        """The first answer as a message."""
        return self.first.message

    @property
    def work(self) -> Work:
        """What the first answer took."""
        return self.first.work

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed a second, up to the first answer's first token."""
        num_computed = self.num_prompt_tokens - self.num_cached_tokens
        return num_computed / self.first.prefill_s if self.first.prefill_s else 0.0

    def as_json(self) -> dict[str, Any]:
        """The first answer by the keys of `hotcold generate --json`."""
        one, work = self.first, self.work
        return {
            "text": one.text,
            "ids": list(one.token_ids),
            "finish_reason": one.finish_reason,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_tokens_per_s": one.decode_tokens_per_s,
            "neurons_computed": work.neurons_computed,
            "gates_computed": work.gates_computed,
            "ups_computed": work.ups_computed,
            "per_token_ms": work.per_token_ms,
            "reads": work.reads,
            **work.drafts.as_json(),
        }

    def __repr__(self) -> str:
        if self.error:
            return f"RequestOutput({_cut(self.prompt)}, error={self.error!r})"
        more = f" and {len(self.outputs) - 1} more" if len(self.outputs) > 1 else ""
        count = self.num_prompt_tokens
        return f"RequestOutput({_cut(self.prompt)}, {count} tokens: {self.first}{more})"


@dataclass(frozen=True)
class StreamPiece:
    """What has come of an answer since the last piece; the last piece has the whole `output`."""

    text: str = ""
    thinking: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    output: RequestOutput | None = None


@dataclass(frozen=True, repr=False)
class ScoreOutput:
    """How likely a model finds a text. `logprobs[0]` is None: nothing precedes that token.

    So of one token nothing is scored: `logprob` is 0, and there is no perplexity.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]

    @property
    def logprob(self) -> float:
        """The sum of all, in nats."""
        return math.fsum(value for value in self.logprobs if value is not None)

    @property
    def perplexity(self) -> float:
        """exp(- the mean of all). Errors: PromptError of one token."""
        count = len(self.logprobs) - 1
        if not count:
            raise PromptError("a text of one token has no perplexity: nothing precedes the token")
        return math.exp(-self.logprob / count)

    def __repr__(self) -> str:
        perplexity = f", perplexity {self.perplexity:.3f}" if len(self.logprobs) > 1 else ""
        return f"ScoreOutput({len(self.token_ids)} tokens, logprob {self.logprob:.3f}{perplexity})"


def work_of(result: Generation) -> Work:
    """What a finished request took."""
    return Work(
        result.neurons_computed,
        result.gates_computed,
        result.ups_computed,
        result.step_tokens,
        result.per_token_ms,
        result.reads,
        result.drafts,
    )


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."
