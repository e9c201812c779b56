"""Recovery in one process: services that fail at some requests, and the tokens that follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver.driver import Driver
from hotcold.actors.exchange.doorbell_exchange import ArenaExchange, Exchange
from hotcold.actors.exchange.service_process import ServiceProcess
from hotcold.actors.faults.recovery import (
    MAX_FAILURES,
    WINDOW_S,
    RecoveringExchange,
    RecoveryPolicy,
)
from hotcold.actors.faults.replacement import ServiceReplacer, withdraw_request
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.failures import (
    KILLED_FOR_MEMORY,
    AnswerFailed,
    CacheLost,
    NotFiniteError,
    ServiceLost,
)
from hotcold.actors.protocol.messages import (
    THRESHOLD,
    Generation,
    ServicePart,
    ServiceSpec,
    SystemConfig,
)
from hotcold.actors.protocol.topology import Topology
from hotcold.cuda_kernels.device import GPU_FAILED
from hotcold.model.errors import ServiceError
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL
from hotcold.numba_kernels.loops.mailbox import (
    DONE,
    NO_DOORBELLS,
    NUM_REQUEST_WORDS,
    OWN_NUMBER,
    REQUEST,
    TIMEOUT_NS,
    cell,
)
from tests.actors.batching import (
    CONTEXT,
    complete,
    mode_of,
    random_request,
    start,
)
from tests.actors.in_process import InProcessSystem
from tests.tiny_checkpoint import Tiny, TinyCheckpoint

TOPOLOGY = Topology(
    (ServicePart("gpu", attention=range(1), has_head=True), *map(ServicePart, ("cpu0", "cpu1")))
)


class Faulty(Exchange):
    """Every so many requests it loses a service or lets one reply NaN, in turn."""

    def __init__(self, inner: Exchange, rings: bool) -> None:
        self.inner, self.buffers = inner, inner.buffers
        self.request_state = inner.request_state if rings else NO_DOORBELLS
        self.random = np.random.default_rng(5)
        self.every = 0  # requests; never
        self.only_nan = False
        self.num_requests = self.num_faults = 0

    @property
    def next_number(self) -> int:
        return self.inner.next_number

    def request(self, services: Sequence[int]) -> int:
        return self._replied(services, self.inner.request(services))

    def await_replies(self, services: Sequence[int]) -> int:
        return self._replied(services, self.inner.await_replies(services))

    def _replied(self, services: Sequence[int], waited: int) -> int:
        self.num_requests += 1
        if self.every and self.num_requests % self.every == 0:
            service = int(self.random.choice(services))
            self.num_faults += 1
            self._spoil(service)
            if self.num_faults % 2 and not self.only_nan:
                raise ServiceLost(service, f"service {service} died; start again")
        return waited

    def _spoil(self, service: int) -> None:
        """What a service that dies leaves half written, or one that is broken writes."""
        if service:
            self.buffers.partials[service] = np.nan
        else:
            self.buffers.ffn_residual[:], self.buffers.ffn_input[:] = np.nan, np.inf
            self.buffers.logits[:] = np.nan


class Emptying:
    """Stands in for a new process: the GPU service's KV cache is empty then."""

    def __init__(self, system: InProcessSystem) -> None:
        self._system = system
        self.causes: list[str] = []

    def replace(self, causes: Mapping[int, str]) -> None:
        self.causes += causes.values()
        if 0 in causes:
            arrays = self._system.services[0].arrays  # type: ignore[attr-defined]
            arrays.keys.items[:], arrays.values.items[:] = np.nan, np.nan


class Forgiving(RecoveryPolicy):
    """Blames the process each time."""

    def blames(self, service: int) -> bool:
        return True


@contextmanager
def recovering(
    checkpoint: TinyCheckpoint, mode: str, policy: RecoveryPolicy, rings: bool = False
) -> Iterator[tuple[Driver, Faulty, Emptying]]:
    """`rings`: compiled code sends requests, and yields to Python at once where it has to wait."""
    with InProcessSystem(
        checkpoint.path, 2, 2, num_positions=CONTEXT, num_slots=8, kv_positions=8 * CONTEXT,
        has_down_norms=mode == THRESHOLD,
    ) as system:  # fmt: skip
        system.exchange.request_state[TIMEOUT_NS] = 0
        system.watch.max_polls = 10**9
        faulty, emptying = Faulty(system.exchange, rings), Emptying(system)
        exchange = RecoveringExchange(faulty, emptying.replace, system.topology, policy)
        plain = {"sign": "exact", "lowrank": "exact", THRESHOLD: "dense"}.get(mode, mode)
        config = SystemConfig(
            str(checkpoint.path), plain, context_length=CONTEXT, kv_positions=8 * CONTEXT
        )
        driver = Driver(config, exchange, system.topology)
        driver.engine.mode = mode_of(system, mode)
        if driver.engine.mode.predictor is not None:
            driver.engine.mode.predictor.start_helpers(system.exchange.buffers, 0, 2)
        exchange.start()
        try:
            yield driver, faulty, emptying
        finally:
            driver.close()


