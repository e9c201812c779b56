"""One request, from prompt to last token, on an engine."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from actors.engine import Engine
from actors.messages import GenerateRequest, Generation, TokenEvent
from actors.stop_strings import StopStrings
from model.config import ModelConfig
from model.errors import PromptError
from model.sampling import SamplingParams, eos_ids
from model.tokenizer import Tokenizer
from numba_kernels.sampling import sample


class Generator:
    """Turns requests into tokens, one request at a time."""

    def __init__(self, path: Path, config: ModelConfig, engine: Engine, context_length: int) -> None:
        """Tokenizer, chat template and eos ids come from the model's directory `path`."""
        self.config = config
        self.engine = engine
        self.context_length = context_length
        self.tokenizer = Tokenizer.from_directory(path)
        self.eos_ids = frozenset(eos_ids(path, config))

    def prompt_ids(self, request: GenerateRequest) -> list[int]:
        """The request's token ids, checked. Errors: PromptError."""
        ids = self._encode(request)
        if not ids:
            raise PromptError("the prompt is empty; give at least one token")
        for token_id in ids:
            if not 0 <= token_id < self.config.vocab_size:
                raise PromptError(
                    f"token id {token_id} is not in the vocabulary 0..{self.config.vocab_size - 1}"
                )
        if len(ids) >= self.context_length:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, the context holds {self.context_length} with "
                "the answer; shorten the prompt or give a larger --context"
            )
        return ids

    def _encode(self, request: GenerateRequest) -> list[int]:
        if request.prompt_ids is not None:
            return list(request.prompt_ids)
        if self.tokenizer is None:
            raise PromptError("this model has no tokenizer.json; give token ids (--prompt-ids)")
        if request.messages is not None:
            return self.tokenizer.encode_chat(request.messages)
        return self.tokenizer.encode(request.prompt or "")

    def run(
        self, request: GenerateRequest, cancelled: Callable[[], bool] = lambda: False
    ) -> Iterator[TokenEvent]:
        """Events of new text; the last one carries the result. Errors: PromptError, ServiceError."""
        ids = self.prompt_ids(request)
        self.engine.times.reset()
        started = time.monotonic()
        logits = self._prefill(ids)
        first_token = time.monotonic()
        self.engine.times.reset()
        run = _Run(self, request.sampling, ids)
        while True:
            text = run.accept(logits)
            if run.finish_reason or cancelled():
                break
            if text:
                yield TokenEvent(text)
            logits = self.engine.step([run.ids[-1]], [run.position], [0])[0]
            run.position += 1
        run.finish_reason = run.finish_reason or "cancelled"
        ended = time.monotonic()
        yield TokenEvent(text + run.flush(), run.result(first_token - started, ended - first_token))

    def _prefill(self, ids: list[int]) -> np.ndarray:
        size = self.engine.max_tokens
        for first in range(0, len(ids), size):
            chunk = ids[first : first + size]
            positions = list(range(first, first + len(chunk)))
            is_last = first + len(chunk) == len(ids)
            logits = self.engine.step(chunk, positions, [0] * len(chunk), int(is_last))
        return logits[0]


class _Run:
    """What a running request has produced."""

    def __init__(
        self, generator: Generator, sampling: SamplingParams, prompt_ids: list[int]
    ) -> None:
        self.ids: list[int] = []
        self.finish_reason = ""
        self.position = len(prompt_ids)
        self._generator = generator
        self._sampling = sampling
        self._num_prompt_tokens = len(prompt_ids)
        self._random = np.random.default_rng(sampling.seed)
        self._stop = StopStrings(sampling.stop)
        tokenizer = generator.tokenizer
        self._decoder = tokenizer.stream_decoder(prompt_ids) if tokenizer else None
        room = generator.context_length - len(prompt_ids)
        self._max_tokens = min(sampling.max_tokens, room)
        self._eos_ids = frozenset() if sampling.ignore_eos else generator.eos_ids

    def accept(self, logits: np.ndarray) -> str:
        """Choose the next token; returns the text that can be shown now."""
        params = self._sampling
        token_id = sample(
            logits,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            uniform=float(self._random.random()),
        )
        self.ids.append(token_id)
        if token_id in self._eos_ids:
            self.finish_reason = "stop"
            return ""
        text = self._stop.push(self._decoder.push(token_id)) if self._decoder else ""
        if self._stop.found:
            self.finish_reason = "stop"
        elif len(self.ids) >= self._max_tokens:
            self.finish_reason = "length"
        return text

    def flush(self) -> str:
        """Text held back until now."""
        tail = self._decoder.finish() if self._decoder else ""
        return self._stop.push(tail) + self._stop.flush()

    def result(self, prefill_s: float, decode_s: float) -> Generation:
        """The finished request."""
        engine, config = self._generator.engine, self._generator.config
        num_steps = max(engine.times.num_tokens, 1)
        total = config.num_layers * config.ffn_size * num_steps
        return Generation(
            text=self._stop.text,
            ids=self.ids,
            finish_reason=self.finish_reason,
            num_prompt_tokens=self._num_prompt_tokens,
            prefill_s=prefill_s,
            decode_s=decode_s,
            per_token_ms=engine.times.per_token_ms(),
            neurons_computed=engine.times.num_neurons / total,
        )
