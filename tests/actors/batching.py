"""Requests for one driver, from several threads, and a system that takes many at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.actors.driver.driver import Driver
from hotcold.actors.driver.modes import StepMode, step_mode
from hotcold.actors.kv_cache.page_store import PageStore
from hotcold.actors.kv_cache.prefix_file import PrefixFile
from hotcold.actors.protocol.failures import CacheLost
from hotcold.actors.protocol.messages import (
    PREDICTED_MODES,
    THRESHOLD,
    GenerateRequest,
    Generation,
    SystemConfig,
    TokenLogprob,
)
from hotcold.model.sampling import SamplingParams
from hotcold.numba_kernels.decode.activations import Thresholds
from hotcold.numba_kernels.loops.mailbox import RECURRENT
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.predictor import NeuronPredictor
from hotcold.predictors.sign import SignLayer
from tests.actors.in_process import InProcessSystem
from tests.actors.kept_system import wait_until
from tests.conftest import TinyCheckpoint
from tests.predictor_layers import random_sign
from tests.tiny_checkpoint import GREEDY_TOKENS
from tests.tiny_models import VOCAB_SIZE

CONTEXT = 384
WAIT_S = 600


@contextmanager
def batching(
    checkpoint: TinyCheckpoint, mode: str = "exact", context: int = CONTEXT, **options: Any
) -> Iterator[tuple[InProcessSystem, Driver]]:
    """A driver of up to 8 requests at once on two services of two threads.

    With `shares` prompts begin with what earlier ones have computed, also in files below `folder`;
    else each is computed anew. `kind` is the system's class.
    """
    settings: dict[str, Any] = {"num_slots": 8, "kv_positions": 8 * context} | options
    shares, folder = settings.pop("shares", False), settings.pop("folder", None)
    kind = settings.pop("kind", InProcessSystem)
    settings["has_down_norms"] = mode == THRESHOLD
    with ExitStack() as stack:
        made = kind(checkpoint.path, 2, 2, num_positions=context, **settings)
        system = stack.enter_context(made)
        store = stack.enter_context(pages_in(folder, system)) if folder else None
        config = SystemConfig(
            str(checkpoint.path),
            "exact" if mode in PREDICTED_MODES else "dense" if mode == THRESHOLD else mode,
            context_length=context,
            kv_positions=system.kv_positions,
            prefix_cache_bytes=None if shares else 0,
            max_batch=system.num_slots,
            prefill_chunk=system.max_tokens,
            draft=system.draft,
        )
        driver = Driver(config, system.exchange, system.topology, page_store=store)
        driver.engine.mode = mode_of(system, mode)
        try:
            yield system, driver
        finally:
            driver.close()


@contextmanager
def pages_in(folder: Path, system: InProcessSystem) -> Iterator[PageStore]:
    """What keeps the pages of a system's KV cache in files."""
    service: Any = system.services[0]
    groups = system.config.page_groups
    arrays = [(groups.index(group), array) for group, array in service.cache_pages]
    states = groups.index(RECURRENT) if RECURRENT in groups else -1
    kept = PrefixFile(folder, arrays, 10 << 20, "", states=states)

    def call(method: str, *arguments: Any) -> list[Any]:
        return [getattr(kept, method.removesuffix("_pages"))(*arguments)]

    def renew(causes: Mapping[int, str]) -> None:
        raise CacheLost(next(iter(causes.values())))

    store = PageStore(call, renew)
    try:
        yield store
    finally:
        store.close()
        kept.close()


def mode_of(system: InProcessSystem, mode: str) -> StepMode:
    """The mode of that name, with some thresholds or predictor."""
    if mode == THRESHOLD:
        return StepMode(mode, some_thresholds(system))
    predictor = random_predictor(system, mode) if mode in PREDICTED_MODES else None
    return step_mode(system.config, mode, predictor)