# Every so many requests that Python sends or waits for. Where compiled code sends them, those are
# whichever had to be waited for.
@pytest.mark.parametrize(
    ("mode", "every", "rings"),
    [("exact", 61, False), (THRESHOLD, 61, False), ("lowrank", 29, True)],
)
def test_tokens_do_not_depend_on_faults(tiny: Tiny, mode: str, every: int, rings: bool) -> None:
    """Greedy and drawn, long prompts and short: services die and answer NaN."""
    requests = [random_request(seed) for seed in range(10)]
    with recovering(tiny("llama-gqa"), mode, Forgiving(), rings) as (driver, faulty, emptying):
        undisturbed = [complete(driver, request).ids for request in requests]
        assert not emptying.causes
        faulty.every = every
        kinds: set[bool] = set()
        while faulty.num_faults <= 3 or len(kinds) < 2:  # how many need a wait is up to the machine
            running = [start(driver, request) for request in requests]
            results = [one.end() for one in running]
            for result, ids in zip(results, undisturbed, strict=True):
                assert isinstance(result, Generation), result
                assert result.ids == ids
            kinds = {"not finite" in cause for cause in emptying.causes}
        causes = [cause for cause in emptying.causes if "not finite" not in cause]
        assert any("died" in cause and "start again" not in cause for cause in causes)


def test_a_window_is_scored_again(tiny: Tiny) -> None:
    checkpoint = tiny("llama-gqa")
    with recovering(checkpoint, "exact", Forgiving()) as (driver, faulty, emptying):
        window = checkpoint.ids.tolist()
        expected = driver.score_window(window, 5, False)
        faulty.every = 37
        for _ in range(5):
            found = driver.score_window(window, 5, False)
            np.testing.assert_array_equal(found.nll, expected.nll)
        assert emptying.causes


def test_a_nan_that_comes_again_ends_the_request(tiny: Tiny) -> None:
    """A service is replaced once; then the weights or the prompt are the cause."""
    with recovering(tiny("llama-gqa"), "exact", RecoveryPolicy()) as (driver, faulty, emptying):
        faulty.every, faulty.only_nan = 1, True
        error = start(driver, random_request(1)).end()
        assert isinstance(error, NotFiniteError), error
        assert "\n" not in str(error) and "--kv-dtype" in str(error)
        assert 1 <= len(emptying.causes) <= 3
        faulty.every = 0
        assert complete(driver, random_request(1)).ids


class Fails(Exchange):
    """Fails as told, then replies."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        requests = np.zeros((3, NUM_REQUEST_WORDS), np.int64)
        self.buffers: Any = type("SharedBuffers", (), {"requests": requests})()

    def request(self, services: Sequence[int]) -> int:
        if self.errors:
            raise self.errors.pop(0)
        return 1


def test_no_reply_passes_for_another_process_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was tried out and then lost, before any request."""
    monkeypatch.setattr("hotcold.actors.exchange.doorbell_exchange.POLL_NS", 1_000_000)
    layout = ArenaLayout(2, 1, 4, 4, 4, 1, 1, 1)
    buffers = layout.buffers(layout.new_arena())
    for kind in (REQUEST, DONE):
        buffers.cells[cell(1, kind) * INTS_A_CELL] = OWN_NUMBER

    class Dead:
        """A service whose threads never serve."""

        def check(self, services: Sequence[int], num_polls: int) -> None:
            raise ServiceLost(1, "nobody serves")

        def explain(self, service: int) -> str:
            raise NotImplementedError

    withdraw_request(buffers, 1)
    with pytest.raises(ServiceLost, match="nobody serves"):
        ArenaExchange(buffers, Dead(), OWN_NUMBER).request([1])


def test_what_is_replaced_and_what_is_told() -> None:
    replaced: list[int] = []

    def exchange(*errors: Exception, has_started: bool = True) -> RecoveringExchange:
        found = RecoveringExchange(Fails(*errors), replaced.extend, TOPOLOGY)
        if has_started:
            found.start()
        return found

    lost = ServiceLost(2, "died")
    no_memory = AnswerFailed(1, "the cpu0 service failed: MemoryError: no room")
    with pytest.raises(ServiceLost):
        exchange(lost, no_memory, has_started=False).request([1, 2])
    assert exchange(lost, no_memory).request([1, 2]) > 0
    assert replaced == [2, 1]
    for errors in ([no_memory, no_memory], [AnswerFailed(1, "ValueError: no such operation")]):
        with pytest.raises(AnswerFailed):
            exchange(*errors).request([1])
    assert replaced == [2, 1, 1]
    no_memory = AnswerFailed(0, "the gpu service failed: MemoryError: no")
    for error in (ServiceLost(0, "died"), no_memory):
        with pytest.raises(CacheLost):  # its KV cache is lost with it: requests begin again
            exchange(error).request([0])


