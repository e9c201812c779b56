"""One request, from prompt to last token: what is left of it, and what it has produced."""

import math
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hotcold.actors.driver.embeddings import StateMean, has_embeddings
from hotcold.actors.driver.engine import Engine
from hotcold.actors.driver.grammars.masks import Constraint, Grammars
from hotcold.actors.driver.logprobs import (
    AnswerLogprobs,
    PromptLogprobs,
    token_logprob,
)
from hotcold.actors.driver.prompts import Prompts
from hotcold.actors.driver.sampler import Breakers, TokenSampler
from hotcold.actors.driver.stop_strings import StopStrings
from hotcold.actors.driver.streams import Stream
from hotcold.actors.driver.thoughts import Thoughts, reader_of, said, said_after
from hotcold.actors.kv_cache.pool import page_keys
from hotcold.actors.protocol.failures import NotFiniteError
from hotcold.actors.protocol.messages import (
    MARK,
    SAID,
    THOUGHT,
    DraftCounts,
    DrawState,
    GenerateRequest,
    Generation,
    TokenEvent,
)
from hotcold.actors.protocol.step_sizes import chunk_sizes
from hotcold.actors.telemetry.step_times import StepRecord, StepTimes
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.sampling import eos_ids, suppressed_ids
from hotcold.model.text.call_syntax import CallSyntax
from hotcold.model.text.calls import CallSplitter, Span, SpanKind
from hotcold.model.text.channels import ReadableText
from hotcold.model.weights.embedding import EmbeddingWeights
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS
from hotcold.numba_kernels.decode.sampling import sample

_MAX_BREAKERS = 16  # lists of DRY's breakers
_SPANS = {SAID: SpanKind.TEXT, THOUGHT: SpanKind.THOUGHT, MARK: SpanKind.MARK}
_NO_LOGITS = np.empty(0, np.float32)


class Generator:
    """What all requests of a model share: prompts, eos ids, grammars."""

    def __init__(
        self, path: Path, config: ModelConfig, engine: Engine, context_length: int
    ) -> None:
        """Tokenizer, chat template and eos ids come from the model's directory `path`."""
        self.config = config
        self.engine = engine
        self.context_length = context_length
        self.prompts = Prompts(path, config, context_length)
        named, tokenizer = eos_ids(path, config), self.prompts.tokenizer
        ends = named if tokenizer is None else tokenizer.end_ids(named)
        self.eos_ids = frozenset(end for end in ends if end < config.vocab_size)
        self.never = suppressed_ids(path, config.vocab_size)
        self.grammars = Grammars(self.prompts.tokenizer, config.vocab_size, self.eos_ids)
        breakers = partial(Breakers, self.prompts.tokenizer, config.vocab_size)
        self.breakers = lru_cache(_MAX_BREAKERS)(breakers)  # each of a few bytes a token at most
        self.last_answer: StepRecord | None = None

    def warm_up(self) -> None:
        """Run one token, so that no request waits for a kernel to be compiled or read from disk."""
        self.engine.is_sound(0)
        compile_choice(self.config)

    def compile_extras(self) -> None:
        """Compile what few requests need; they wait for it unless this was called."""
        compile_extras(self.config, self.engine.embedding)


def compile_choice(config: ModelConfig) -> None:
    """Compile what chooses tokens; nothing is asked of services."""
    logits = np.zeros(config.vocab_size, np.float32)
    for top_k in (0, 1, 2):
        sample(logits, temperature=1.0, top_k=top_k, top_p=0.9, uniform=0.5)


def compile_extras(config: ModelConfig, embedding: EmbeddingWeights) -> None:
    """Compile log-probabilities and embeddings; nothing is asked of services."""
    token_logprob(np.zeros(config.vocab_size, np.float32), 0, 1)
    if has_embeddings(config):
        StateMean(config, embedding).add(0, np.zeros(config.hidden_size, np.float32))