def random_predictor(system: InProcessSystem, kind: str) -> NeuronPredictor:
    """Chooses about half of the neurons, others for every token."""
    random, config = np.random.default_rng(8), system.config
    width, size, rank = config.hidden_size, config.ffn_size, 22

    def lowrank() -> LowRankLayer:
        down = random.standard_normal((rank, width)).astype(np.float16).view(np.uint16)
        up = random.standard_normal((rank, size)).astype(np.float16).view(np.uint16)
        return LowRankLayer(down, np.ones(rank, np.float32), up, np.zeros(size, np.float32))

    shards = system.layer_shards()
    sizes = np.array([[ids[at].size for ids in shards] for at in range(config.num_layers)])
    layers: list[SignLayer | LowRankLayer | None] = [
        lowrank() if kind == "lowrank" else random_sign(random, config)
        for _ in range(config.num_layers)
    ]
    return NeuronPredictor(layers, sizes, "ffn_input")


def some_thresholds(system: InProcessSystem) -> list[Thresholds]:
    """Such that each stage leaves out some neurons of these models, others for every token."""
    return [Thresholds(np.float32(0.12), np.float32(0.3))] * system.config.num_layers


def random_request(seed: int, longest: int = 300, most_tokens: int = 24) -> GenerateRequest:
    """A prompt of 1 to `longest` tokens; greedy, or drawn with a seed."""
    random = np.random.default_rng(seed)
    lengths = [1, 2, 9, 31, 32, 33, 64, 65, 97, int(random.integers(1, longest + 1))]
    length = lengths[random.integers(len(lengths))]
    sampling = SamplingParams(
        max_tokens=int(random.integers(1, most_tokens + 1)),
        temperature=float(random.choice([0.0, 1.5])),
        top_k=int(random.choice([0, 20])),
        seed=seed,
        ignore_eos=bool(random.integers(2)),
    )
    ids = random.integers(0, VOCAB_SIZE, min(length, longest)).tolist()
    return GenerateRequest(sampling, prompt_ids=ids, request_id=f"request {seed}")


@dataclass(frozen=True)
class Answer:
    """All that a request hands out; equal to another that says the same, however it was found."""

    ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]
    result: Generation = field(compare=False)

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that were not computed."""
        return self.result.num_cached_tokens


def answer(driver: Driver, request: GenerateRequest) -> Answer:
    """Run a request to its end, and take all its events."""
    whole, *others = driver.generate(request)
    for event in others:
        whole += event
    result = whole.result
    assert result is not None and result.ids == list(whole.token_ids)
    logprobs = list(whole.logprobs), list(whole.prompt_logprobs)
    return Answer(result.ids, result.text, result.finish_reason, *logprobs, result)


def answers(driver: Driver, requests: Sequence[GenerateRequest]) -> list[Answer]:
    """Of all requests at once; in the place of one that fails its error."""
    running = [Background(partial(answer, driver, request)) for request in requests]
    return [one.end() for one in running]


def at_once(driver: Driver, requests: Sequence[GenerateRequest]) -> list[Answer]:
    """Answers to requests that are all there before the first begins."""
    running: list[Background] = []

    def ask() -> None:
        for request in requests:
            num_waiting = driver.load().num_waiting
            running.append(Background(partial(answer, driver, request)))
            wait_until(lambda num=num_waiting: driver.load().num_waiting > num)  # type: ignore[misc]

    driver.between_requests(ask)
    return [one.end() for one in running]


def all_pages_are_free(driver: Driver) -> bool:
    """In nobody's use, each once; some may be kept for whoever asks the same."""
    driver.between_requests(lambda: None)  # when the last one has left
    for group in driver._pool._groups:
        free = [*group._free_pages, *group._unused]
        assert sorted(free) == list(range(group.num_pages)) and not group.held
    return True


def greedy(
    ids: Sequence[int] | np.ndarray,
    max_tokens: int | None = GREEDY_TOKENS,
    request_id: str = "",
    **options: Any,
) -> GenerateRequest:
    """A request for the most likely tokens after `ids`, so many whatever they are."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    prompt = np.asarray(ids, int).tolist()
    return GenerateRequest(sampling, prompt_ids=prompt, request_id=request_id, **options)


def complete(driver: Driver, request: GenerateRequest) -> Generation:
    """Run a request to its end."""
    *_, last = driver.generate(request)
    assert last.result is not None
    return last.result


class Background:
    """Calls a function in a thread of its own."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._outcome: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = self._function()
        except BaseException as error:
            self._outcome = error

    def end(self) -> Any:
        """What came of it: the result, or the error itself."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self._outcome


def start(driver: Driver, request: GenerateRequest) -> Background:
    """Start a request in a thread of its own."""
    return Background(lambda: complete(driver, request))