def test_ten_failures_in_a_minute_are_enough_or_ten_that_nothing_mends() -> None:
    now = [0.0]
    policy = RecoveryPolicy(lambda: now[0])
    for _ in range(3 * MAX_FAILURES):  # slowly: without end
        now[0] += WINDOW_S / (MAX_FAILURES - 2)
        policy.count({"gpu": "it died"})
        policy.recovered()
    now[0] += 2 * WINDOW_S
    for _ in range(MAX_FAILURES - 1):
        policy.count({"cpu0": "it died"})
        policy.recovered()
    with pytest.raises(ServiceError, match=r"10 failures in a minute.* cpu1 service: it hangs"):
        policy.count({"cpu1": "it hangs"})
    policy = RecoveryPolicy(lambda: now[0])
    with pytest.raises(ServiceError, match="in a row, the last one of the gpu service: no file"):
        for _ in range(MAX_FAILURES):
            now[0] += 100
            policy.count({"gpu": "no file"})


def test_a_gpu_that_fails_three_times_in_a_minute_is_given_up() -> None:
    clock, cause = [0.0], f"{GPU_FAILED}: an illegal memory access"
    policy = RecoveryPolicy(lambda: clock[0])
    for seconds in (0, 10, 61, 100):
        clock[0] = seconds
        policy.count({"gpu": cause})
        policy.recovered()
    clock[0] = 110
    with pytest.raises(ServiceError, match=r"illegal memory access, 3 times.*--device cpu"):
        policy.count({"gpu": cause})


def test_a_service_that_memory_is_taken_from_is_replaced_once() -> None:
    now = [0.0]
    policy, cause = RecoveryPolicy(lambda: now[0]), f"the cpu0 service {KILLED_FOR_MEMORY}"
    policy.count({"cpu0": cause})
    now[0] += 500  # a large model's loading
    policy.recovered()
    now[0] += WINDOW_S / 2
    policy.count({"gpu": "the gpu service died"})
    policy.recovered()
    with pytest.raises(ServiceError, match=f"{KILLED_FOR_MEMORY}, again within a minute; free"):
        policy.count({"cpu0": cause})
    policy = RecoveryPolicy(lambda: now[0])
    policy.count({"cpu0": cause})
    policy.recovered()
    now[0] += WINDOW_S + 1
    policy.count({"cpu0": cause})
    with pytest.raises(ServiceError, match="again within a minute"):  # while it was being replaced
        policy.count({"cpu0": cause})


def test_replacing_takes_no_time_of_the_policys() -> None:
    """Or what a fresh process does at once would be mended for ever where weights are large."""
    now = [0.0]
    policy = RecoveryPolicy(lambda: now[0])

    def replace(num_attempts: int = 1) -> None:
        for _ in range(num_attempts):
            policy.count({"gpu": "it died"})
            now[0] += 5 * WINDOW_S  # large weights
        policy.recovered()

    assert policy.blames(0)
    replace(num_attempts=2)
    now[0] += 1
    assert not policy.blames(0)
    now[0] += WINDOW_S
    assert policy.blames(0)
    with pytest.raises(ServiceError, match="10 failures in a minute"):
        for _ in range(MAX_FAILURES + 1):
            replace()
            now[0] += 1


class NoPlace:
    """Where a process can be ended, and none is ever expected."""

    arena_refs: Sequence[Any] = ()
    is_drivers = True

    def end(self, service: int, process: ServiceProcess) -> bool:
        return True

    def expect(self, service: int, process: ServiceProcess) -> None:
        pytest.fail("a process came")


def test_a_process_that_ray_never_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One clear end after one wait, not one after ten of them."""
    waits = []

    def find_nothing(self: ServiceReplacer, service: int) -> ServiceProcess:
        waits.append(service)
        raise ServiceLost(service, "the process is gone")

    monkeypatch.setattr("hotcold.actors.faults.replacement._NEW_PROCESS_S", 0.5)
    monkeypatch.setattr(ServiceReplacer, "_find", find_nothing)
    spec = ServiceSpec("cpu0", index=1, num_threads=1, system=SystemConfig(""))
    replacer = ServiceReplacer([spec], [None], None, RecoveryPolicy())  # type: ignore[arg-type]
    replacer._places = [NoPlace()]  # type: ignore[list-item]
    replacer._processes = {0: ServiceProcess(1, True)}
    with pytest.raises(ServiceError, match="Ray has not restarted the cpu0 service") as found:
        replacer.replace({0: "killed"})
    assert waits and not isinstance(found.value, ServiceLost)
    assert replacer.stage == "" and replacer.num_replaced == 0


def test_services_that_fail_together_are_one_failure() -> None:
    policy, killed = RecoveryPolicy(lambda: 0.0), f"the cpu0 service {KILLED_FOR_MEMORY}"
    every = {f"cpu{i}": "it died" for i in range(2 * MAX_FAILURES)}
    policy.count(every | {"cpu0": killed, "cpu1": killed})
    with pytest.raises(ServiceError, match=f"cpu0 service {KILLED_FOR_MEMORY}, again within"):
        policy.count({"cpu1": "it died", "cpu0": killed})
