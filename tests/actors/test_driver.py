"""The driver, one request at a time: its line, cancelling, closing, and a broken service."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from hotcold.actors.driver.driver import Driver
from hotcold.actors.protocol.failures import RequestError
from hotcold.actors.protocol.messages import GenerateRequest, SystemConfig, TokenEvent
from hotcold.model.errors import PromptError, ServiceError
from hotcold.model.sampling import SamplingParams
from tests.actors.in_process import InProcessSystem, PythonExchange
from tests.conftest import GREEDY_TOKENS, TinyCheckpoint

LONG = 50_000


@pytest.fixture
def system(tiny: Callable[..., TinyCheckpoint]) -> Iterator[InProcessSystem]:
    path = tiny("llama-relu").path
    with InProcessSystem(path, num_positions=LONG) as running:
        yield running


@pytest.fixture
def driver(system: InProcessSystem) -> Driver:
    config = SystemConfig(str(system.path), context_length=LONG, kv_dtype="float32")
    return Driver(config, system.exchange, system.topology)


@pytest.fixture
def request_(tiny: Callable[..., TinyCheckpoint]) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=GREEDY_TOKENS, temperature=0.0, ignore_eos=True)
    ids = tiny("llama-relu").ids[:10].tolist()
    return GenerateRequest(sampling, prompt_ids=ids, request_id="short")


def endless(request: GenerateRequest) -> GenerateRequest:
    sampling = replace(request.sampling, max_tokens=LONG)
    return replace(request, sampling=sampling, request_id="endless")


class Running:
    """A request in a thread of its own."""

    def __init__(self, driver: Driver, request: GenerateRequest) -> None:
        self.outcome: TokenEvent | BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(driver, request), daemon=True)
        self._thread.start()

    def _run(self, driver: Driver, request: GenerateRequest) -> None:
        try:
            *_, self.outcome = driver.generate(request)
        except BaseException as error:
            self.outcome = error

    def end(self) -> TokenEvent | BaseException | None:
        self._thread.join(100)
        assert not self._thread.is_alive()
        return self.outcome


def start_endless(driver: Driver, request: GenerateRequest) -> Running:
    """Start a request without end; returns once some of its tokens are decoded."""
    before, pause = driver.engine.num_steps, threading.Event()
    run = Running(driver, endless(request))
    while driver.engine.num_steps < before + 20:
        assert run.outcome is None
        pause.wait(0.01)
    return run


def await_waiting(driver: Driver, number: int = 1) -> None:
    """Return once so many stand in the queue."""
    while driver._scheduler.num_waiting < number:
        pass


def reason(outcome: object) -> str:
    assert isinstance(outcome, TokenEvent) and outcome.result is not None, outcome
    return outcome.result.finish_reason


def test_close_does_not_wait_for_a_long_request(driver: Driver, request_: GenerateRequest) -> None:
    long = start_endless(driver, request_)
    waiting = Running(driver, request_)
    await_waiting(driver)
    driver.close()
    outcome = long.end()
    assert reason(outcome) == "cancelled"
    assert len(outcome.result.ids) < LONG - 10  # type: ignore[union-attr]
    stopped = waiting.end()
    assert isinstance(stopped, ServiceError) and "stopped" in str(stopped)


def test_what_goes_wrong_in_the_driver_ends_only_its_request(
    driver: Driver, request_: GenerateRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ValueError("the logits hold a NaN\nand more")

    monkeypatch.setattr("hotcold.actors.driver.sampler.sample", fail)
    error = Running(driver, request_).end()
    assert type(error) is RequestError
    assert str(error) == "the request failed: ValueError: the logits hold a NaN"
    monkeypatch.undo()
    assert reason(Running(driver, request_).end()) == "length"
    driver.close()


def test_cancelled_before_it_comes_and_while_it_waits(
    driver: Driver, request_: GenerateRequest
) -> None:
    driver.cancel("short")  # the two calls of a client may overtake each other
    assert reason(Running(driver, request_).end()) == "cancelled"
    assert reason(Running(driver, request_).end()) == "length"
    with pytest.raises(PromptError):
        next(driver.generate(replace(request_, prompt_ids=[])))
    long, waiting = start_endless(driver, request_), Running(driver, request_)
    await_waiting(driver)
    driver.cancel("short")
    driver.cancel("endless")
    assert reason(long.end()) == reason(waiting.end()) == "cancelled"
    assert waiting.outcome.result.ids == []  # type: ignore[union-attr]
    driver.close()
    assert not driver._streams


def test_a_broken_service_ends_the_request_and_all_later_ones(
    system: InProcessSystem, driver: Driver, request_: GenerateRequest
) -> None:
    long = start_endless(driver, request_)
    gpu = system.services[0]
    gpu.last_error = "RuntimeError: lost"

    class FailingExchange(PythonExchange):
        def request(self, services: Sequence[int]) -> int:
            raise ServiceError(gpu.explain(0))

        await_replies = request  # of a step that has begun with the other exchange

    driver.engine.exchange = FailingExchange(system.exchange)
    gpu._broken = True
    for run in (long, Running(driver, request_)):
        error = run.end()
        assert isinstance(error, ServiceError)
        assert str(error) == "the gpu service failed: RuntimeError: lost"
    driver.close()


@pytest.mark.parametrize("place", ["admit", "_end_cancelled"])
def test_whatever_fails_in_the_engines_thread_is_told(
    driver: Driver, request_: GenerateRequest, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs, waits, comes later, or checks whether the driver lives."""

    def fail(*arguments: object) -> None:
        raise RuntimeError("no such slot\nand more")

    driver.require_alive()
    long = start_endless(driver, request_)
    monkeypatch.setattr(driver._scheduler, place, fail)
    expected = "the driver failed: RuntimeError: no such slot; start again"
    for run in (long, Running(driver, request_)):
        error = run.end()
        assert isinstance(error, ServiceError) and str(error) == expected
    driver._scheduler._thread.join(100)
    for call in (driver.require_alive, driver.load, lambda: driver.between_requests(lambda: 1)):
        with pytest.raises(ServiceError, match="no such slot; start again"):
            call()
    driver.close()
    driver.require_alive()  # it is closed in good order
    assert not driver._streams
