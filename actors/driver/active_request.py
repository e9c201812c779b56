"""One request, from prompt to last token: what it still needs, and what it has produced."""

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hotcold.actors.driver.engine import Engine
from hotcold.actors.driver.grammar import Constraint, Grammars
from hotcold.actors.driver.penalties import Penalties
from hotcold.actors.driver.pooling import StateMean
from hotcold.actors.driver.prompts import Prompts
from hotcold.actors.driver.stop_strings import StopStrings
from hotcold.actors.driver.token_logprobs import AnswerLogprobs, PromptLogprobs, token_logprob
from hotcold.actors.protocol.failures import NotFiniteError
from hotcold.actors.protocol.messages import GenerateRequest, Generation, TokenEvent
from hotcold.actors.protocol.step_sizes import chunk_sizes
from hotcold.actors.telemetry.step_times import StepTimes
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.sampling import eos_ids
from hotcold.numba_kernels.decode.sampling import sample


@dataclass(eq=False)
class Stream:
    """Between a request's reader and the engine's thread."""

    request_id: str
    cancelled: threading.Event = field(default_factory=threading.Event)

    def put(self, event: TokenEvent | BaseException) -> None:
        """Hand an event to the reader, or the error that is the last of them."""
        raise NotImplementedError


class Generator:
    """What all requests of a model share."""

    def __init__(
        self, path: Path, config: ModelConfig, engine: Engine, context_length: int
    ) -> None:
        """Tokenizer, chat template and eos ids come from the model's directory `path`."""
        self.config = config
        self.engine = engine
        self.context_length = context_length
        self.prompts = Prompts(path, config, context_length)
        self.eos_ids = frozenset(eos_ids(path, config))
        self.grammars = Grammars(self.prompts.tokenizer, config.vocab_size, self.eos_ids)

    def warm_up(self) -> None:
        """Run one token, so that no request waits for a kernel to be compiled or read from disk."""
        with suppress(NotFiniteError):  # that is for the requests to hear
            self.engine.step([0], [0], [0])
        logits = np.zeros(self.config.vocab_size, np.float32)
        for top_k in (0, 1, 2):
            sample(logits, temperature=1.0, top_k=top_k, top_p=0.9, uniform=0.5)
        token_logprob(logits, 0, 1)
        states = np.zeros(self.config.hidden_size, np.float32)
        StateMean(self.config, self.engine.embedding).add(0, states)


