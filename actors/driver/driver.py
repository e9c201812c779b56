"""The driver: owns the engine, takes requests, streams their tokens.

A single thread runs the engine (`actors.driver.scheduler`), so a slow reader never stops it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hotcold.actors.driver.active_request import (
    ActiveRequest,
    Generator,
    compile_choice,
    compile_extras,
)
from hotcold.actors.driver.arithmetic import arithmetic_identity
from hotcold.actors.driver.drafts import ModelDrafter, speculation
from hotcold.actors.driver.engine import Engine
from hotcold.actors.driver.layer_drafter import DraftEngine, LayerDrafter
from hotcold.actors.driver.modes import ModeTrial, StepMode, compare_modes, saved_trial, step_mode
from hotcold.actors.driver.prefix_cache import PrefixCache
from hotcold.actors.driver.profiling import ProfilingEngine
from hotcold.actors.driver.scheduler import Scheduler
from hotcold.actors.driver.scoring import ThresholdTrials, WindowScores, score_window
from hotcold.actors.driver.streams import (
    POLL_S,
    OpenStreams,
    Reader,
    Readers,
    RequestEvent,
    Stream,
)
from hotcold.actors.exchange.doorbell_exchange import ArenaExchange, Exchange
from hotcold.actors.kv_cache.page_store import PageStore
from hotcold.actors.kv_cache.pool import KvPool
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.failures import (
    CacheLost,
    NotFiniteError,
    RequestError,
    SystemLost,
    cause_of,
    first_line,
)
from hotcold.actors.protocol.messages import (
    LAYER_DRAFT,
    PREDICTED_MODES,
    DriverLoad,
    GenerateRequest,
    ReaderEpoch,
    SystemConfig,
    TokenEvent,
)
from hotcold.actors.protocol.step_sizes import share_tokens
from hotcold.actors.protocol.topology import Topology
from hotcold.actors.setup.choose import default_mode
from hotcold.actors.setup.modes import system_thresholds, trial_key
from hotcold.actors.setup.shards import (
    cache_windows,
    chunks_at_once,
    num_kv_pages,
)
from hotcold.actors.telemetry.experts import ExpertCounts, expert_counts
from hotcold.actors.telemetry.snapshot import WATCH_S, NeuronWatch, Telemetry, speed_of
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import HotcoldError, ServiceError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.draft_layer import read_draft_inputs
from hotcold.model.weights.embedding import load_embedding
from hotcold.model.weights.tensor_reader import TensorReader
from hotcold.numba_kernels.loops.mailbox import DRAFT
from hotcold.predictors.magnitude_thresholds import LayerThresholds
from hotcold.predictors.predictor import NeuronPredictor
from hotcold.predictors.predictor_file import Predictors, read_predictors

if TYPE_CHECKING:
    from hotcold.actors.processes.scaling import CpuServiceChange

_Result = TypeVar("_Result")

_LAST_SAVE_S = 10.0  # for pages of the KV cache that are not on file yet


class Driver:
    """Runs requests on services that an exchange reaches."""

    def __init__(
        self,
        system: SystemConfig,
        exchange: Exchange,
        topology: Topology,
        prepare_matmul: Callable[[], None] = lambda: None,
        page_store: PageStore | None = None,
        begin_matmul: Callable[[float], bool] = lambda wait_s: True,
    ) -> None:
        """The engine's thread calls both before services multiply matrices (`Engine`).

        page_store: where pages of the KV cache are kept beside memory

        Errors:  CheckpointError, ConfigError, ArtifactError
        """
        self._system = system
        path = Path(system.model_path)
        config = read_config(path)
        embedding = load_embedding(Checkpoint(path, system.storage is None), config)
        mode = _load_mode(system, config, topology.shards, exchange)
        engine = Engine(config, embedding, exchange, topology, mode)
        engine.neuron_upload_tokens = system.neuron_upload_tokens
        engine.chunks_at_once = chunks_at_once(system)
        self.engine = engine
        self.drafter = _model_drafter(system, engine, topology.shards)
        self._start_helpers(self._predictor, exchange, topology)
        self.generator = Generator(path, config, engine, system.context_length)
        bos_id = self.generator.prompts.bos_id
        self.profiling = ProfilingEngine(config, embedding, exchange, topology, bos_id)
        self._trials = ThresholdTrials(engine)
        engine.prepare_matmul = self.profiling.prepare_matmul = prepare_matmul
        engine.begin_matmul = begin_matmul
        tables = exchange.buffers.page_tables[:, : engine.kernel_tokens]
        self._pool = KvPool(num_kv_pages(system), tables, cache_windows(system, config))
        self._prefixes = PrefixCache(self._pool, page_store)
        self.generator.warm_up()
        self._use_arithmetic(topology)
        if self.drafter is not None:
            self.drafter.warm_up()
        self._streams = OpenStreams()
        self.readers = Readers()
        drafts = speculation(system.speculate, self.drafter)
        self.neuron_watch = self._watch_of(exchange, topology)
        self._scheduler = Scheduler(
            engine,
            self._prefixes,
            drafts,
            counts_step=lambda is_answer: self.neuron_watch.count_step(is_answer),
            begins_answer=lambda: self.neuron_watch.begin_answer(),
        )
        self._started_s = time.monotonic()
        self._closing = threading.Event()
        threading.Thread(target=self._poll_readers, name="readers", daemon=True).start()

    def generate(self, request: GenerateRequest, is_attended: bool = False) -> Iterator[TokenEvent]:
        """Queue a request and yield its events; closing the iterator cancels it.

        Tokens of a moment come as one event (`actors.driver.streams`). `is_attended`: the request
        is cancelled unless its reader, which has its name, calls now and then.

        Errors:  PromptError, RequestError, ServiceError
        """
        name = request.request_id
        reader = self.readers.touch(ReaderEpoch(name)) if is_attended else Reader()
        stream = self._start(request, reader)
        try:
            while True:
                for _, event in reader.next_events():
                    if isinstance(event, BaseException):
                        raise event
                    yield event
                    if event.result is not None:
                        return
        finally:
            stream.cancelled.set()
            if is_attended:
                self.readers.forget(name)

    def submit(self, epoch: ReaderEpoch, request: GenerateRequest) -> None:
        """Queue a request whose events `take_events` hands out to its reader.

        Errors:  PromptError, UsageError, ServiceError; RequestError where the epoch has ended
        """
        self._start(request, self.readers.touch(epoch))

    def take_events(
        self, epoch: ReaderEpoch, num_taken: int, wait_s: float
    ) -> tuple[int, list[RequestEvent]]:
        """The next events of a reader's requests (`Reader.take`).

        Errors:  RequestError where the epoch has ended
        """
        return self.readers.touch(epoch).take(num_taken, wait_s)

    def load(self, with_experts: bool = False) -> DriverLoad:
        """Requests that run and wait now, and counts of experts if asked for.

        Errors:  ServiceError where the system has ended
        """
        self._scheduler.require_running()
        return DriverLoad(
            self._scheduler.num_running,
            self._scheduler.num_waiting,
            self._pool.usage,
            experts=self._expert_counts() if with_experts else None,
        )

    def _expert_counts(self) -> ExpertCounts | None:
        misses, engine = None, self.engine
        if self._system.storage is not None and self._system.shares_arena:
            misses = engine.exchange.buffers.block_misses[engine.topology.cpu_services]
        return expert_counts(self.generator.config, engine.block_counts, misses)

    def _watch_of(self, exchange: Exchange, topology: Topology) -> NeuronWatch:
        config, buffers = self.generator.config, exchange.buffers
        return NeuronWatch(
            config, buffers, topology, self._expert_counts, lambda: self.engine.num_steps
        )

    def require_alive(self) -> None:
        """Raise ServiceError if the engine's thread has ended: no request will be served."""
        self._scheduler.require_thread()

    def _start(self, request: GenerateRequest, reader: Reader) -> Stream:
        stream = reader.open(request.request_id, self._streams.remove)
        self._streams.add(stream)
        try:
            checked = self.generator.prompts.checked(request)
            self._scheduler.submit(ActiveRequest(self.generator, checked, stream))
        except BaseException:
            self._streams.remove(stream)
            reader.close(stream)
            raise
        return stream

    def _poll_readers(self) -> None:
        while not self._closing.wait(POLL_S):
            self.readers.poll()

    def cancel(self, request_id: str) -> None:
        """End a request that waits, runs or has yet to come; its reason is then "cancelled".

        One that runs ends within a token.
        """
        self._streams.cancel(request_id)

    def between_requests(self, function: Callable[[], _Result], has_slot: bool = True) -> _Result:
        """Call `function` while no request runs, with slot 0 for a step of kernels if `has_slot`.

        Later steps of a sequence come after `begin_step`. Requests that come later wait for it.
        Errors:  its own, ServiceError
        """

        def with_cache() -> _Result:
            try:
                return function()
            except (CacheLost, NotFiniteError) as error:
                self._prefixes.forget(anew=isinstance(error, NotFiniteError))
                raise

        def with_pages() -> _Result:
            self._prefixes.await_saves()
            slot = self._pool.allocate(self.generator.context_length)
            if slot != 0:
                if self._prefixes.is_saving:
                    raise RequestError(
                        "pages of the KV cache are still being written to a disk that does not "
                        "answer; try again later, or start again with --prefix-cache off"
                    )
                raise ServiceError("the KV cache is smaller than the context; start again")
            try:
                return with_cache()
            finally:
                self._pool.free(slot)

        return self._scheduler.between_requests(with_pages if has_slot else with_cache)

    def choose_mode(self) -> ModeTrial:
        """Time the predicted mode and the model's default; use the faster one from now on.

        The result is kept on disk for later starts of such a system on this machine.
        Errors:  RequestError, ServiceError
        """
        engine = self.engine
        other = step_mode(engine.config, default_mode(engine.config))
        first_id = self.generator.prompts.bos_id or 0

        def choose() -> ModeTrial:
            length = self.generator.context_length
            trial = saved_trial(
                (engine.mode.name, other.name),
                trial_key(self._system),
                lambda: compare_modes(engine, (engine.mode, other), first_id, length),
            )
            predictor = engine.mode.predictor
            if trial.fastest == other.name and predictor is not None:
                engine.mode = other
                predictor.close()
                self._system = replace(
                    self._system, mode=other.name, predictors_path="", gpu_predicts=()
                )
                self._use_arithmetic(engine.topology)
            return trial

        return self.between_requests(choose)

    def score_window(self, ids: list[int], first: int, audit: bool) -> WindowScores:
        """Score a window between requests (`actors.driver.scoring.score_window`).

        Errors:  RequestError, also for a window longer than the context; ServiceError
        """
        return self._on_window(
            len(ids), lambda: score_window(self.engine, ids, first, audit, self.begin_step)
        )

    def profile_window(
        self, ids: list[int], recorded: list[int], num_prompt: int | None = None
    ) -> np.ndarray:
        """Count which neurons fire in a window (`ProfilingEngine.profile_window`).

        Errors:  those of `score_window`
        """
        return self._on_window(
            self.profiling.num_bos + len(ids),
            lambda: self.profiling.profile_window(ids, recorded, num_prompt, self.begin_step),
        )

    def try_thresholds(self, ids: list[int], first: int, thresholds: LayerThresholds) -> np.ndarray:
        """KL divergences from dense in a window (`ThresholdTrials.kld`).

        Errors:  those of `score_window`
        """
        of_layers = thresholds.of_layers()
        return self._on_window(
            len(ids), lambda: self._trials.kld(ids, first, of_layers, self.begin_step)
        )

    def begin_step(self, begin: int, end: int) -> None:
        """Before positions begin..end - 1 of a window, whose pages slot 0 then has; 0 begins anew.

        Errors:  ServiceError where the system has ended
        """
        self._scheduler.require_running()
        if begin == 0:
            self._pool.free(0)
            self._pool.allocate(self.generator.context_length, ends=[])
        is_chunk = end - begin > self.engine.kernel_tokens
        has_pages = self._pool.extend(0, end, begin, ends=[end] if is_chunk else None)
        assert has_pages, "a sequence has fewer pages than all of them"

    def _on_window(self, num_tokens: int, function: Callable[[], _Result]) -> _Result:
        size = self.generator.context_length
        if num_tokens > size:
            problem = f"a window of {num_tokens} tokens does not fit in a context of {size}"
            raise RequestError(problem)
        return self.between_requests(function)

    def change_services(self, change: CpuServiceChange) -> None:
        """Use other CPU services from the next step on; requests that run continue with them.

        Errors:  SystemLost where it failed half-way, which ends the system; HotcoldError of what
                 failed before: nothing has changed then
        """
        topology = change.topology
        watch = self._watch_of(change.exchange, topology)
        old = new = self._predictor
        if old is not None:
            bits = change.exchange.buffers.predictor_bits
            new = old.rearranged(self.engine.topology.shards, topology.shards, bits)
        self._start_helpers(new, change.exchange, topology)
        try:
            self._scheduler.between_steps(lambda: self._change_services(change, new, watch))
        finally:
            for each in (old, new):
                if each is not None and each is not self._predictor:
                    each.close()

    def _change_services(
        self, change: CpuServiceChange, predictor: NeuronPredictor | None, watch: NeuronWatch
    ) -> None:
        # First what can fail and changes nothing; after a later failure no service serves.
        tables = change.exchange.buffers.page_tables[:, : self.engine.kernel_tokens]
        self._pool.copy_to(tables)
        change.prepare()
        try:
            try:
                change.move()
            except CacheLost:
                self._scheduler.recompute_all()
            self._scheduler.restart_chunk()
            self._pool.move(tables)
            if isinstance(self.drafter, ModelDrafter) and self.drafter.mode.predictor is not None:
                self.drafter.mode = replace(self.drafter.mode, predictor=predictor)
            else:
                self.engine.mode = replace(self.engine.mode, predictor=predictor)
            drafting = [self.drafter.engine] if isinstance(self.drafter, LayerDrafter) else []
            for engine in (self.engine, self.profiling, *drafting):
                engine.use_services(change.topology)
            earlier, self.neuron_watch = self.neuron_watch, watch
            earlier.watch(0.0)  # the thread that would end it later holds the old arena
            self._system = change.system
            self._use_arithmetic(change.topology)
        except BaseException as error:
            cause = cause_of(error) if isinstance(error, HotcoldError) else first_line(error)
            raise SystemLost(
                f"the system ended while its CPU services were changed: {cause}; start again"
            ) from error

    def telemetry(self, watch_s: float = WATCH_S) -> Telemetry:
        """A snapshot of the system; services keep counting neurons for `watch_s`."""
        self.neuron_watch.watch(watch_s)
        now_s, config = time.monotonic(), self.generator.config
        num_running = self._scheduler.num_running
        num_pages = num_kv_pages(self._system)
        return Telemetry(
            mode=self._system.mode,
            draft=self._system.draft,
            uptime_s=now_s - self._started_s,
            num_running=num_running,
            num_waiting=self._scheduler.num_waiting,
            kv_pages_used=self._pool.num_used,
            kv_pages=num_pages,
            speed=speed_of(
                self._scheduler.recent.copy(),
                config.num_neurons,
                now_s,
                is_running=num_running > 0,
                last=self.generator.last_answer,
            ),
            neurons=self.neuron_watch.read(),
        )

    def _use_arithmetic(self, topology: Topology) -> None:
        """Find only what the services compute as they are now."""
        system, config = self._system, self.generator.config
        share = 0 if system.prefix_cache_bytes == 0 else share_tokens(self.engine.cut_tokens)
        identity = b""  # in memory, what is kept has the life of these services
        if share and self._prefixes.store is not None:
            identity = arithmetic_identity(system, config, topology, share)
        self._prefixes.use(identity, share)

    def identity(self, machines: Mapping[str, Any]) -> tuple[str, int, int]:
        """What is equal in systems that choose the same tokens, whatever copy of a model they have.

        Also what beginnings of prompts that it shares are multiples of (0: it shares none), and the
        pages of its KV cache. `machines`: as `SystemServices.machines`.
        """
        system, engine = self._system, self.engine
        cut = share_tokens(engine.cut_tokens)
        content = ModelIdentity.of(system.model_path).content
        found = arithmetic_identity(
            system, self.generator.config, engine.topology, cut, content, machines
        )
        shared = 0 if system.prefix_cache_bytes == 0 else cut
        return found.hex(), shared, num_kv_pages(system)

    def close(self) -> None:
        """End the engine's thread within a token; requests that run are cancelled."""
        self._closing.set()
        self._scheduler.close(self._streams.cancel_all)
        self._prefixes.save_all(_LAST_SAVE_S)
        if self._predictor is not None:
            self._predictor.close()

    @property
    def _predictor(self) -> NeuronPredictor | None:
        """That of the engine's mode or of drafts: only one of them has some."""
        drafter = self.drafter
        of_drafts = drafter.mode.predictor if isinstance(drafter, ModelDrafter) else None
        return of_drafts or self.engine.mode.predictor

    def _start_helpers(
        self, predictor: NeuronPredictor | None, exchange: Exchange, topology: Topology
    ) -> None:
        """Let several cores predict, where there are doorbells for them to wait at."""
        if predictor is not None and exchange.next_number:
            service = topology.cache_services[0]  # in other services' layers one core predicts
            predictor.start_helpers(exchange.buffers, service, self._system.num_threads)