class _Ends(NamedTuple):
    """Tokens that end what is written; `places`: their ids as an array."""

    ids: frozenset[int]
    places: np.ndarray

    @classmethod
    def of(cls, ids: frozenset[int]) -> "_Ends":
        return cls(ids, np.array(sorted(ids), np.int64))


class ActiveRequest:
    """A request that waits or runs. Only its constructor is called by other threads.

    tokens: the prompt and what follows it; the first `num_done` are in the KV cache. A running
    request whose prompt is done has one token left: the last one chosen. One that wants an
    embedding ends with its prompt.
    """

    def __init__(self, generator: Generator, request: GenerateRequest, stream: Stream) -> None:
        """The request's prompt is its `prompt_ids`, from `Prompts.ids`.

        Errors:  UsageError for an invalid grammar, or an embedding that the model cannot make
        """
        self.tokens = list(request.prompt_ids or [])
        self.num_done = 0
        self.num_cached_tokens = 0  # of the prompt, in pages that others had filled
        self.cache_salt = request.cache_salt
        self.is_scored = request.num_prompt_logprobs is not None
        self.slot = -1
        self.suspect: NotFiniteError | None = None  # why it is computed again, alone
        self.num_nans = 0  # that came to it at one place
        self.stream = stream
        self.times = StepTimes()  # of the steps that followed the prompt
        self.drafts = DraftCounts()
        self.draft_source = ""  # of the next draft: "ngram", or `Drafter.source`
        self._generator = generator
        self._sampling = request.sampling
        self.num_prompt_tokens = len(self.tokens)
        self._uses_cache = request.use_cache
        self._is_recomputed = False
        self._keys: tuple[bytes, list[bytes]] | None = None
        self._mean: StateMean | None = None
        if request.wants_embedding:
            self._mean = StateMean(generator.config, generator.engine.embedding)
        self.chunk_sizes = self._chunk_sizes()
        sampling = request.sampling
        breakers: Breakers | None = None
        if sampling.dry_multiplier > 0 and sampling.dry_penalty_last_n != 0:
            breakers = generator.breakers(tuple(sampling.dry_sequence_breakers))
        self._sampler = TokenSampler(sampling, self.tokens, breakers, generator.never)
        # Reads the prompt here rather than in the engine's thread.
        self._sampler.processed(np.zeros(generator.config.vocab_size, np.float32), self.tokens)
        self._stop = StopStrings(sampling.stop, sampling.include_stop_str_in_output)
        tokenizer = generator.prompts.tokenizer
        self._decoder = tokenizer.stream_decoder(self.tokens) if tokenizer else None
        free = generator.context_length - len(self.tokens)
        self._max_tokens = 0 if self.embeds else min(sampling.max_tokens or free, free)
        eos_ids = frozenset() if sampling.ignore_eos else generator.eos_ids
        self._model_ends = _Ends.of(eos_ids)
        self._all_ends = _Ends.of(eos_ids.union(sampling.stop_token_ids))
        is_included = sampling.include_stop_str_in_output
        self._shown_ids = frozenset(sampling.stop_token_ids if is_included else ())
        self._num_emitted = 0  # new tokens in events so far
        self._constraint: Constraint | None = None
        self._begin_thoughts(request)
        self._is_resumable = request.is_resumable
        state = request.state
        self._logprobs = AnswerLogprobs(request.num_logprobs, state.logprobs if state else ())
        told = request.num_prompt_logprobs if state is None else None
        self._prompt_logprobs = PromptLogprobs(self.tokens, told)
        # When it was submitted, was admitted, had its first token; seconds.
        self._moments = [time.monotonic()]
        if state is not None:
            self._go_on(request.given, state)

    def _begin_thoughts(self, request: GenerateRequest) -> None:
        """What the answer begins with, and what it is held to then. Errors: UsageError."""
        tokenizer = self._generator.prompts.tokenizer
        thoughts = Thoughts.of(tokenizer, self.tokens) if request.may_think else None
        syntax: CallSyntax | None = None
        may_call: Callable[[str], bool] = bool
        if request.grammar is not None:
            self._constraint = self._generator.grammars.constraint(request.grammar, thoughts)
            if tokenizer and request.grammar.kind == "calls":
                syntax, may_call = tokenizer.call_syntax, self._constraint.takes_after_thoughts
        self._reader = reader_of(thoughts, syntax, may_call)
        self._calls = None if syntax is None else CallSplitter(syntax)
        budget = self._sampling.thinking_token_budget
        self._thoughts_left: float = budget if budget >= 0 else math.inf  # tokens
        self._num_thought = 0  # tokens, marks included
        self._end_marks: list[list[int]] = []
        if thoughts is not None and tokenizer is not None:
            self._end_marks = [tokenizer.encode(one, False) for one in thoughts.way.ends]
        self._forced: list[int] = []  # what is still to be written of one
        self._was_forced = False
        self._parts: list[tuple[str, int]] = []  # of the next event
        is_in_channels = thoughts is not None and thoughts.way.are_channels
        self._readable = ReadableText() if is_in_channels else None
        self._shown_now, self._all_shown = "", list[str]()

    def _go_on(self, given: Sequence[int], state: DrawState) -> None:
        """Be as after the tokens `given`, which another system chose and handed out."""
        for token_id in given:
            self.tokens.append(token_id)
            self._take(token_id)
        self._num_emitted = len(given)
        self._all_shown, self._parts, self._shown_now = [self._readable_text], [], ""
        self._sampler.go_on(state.random, state.mu)
        self._forced, self._was_forced = list(state.forced), state.was_forced
        self.recompute()

    def num_positions(self, ahead: int) -> int:
        """Positions of the KV cache for its tokens and the next `ahead`, if it may have so many."""
        return min(len(self.tokens) + ahead, self.num_prompt_tokens + self._max_tokens)

    def chunk_ends(self, count: int) -> list[int]:
        """Positions at which others, and its own tokens, may go on after its next chunks.

        The ends of these, and of the prompt the ends of its last two whole pages.
        """
        ends = list(accumulate(self.chunk_sizes[:count], initial=self.num_done))
        if count >= len(self.chunk_sizes):
            last = self.num_prompt_tokens // PAGE_POSITIONS * PAGE_POSITIONS
            own = range(ends[0] + 1, ends[-1] + 1)
            ends += [end for end in (last - PAGE_POSITIONS, last) if end in own]
        return ends[1:]

    def page_keys(self, namespace: bytes) -> list[bytes]:
        """The keys of its prompt's whole pages (`actors.kv_cache.pool`)."""
        if self._keys is None or self._keys[0] != namespace:
            self._keys = namespace, page_keys(namespace, self.tokens[: self.num_prompt_tokens])
        return self._keys[1]

    @property
    def may_share(self) -> bool:
        """Whether it may have the prompts of others, and they its own.

        One that is scored or embedded goes through kernels, whose bits differ from matmul's. One
        that came to a NaN may have had it from others.
        """
        is_plain = not (self.is_scored or self.embeds)
        return self._uses_cache and is_plain and self.suspect is None

    @property
    def num_left(self) -> int:
        """Tokens that are not in the KV cache yet."""
        return len(self.tokens) - self.num_done

    @property
    def embeds(self) -> bool:
        """Whether it wants an embedding, and no new tokens."""
        return self._mean is not None

    @property
    def has_answered(self) -> bool:
        """Whether its first new token was chosen."""
        return len(self.tokens) > self.num_prompt_tokens

    @property
    def is_cancelled(self) -> bool:
        """Whether its reader has cancelled it."""
        return self.stream.cancelled.is_set()

    def start(self, slot: int) -> None:
        """Admit it as the sequence `slot`, for the first time or after `recompute`."""
        self.slot = slot
        if len(self._moments) == 1:
            self._moments.append(time.monotonic())

    def recompute(self) -> None:
        """Begin again after its KV cache was lost: its tokens are run again, in the same ways.

        None is chosen again, so neither the tokens nor the random numbers change.
        """
        self._is_recomputed = True
        self.num_done = 0
        self.chunk_sizes = self._chunk_sizes()

    def skip_to(self, num_done: int) -> None:
        """Go on after `num_done` tokens, which are in its pages of the KV cache already."""
        if not self._is_recomputed:
            self.num_cached_tokens += num_done - self.num_done
        self.num_done = num_done
        self.chunk_sizes = self._chunk_sizes()

    def _chunk_sizes(self) -> list[int]:
        """The chunks for matmul that are left of the prompt.

        One that is scored or embedded goes through kernels.
        """
        if self.is_scored or self.embeds:
            return []
        engine = self._generator.engine
        return chunk_sizes(
            self.num_prompt_tokens, engine.max_tokens, engine.cut_tokens, self.num_done
        )

    @property
    def most_drafted(self) -> int:
        """Tokens of a draft that can be of use now: with one of its own after them, at most."""
        if not self.has_answered or self.num_left != 1:
            return 0
        return self._max_tokens - self._num_new - 1

    def useful(self, draft: list[int]) -> list[int]:
        """The beginning of a draft that may follow, by the end tokens and the grammar."""
        ends = [at + 1 for at, token_id in enumerate(draft) if token_id in self._ends.ids]
        draft = draft[: ends[0]] if ends else draft
        if self._constraint is None or self._reader.is_thinking:
            return draft
        return self._constraint.beginning(draft)

    def verify(self, rows: Sequence[np.ndarray], draft: Sequence[int]) -> bool:
        """Choose tokens as long as they are the draft's; True where one was the answer's last.

        Those that the draft has too are in the KV cache then.
        Shapes:  rows, len(draft) + 1 of them: logits (V,); without any the request embeds
        Errors:  those of `accept`
        """
        self.drafts.add(len(draft), self.draft_source)
        for place, logits in enumerate(rows or [_NO_LOGITS]):
            if self.accept(logits, draft, place):
                return True
            if self.num_left:
                break
        return False

    def accept(self, logits: np.ndarray, draft: Sequence[int] = (), place: int = 0) -> bool:
        """Choose the next token and emit what can be shown; True where it was the last one.

        Where it is draft[place], it is in the KV cache already.
        A request that embeds chooses none, and reads no logits.
        Errors:  ValueError where the logits hold a NaN; UsageError where a grammar allows no token
        """
        if self.embeds:
            return self.end("stop")
        self._prompt_logprobs.check()
        token_id = self._chosen(logits)
        if len(self._moments) < 3:
            self._moments.append(time.monotonic())
        self.tokens.append(token_id)
        if place < len(draft) and token_id == draft[place]:
            self.drafts.accept(place, self.draft_source)
            self.num_done += 1
        self._logprobs.add(logits, token_id, self._decoder)
        text, is_last = self._take(token_id)
        if is_last:
            return self.end("stop", text)
        if self._num_new >= self._max_tokens:
            return self.end("length", text)
        if text or self._decoder is None:
            self._emit(text)
        return False

    def _take(self, token_id: int) -> tuple[str, bool]:
        """Read the last token: its text that can be shown, and whether it ends the answer."""
        was_thinking = self._reader.is_thinking
        is_end = token_id in self._ends.ids
        text = ""
        if self._decoder and (token_id in self._shown_ids or not is_end):
            may_stop = self._num_new > self._sampling.min_tokens
            text = self._shown(self._decoder.push(token_id), may_stop)
        is_thought = was_thinking or self._reader.is_thinking
        if is_thought:
            self._num_thought = self._num_new
            self._thoughts_left -= was_thinking
        held = self._constraint
        is_read = held is not None and (held.reads_thoughts or not is_thought)
        ended = is_read and held is not None and held.accept(token_id)
        return text, is_end or self._stop.found or ended

    def _chosen(self, logits: np.ndarray) -> int:
        """The next token: drawn, or of the mark that ends thoughts by force."""
        if self._reader.is_thinking and self._thoughts_left <= 0:
            self._end_thoughts()
        if self._forced:
            return self._forced.pop(0)
        processed = self._processed(logits)
        token_id = self._sampler.draw(processed)
        if not self._reader.is_thinking:
            return token_id
        while self._breaks_grammar(token_id):
            processed = processed.copy()
            processed[token_id] = -np.inf
            token_id = self._sampler.draw(processed)
        if token_id in self._ends.ids:
            self._end_thoughts()
        return self._forced.pop(0) if self._forced else token_id

    def _end_thoughts(self) -> None:
        if not self._forced:
            marks, held = self._end_marks, self._constraint
            if held is not None and held.reads_thoughts:
                marks = [mark for mark in marks if held.beginning(mark) == mark]
            self._forced, self._was_forced = list(next(iter(marks), [])), True

    def _breaks_grammar(self, token_id: int) -> bool:
        """Whether the grammar does not take a token that is drawn while the model thinks.

        It reads thoughts, too, or the token ends them with text that no answer begins with.
        """
        if self._constraint is None or self._decoder is None or token_id in self._ends.ids:
            return False
        if self._constraint.reads_thoughts:
            return not self._constraint.beginning([token_id])
        said = said_after(self._reader, self._decoder.peek(token_id))
        return bool(said) and not self._constraint.takes_after_thoughts(said)

    def _shown(
        self, text: str, may_stop: bool = True, is_last: bool = False, is_cut: bool = False
    ) -> str:
        """Take more text; returns what of it, and of what was held back, can be shown."""
        was_thinking = self._reader.is_thinking
        spans = self._reader.push(text, is_last, is_cut)
        held = self._constraint
        if was_thinking and not self._reader.is_thinking and held and not held.reads_thoughts:
            held.resume(said(spans))
        shown = ""
        for span in spans:
            if span.kind is SpanKind.TEXT:
                shown += self._said(span.text, may_stop)
                continue
            if self._calls is not None:
                shown += self._stopped(self._calls.end_text(), may_stop)
            shown += self._told(SAID, self._stop.push("", may_stop=False))
            if not self._stop.found:
                told = self._stop.push(span.text, may_stop=False)
                shown += self._told(THOUGHT if span.kind is SpanKind.THOUGHT else MARK, told)
        if is_last:
            shown += self._said("", may_stop, is_last, is_cut)
        return shown

    def _said(self, text: str, may_stop: bool, is_last: bool = False, is_cut: bool = False) -> str:
        """More of the answer itself."""
        if self._calls is None:
            return self._told(SAID, self._stop.push(text, may_stop))
        return self._stopped(self._calls.push(text, is_last, is_cut), may_stop)

    def _stopped(self, spans: Sequence[Span], may_stop: bool) -> str:
        """These spans of it up to a stop text, which ends text alone."""
        shown = ""
        for span in spans:
            is_text = span.kind is SpanKind.TEXT
            shown += self._told(SAID, self._stop.push(span.text, may_stop and is_text))
        return shown

    def _told(self, kind: str, text: str) -> str:
        """The text, which the next event has as a part of this kind."""
        if text:
            self._parts.append((kind, len(text)))
            if self._readable is not None:
                self._shown_now += self._readable.push(_SPANS[kind], text)
        return text

    def _processed(self, logits: np.ndarray) -> np.ndarray:
        """The logits that the next token is drawn from."""
        processed = self._sampler.processed(logits, self.tokens)
        if self._constraint is not None and not self._reader.is_thinking:
            processed = self._constraint.masked(processed)
        has_said = self._reader.has_answered or not self._was_forced
        is_too_short = self._num_new < self._sampling.min_tokens or not has_said
        if is_too_short and self._ends.ids:
            without_end = processed.copy()
            without_end[self._ends.places] = -np.inf
            if np.isfinite(without_end).any():  # a grammar may have come to its end
                return without_end
        return processed

    @property
    def _readable_text(self) -> str:
        return "".join([*self._all_shown, self._shown_now])

    @property
    def _ends(self) -> _Ends:
        is_calling = self._calls is not None and self._calls.is_calling
        return self._model_ends if self._reader.is_thinking or is_calling else self._all_ends

    @property
    def _num_new(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    def wants_logits(self, place: int) -> bool:
        """Whether the token after the one at `place` will be chosen or scored."""
        if self.embeds:
            return False
        return place >= len(self.tokens) - 1 or self._prompt_logprobs.wants(place)

    def score(self, place: int, logits: np.ndarray) -> None:
        """Add the logits (V,) after the prompt's token at `place`."""
        self._prompt_logprobs.add(place, logits)

    def embed(self, place: int, hidden: np.ndarray) -> None:
        """Add the hidden state (d,) of the token at `place` after the last layer; it `embeds`."""
        assert self._mean is not None
        self._mean.add(place, hidden)

    def end(self, finish_reason: str, text: str = "") -> bool:
        """Emit the result, after `text` and what was held back until now; True."""
        tail = self._decoder.finish() if self._decoder else ""
        is_cut = finish_reason == "length"
        text += self._shown(tail, is_last=True, is_cut=is_cut)
        text += self._told(SAID, self._stop.flush())
        self._emit(text, self._result(finish_reason))
        return True

    def _emit(self, text: str, result: Generation | None = None) -> None:
        num_new = self._num_new
        num_shown = None if result is not None and not self._stop.found else self._stop.num_shown
        is_said = all(kind == SAID for kind, _ in self._parts)
        self.stream.put(
            TokenEvent(
                text,
                result,
                num_new - self._num_emitted,
                self._logprobs.take(num_shown),
                self._prompt_logprobs.take(),
                tuple(self.tokens[self.num_prompt_tokens + self._num_emitted :]),
                self.num_prompt_tokens,
                () if is_said else tuple(self._parts),
                None if self._readable is None else self._shown_now,
                self._state if self._is_resumable and result is None else None,
            )
        )
        self._num_emitted = num_new
        self._all_shown.append(self._shown_now)
        self._parts, self._shown_now = [], ""

    @property
    def _state(self) -> DrawState:
        forced, held = tuple(self._forced), self._logprobs.held
        return DrawState(*self._sampler.state, forced, self._was_forced, held)

    def postpone(self) -> None:
        """Count as waiting, not as prefill, what has passed: kernels of prompts were missing."""
        if len(self._moments) == 2:
            self._moments[-1] = time.monotonic()

    def fail(self, error: BaseException) -> None:
        """Emit an error instead of a result."""
        self.stream.put(error)

    def _result(self, finish_reason: str) -> Generation:
        now, config = time.monotonic(), self._generator.config
        submitted, admitted, first_token = (*self._moments, now, now)[:3]
        total = config.num_neurons * max(self.times.num_steps, 1)
        num_later = max(self._num_new - 1, 1)  # tokens that the steps of `times` gave
        if self._num_new > 1:
            self._generator.last_answer = StepRecord(
                now, num_later, self.times, self.drafts.by_source, took_s=now - first_token
            )
        return Generation(
            text=self._stop.text if self._readable is None else self._readable_text,
            ids=self.tokens[self.num_prompt_tokens :],
            finish_reason=finish_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            prefill_s=first_token - admitted,
            decode_s=now - first_token,
            queued_s=admitted - submitted,
            per_token_ms=self.times.ms_by_parts(num_later),
            step_tokens=self.times.num_tokens / max(self.times.num_steps, 1),
            neurons_computed=self.times.num_neurons / total,
            gates_computed=self.times.num_gates / total,
            ups_computed=self.times.num_ups / total,
            reads=self.times.per_step_reads(),
            embedding=self._mean.mean() if self._mean and self.num_left == 0 else None,
            drafts=self.drafts,
            num_thought_tokens=self._num_thought,
        )