class ActiveRequest:
    """A request that waits or runs. Only its constructor is called by other threads.

    tokens: the prompt and what follows it; the first `num_done` are in the KV cache. A running
    request whose prompt is done has one token left: the last one chosen. One that wants an
    embedding ends with its prompt.
    """

    def __init__(self, generator: Generator, request: GenerateRequest, stream: Stream) -> None:
        """The request's `prompt_ids` are what `Prompts.ids` returned; no other prompt is read.

        Errors:  UsageError for a grammar that is none
        """
        self.tokens = list(request.prompt_ids or [])
        self.num_done = 0
        self.is_scored = request.num_prompt_logprobs is not None
        self.slot = -1
        self.stream = stream
        self.times = StepTimes()  # of the steps that followed the prompt
        self._generator = generator
        self._sampling = request.sampling
        self._num_prompt_tokens = len(self.tokens)
        self._mean: StateMean | None = None
        if request.wants_embedding:
            self._mean = StateMean(generator.config, generator.engine.embedding)
        self.chunk_sizes = self._cuts()
        self._penalties = Penalties(request.sampling, self._num_prompt_tokens)
        self._random = np.random.default_rng(request.sampling.seed)
        sampling = request.sampling
        self._stop = StopStrings(sampling.stop, sampling.include_stop_str_in_output)
        tokenizer = generator.prompts.tokenizer
        self._decoder = tokenizer.stream_decoder(self.tokens) if tokenizer else None
        room = generator.context_length - len(self.tokens)
        self._max_tokens = 0 if self.embeds else min(sampling.max_tokens or room, room)
        eos_ids = frozenset() if sampling.ignore_eos else generator.eos_ids
        self._end_ids = eos_ids.union(sampling.stop_token_ids)
        self._num_told = 0  # new tokens that the reader knows of
        self._constraint: Constraint | None = None
        if request.grammar is not None:
            self._constraint = generator.grammars.constraint(request.grammar)
        self._logprobs = AnswerLogprobs(request.num_logprobs)
        self._prompt_logprobs = PromptLogprobs(self.tokens, request.num_prompt_logprobs)
        # Seconds: when it was submitted, admitted, had its first token.
        self._moments = [time.monotonic()]

    def num_positions(self, ahead: int) -> int:
        """Positions of the KV cache for its tokens and for the next `ahead`, if it gets so many."""
        return min(len(self.tokens) + ahead, self._num_prompt_tokens + self._max_tokens)

    @property
    def num_left(self) -> int:
        """Tokens that are not in the KV cache yet."""
        return len(self.tokens) - self.num_done

    @property
    def embeds(self) -> bool:
        """Whether its hidden states are wanted, and no new tokens."""
        return self._mean is not None

    @property
    def has_answered(self) -> bool:
        """Whether its first new token was chosen."""
        return len(self.tokens) > self._num_prompt_tokens

    @property
    def is_cancelled(self) -> bool:
        """Whether its reader wants no more."""
        return self.stream.cancelled.is_set()

    def start(self, slot: int) -> None:
        """It is admitted, as the sequence `slot`; it may be again after `replay`."""
        self.slot = slot
        if len(self._moments) == 1:
            self._moments.append(time.monotonic())

    def replay(self) -> None:
        """Its KV cache is lost: its tokens go through the model again, cut as they were.

        None is chosen again, so neither the tokens nor the random numbers change.
        """
        self.num_done = 0
        self.chunk_sizes = self._cuts()

    def _cuts(self) -> list[int]:
        """The prompt's chunks; one that is scored or embedded goes through kernels."""
        if self.is_scored or self.embeds:
            return []
        return chunk_sizes(self._num_prompt_tokens, self._generator.engine.max_tokens)

    def accept(self, logits: np.ndarray) -> bool:
        """Choose the next token and show what can be shown; True where it was the last one.

        One that embeds has none to choose, and reads no logits.
        Errors:  ValueError where the logits hold a NaN; UsageError where a grammar has no way on
        """
        if self.embeds:
            return self.end("stop")
        self._prompt_logprobs.check()
        params, constraint = self._sampling, self._constraint
        token_id = sample(
            self._weighed(logits),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            uniform=float(self._random.random()),
        )
        if not self.has_answered:
            self._moments.append(time.monotonic())
        self.tokens.append(token_id)
        ended = constraint is not None and constraint.accept(token_id)
        self._logprobs.add(logits, token_id, self._decoder)
        is_end = token_id in self._end_ids
        is_shown = params.include_stop_str_in_output and token_id in params.stop_token_ids
        text = ""
        if self._decoder and (is_shown or not is_end):
            may_stop = self._num_new > params.min_tokens
            text = self._stop.push(self._decoder.push(token_id), may_stop)
        if is_end or self._stop.found or ended:
            return self.end("stop", text)
        if self._num_new >= self._max_tokens:
            return self.end("length", text)
        if text or self._decoder is None:
            self._tell(text)
        return False

    def _weighed(self, logits: np.ndarray) -> np.ndarray:
        """What the next token is drawn from: `logits` with all that the request has to say."""
        weighed = self._penalties.applied(logits, self.tokens)
        if self._constraint is not None:
            weighed = self._constraint.masked(weighed)
        if self._num_new < self._sampling.min_tokens and self._end_ids:
            going_on = weighed.copy()
            going_on[list(self._end_ids)] = -np.inf
            if np.isfinite(going_on).any():  # a grammar may have come to its end
                return going_on
        return weighed

    @property
    def _num_new(self) -> int:
        return len(self.tokens) - self._num_prompt_tokens

    def wants_logits(self, place: int) -> bool:
        """Whether what follows the token at `place` is chosen, or is scored."""
        if self.embeds:
            return False
        return place == len(self.tokens) - 1 or self._prompt_logprobs.wants(place)

    def score(self, place: int, logits: np.ndarray) -> None:
        """Take the logits (V,) after a prompt's token; what followed is known."""
        self._prompt_logprobs.add(place, logits)

    def embed(self, place: int, hidden: np.ndarray) -> None:
        """Take the hidden state (d,) of its token at `place` after the last layer; it `embeds`."""
        assert self._mean is not None
        self._mean.add(place, hidden)

    def end(self, finish_reason: str, text: str = "") -> bool:
        """Hand out the result, after `text` and what was held back until now; True."""
        tail = self._decoder.finish() if self._decoder else ""
        text += self._stop.push(tail) + self._stop.flush()
        self._tell(text, self._result(finish_reason))
        return True

    def _tell(self, text: str, result: Generation | None = None) -> None:
        num_new = self._num_new
        num_shown = None if result is not None and not self._stop.found else len(self._stop.text)
        self.stream.put(
            TokenEvent(
                text,
                result,
                num_new - self._num_told,
                self._logprobs.take(num_shown),
                self._prompt_logprobs.take(),
                tuple(self.tokens[self._num_prompt_tokens + self._num_told :]),
            )
        )
        self._num_told = num_new

    def fail(self, error: BaseException) -> None:
        """Hand out an error instead of a result."""
        self.stream.put(error)

    def _result(self, finish_reason: str) -> Generation:
        now, config = time.monotonic(), self._generator.config
        submitted, admitted, first_token = (*self._moments, now, now)[:3]
        total = config.num_layers * config.ffn_size * max(self.times.num_steps, 1)
        return Generation(
            text=self._stop.text,
            ids=self.tokens[self._num_prompt_tokens :],
            finish_reason=finish_reason,
            num_prompt_tokens=self._num_prompt_tokens,
            prefill_s=first_token - admitted,
            decode_s=now - first_token,
            queued_s=admitted - submitted,
            per_token_ms=self.times.per_step_ms(),
            step_tokens=self.times.num_tokens / max(self.times.num_steps, 1),
            neurons_computed=self.times.num_neurons / total,
            gates_computed=self.times.num_gates / total,
            ups_computed=self.times.num_ups / total,
            reads=self.times.per_step_reads(),
            embedding=self._mean.mean() if self._mean and self.num_left == 0 else None,
        )