def _model_drafter(
    system: SystemConfig, engine: Engine, shards: Sequence[Sequence[np.ndarray]]
) -> ModelDrafter | LayerDrafter | None:
    """What drafts by the model, as the system has it; None where nothing does."""
    config = engine.config
    if system.draft == LAYER_DRAFT:
        drafting = DraftEngine(engine)
        with TensorReader(Checkpoint(system.model_path)) as reader:
            inputs = read_draft_inputs(reader, drafting.config, engine.embedding)
        return LayerDrafter(drafting, inputs)
    if system.draft_system is not None:
        mode = step_mode(config, default_mode(config))
    elif system.draft_predictors_path:
        predictors = _read_predictors(system, system.draft_predictors_path, config)
        mode = step_mode(config, system.draft, predictors.arranged(shards))
    else:
        return None
    # Services with one set of weights compute with that, and count no neurons of drafts either.
    return ModelDrafter(engine, replace(mode, weights=DRAFT))


def _read_predictors(system: SystemConfig, file: str, config: ModelConfig) -> Predictors:
    """Predictors of the system's model. Errors: ArtifactError."""
    identity, keeps_pages = ModelIdentity.of(system.model_path), system.storage is None
    return read_predictors(Path(file), identity, config, keeps_pages=keeps_pages)


