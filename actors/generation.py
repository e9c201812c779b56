"""One request, from prompt to last token, on an engine."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from actors.engine import Engine
from actors.messages import GenerateRequest, Generation, TokenEvent
from actors.prompts import Prompts
from actors.steps import step_sizes
from actors.stop_strings import StopStrings
from model.config import ModelConfig
from model.sampling import SamplingParams, eos_ids
from numba_kernels.sampling import sample


class Generator:
    """Turns requests into tokens, one request at a time."""

    def __init__(
        self, path: Path, config: ModelConfig, engine: Engine, context_length: int
    ) -> None:
        """Tokenizer, chat template and eos ids come from the model's directory `path`."""
        self.config = config
        self.engine = engine
        self.context_length = context_length
        self.prompts = Prompts(path, config, context_length)
        self.eos_ids = frozenset(eos_ids(path, config))

    def warm_up(self) -> None:
        """Run one token, so that no request waits for a kernel to be compiled or read from disk."""
        logits = self.engine.step([0], [0], [0])[0]
        for top_k in (0, 1, 2):
            sample(np.nan_to_num(logits), temperature=1.0, top_k=top_k, top_p=0.9, uniform=0.5)

    def run(
        self, request: GenerateRequest, is_cancelled: Callable[[], bool] = lambda: False
    ) -> Iterator[TokenEvent]:
        """Events of new text; the last one carries the result.

        The request's `prompt_ids` are what `Prompts.ids` returned, and nothing else is read of its
        prompt. It ends within a token once `is_cancelled()`.
        Errors:  RequestError, ServiceError; ValueError where the logits hold a NaN
        """
        ids = request.prompt_ids or []
        self.engine.times.reset()
        started = time.monotonic()
        logits = self._prefill(ids, is_cancelled)
        first_token = time.monotonic()
        self.engine.times.reset()
        run, text = _Run(self, request.sampling, ids), ""
        while logits is not None:
            text = run.accept(logits)
            if run.finish_reason or is_cancelled():
                break
            if text:
                yield TokenEvent(text)
            logits = self.engine.step([run.ids[-1]], [run.position], [0])[0]
            run.position += 1
        run.finish_reason = run.finish_reason or "cancelled"
        ended = time.monotonic()
        yield TokenEvent(text + run.flush(), run.result(first_token - started, ended - first_token))

    def _prefill(self, ids: list[int], is_cancelled: Callable[[], bool]) -> np.ndarray | None:
        """Logits after the prompt; None if it was cancelled between two steps."""
        first = 0
        for size in step_sizes(len(ids), self.engine.max_tokens):
            if is_cancelled():
                return None
            last = first + size
            positions = list(range(first, last))
            logits = self.engine.step(
                ids[first:last], positions, [0] * size, num_logits=int(last == len(ids))
            )
            first = last
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
        tokenizer = generator.prompts.tokenizer
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
            gates_computed=engine.times.num_gates / total,
        )