def compile_driver(
    system: SystemConfig, layout: ArenaLayout, topology: Topology
) -> Callable[[], None]:
    """Compile what a driver of `system` needs for its first token, while its services load.

    It runs no layer, on an arena of its own that stays untouched. What a mode with predictors needs
    is compiled once they are read. Returns what compiles the rest. Errors: those of `Driver`
    """
    if system.mode in PREDICTED_MODES or system.auto_mode:
        return lambda: None
    path = Path(system.model_path)
    config = read_config(path)
    exchange = ArenaExchange(layout.buffers(layout.new_arena()), _Nobody())
    embedding = load_embedding(Checkpoint(path, keeps_pages=False), config)
    embedding.lookup(np.zeros(1, np.int64), np.zeros(1, np.int64))
    mode = _load_mode(system, config, topology.shards, exchange)
    engine = Engine(config, embedding, exchange, topology, mode)
    engine.compile()
    compile_choice(config)
    return partial(compile_extras, config, embedding)


class _Nobody:
    """The `Watch` of an exchange without services, which is sent no request."""

    def check(self, services: Sequence[int], num_polls: int) -> None:
        pass

    def explain(self, service: int) -> str:
        return ""


def _load_mode(
    system: SystemConfig,
    config: ModelConfig,
    shards: Sequence[Sequence[np.ndarray]],
    exchange: Exchange,
) -> StepMode:
    """The mode of the system's steps, with its thresholds or predictor."""
    calibrated = system_thresholds(system, config)
    if calibrated is not None:
        return StepMode(system.mode, calibrated.thresholds.of_layers())
    if system.mode not in PREDICTED_MODES:
        return step_mode(config, system.mode)
    predictors = _read_predictors(system, system.predictors_path, config)
    return step_mode(
        config, system.mode, predictors.arranged(shards, exchange.buffers.predictor_bits)
    )
