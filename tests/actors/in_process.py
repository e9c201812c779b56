"""A whole system in one process, without Ray: services as plain objects on one arena."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from hotcold.actors.attention.attention_service import load_attention_service
from hotcold.actors.cpu.cpu_service import load_cpu_service
from hotcold.actors.cpu.dense_service import load_dense_service
from hotcold.actors.driver.engine import Engine
from hotcold.actors.driver.modes import StepMode, step_mode
from hotcold.actors.exchange.call_exchange import ServiceRequest
from hotcold.actors.exchange.doorbell_exchange import ArenaExchange, Exchange
from hotcold.actors.exchange.service import Service
from hotcold.actors.kv_cache.pool import num_pages_of
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.messages import (
    LAYER_DRAFT,
    NO_MODEL,
    CacheSpec,
    ServiceSpec,
    SystemConfig,
)
from hotcold.actors.protocol.stripes import (
    Stripes,
    every_stripe,
    num_outputs,
    num_stripes,
    output_stripes,
)
from hotcold.actors.protocol.topology import Topology
from hotcold.actors.setup.assignment import cold_shards, require_partition, service_stripes
from hotcold.actors.setup.shards import attention_drafts, cpu_drafts, num_state_pages_of
from hotcold.actors.telemetry.snapshot import num_buckets
from hotcold.model.config import neurons
from hotcold.model.config.build import read_config
from hotcold.model.errors import ServiceError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.embedding import load_embedding
from hotcold.numba_kernels.decode.activations import Thresholds
from hotcold.numba_kernels.loops.mailbox import FULL, OPERATION, RECURRENT, STOP, WINDOWED
from hotcold.predictors.predictor import NeuronPredictor

_MAX_POLLS = 600  # a minute of running; time that the whole process was stopped does not count


@dataclass
class ThreadWatch:
    """Checks the services themselves; counts how often, for a service that hangs."""

    services: list[Service]
    num_polls: int = 0
    max_polls: int = _MAX_POLLS

    def check(self, services: Sequence[int], num_polls: int) -> None:
        """Raise ServiceError for a broken service, or at the last poll."""
        self.num_polls += 1
        for index in services:
            self.services[index].check([index], num_polls)
        if self.num_polls > self.max_polls:
            raise ServiceError(f"{[self.services[index].name for index in services]} hang")

    def explain(self, service: int) -> str:
        """What the service says."""
        return self.services[service].explain(service)


class CopyingExchange(Exchange):
    """The exchange over actor calls without the calls: each service has an arena of its own."""

    def __init__(self, layout: ArenaLayout, services: Sequence[Service]) -> None:
        self.buffers = layout.buffers(layout.new_arena())
        self._services = services

    def request(self, services: Sequence[int]) -> int:
        """Let each service answer a copy of its request."""
        for index in services:
            request = pickle.dumps(ServiceRequest.read(self.buffers, index))
            reply = pickle.dumps(self._services[index].answer(pickle.loads(request)))
            pickle.loads(reply).write(self.buffers, index)
        return 0


class PythonExchange(Exchange):
    """Another exchange, used by Python alone: each request is a call of `request`."""

    def __init__(self, inner: Exchange) -> None:
        self.buffers, self.inner = inner.buffers, inner

    @property
    def next_number(self) -> int:
        """The inner exchange's."""
        return self.inner.next_number

    def request(self, services: Sequence[int]) -> int:
        """Let the inner exchange do it."""
        return self.inner.request(services)


@dataclass
class InProcessSystem:
    """Threads of all services run from the constructor to `stop`."""

    path: Path
    num_services: int = 1
    num_threads: int = 1
    kv_dtype: str = "float32"
    num_slots: int = 1
    num_positions: int = 128
    kv_positions: int = 0
    num_window_pages: int = 0  # where a service keeps fewer in layers with a window
    first_number: int = 1
    max_tokens: int = 64
    copying: bool = False  # a CopyingExchange instead of the arena's
    hot: Callable[[int, int], list[np.ndarray]] | None = None  # of (layers, neurons): hot ids
    specs: list[ServiceSpec] | None = None  # instead of num_services, num_threads and hot
    weight_dtype: str = ""
    has_down_norms: bool = False
    draft: str = NO_MODEL
    bundle_bytes: int = 0
    predictor_words: int = 0
    num_guessed: int = 0
    python_answers: list[str] = field(default_factory=list)  # by the services' names, in order

    def __post_init__(self) -> None:
        self.config = read_config(self.path)
        if self.specs is not None:
            self.num_services = len(self.specs) - 1
        require_partition(self.config, [self.hot_ids(), *self.layer_shards()])
        self.topology = Topology(tuple(self.specs or [self.gpu_spec(), *self.cpu_specs()]))
        self.services: list[Service] = [self._gpu(), *self._cpus()]
        self.layout = self._layout(
            num_outputs=self.num_outputs(),
            num_guessed=self.num_guessed,
            num_buckets=num_buckets(self.config),
            predictor_words=self.predictor_words,
        )
        self.arena = self.layout.new_arena()
        self.watch = ThreadWatch(self.services)
        for service in self.services:
            self._count_python_answers(service)
            arena = self.layout.new_arena() if self.copying else self.arena
            service.attach(self.layout, arena)
        if self.copying:
            self.exchange: Exchange = CopyingExchange(self.layout, self.services)
        else:
            buffers = self.layout.buffers(self.arena)
            self.exchange = ArenaExchange(buffers, self.watch, self.first_number)
        tables = self.exchange.buffers.page_tables  # until a driver writes others
        tables[RECURRENT] = np.arange(tables[0].size).reshape(tables.shape[1:])
        numbers = np.arange(self.num_slots * self.layout.pages_a_slot).reshape(self.num_slots, -1)
        numbers, width = numbers[::-1], self.layout.pages_a_slot
        tables[FULL, :, :width] = numbers % self.num_pages()
        tables[WINDOWED, :, :width] = numbers % (self.num_window_pages or self.num_pages())

    def _layout(self, **others: Any) -> ArenaLayout:
        config = self.config
        return ArenaLayout(
            1 + self.num_services,
            self.max_tokens,
            config.hidden_size,
            config.largest_ffn,
            config.vocab_size,
            self.max_tokens,
            self.num_slots,
            num_pages_of(self.num_positions),
            config.num_layers,
            layer_embeddings=config.num_layers * config.per_layer_size,
            num_blocks=neurons.weighed_blocks(config),
            bundle_bytes=self.bundle_bytes,
            state_pages_a_slot=num_state_pages_of(config, self.num_positions),
            **others,
        )

    def request_by_python(self) -> None:
        """Let engines that are made from now on send each request by `exchange.request`."""
        self.exchange = PythonExchange(self.exchange)

    def num_pages(self) -> int:
        """Of the KV cache: `kv_positions`, or a whole context for every slot."""
        return num_pages_of(self.kv_positions or self.num_positions * self.num_slots)

    def gpu_spec(self) -> ServiceSpec:
        """What the attention service is to load."""
        return ServiceSpec(
            "gpu",
            0,
            self.num_threads,
            self.system(),
            cache=CacheSpec(
                self.num_pages(),
                self.num_positions,
                self.kv_dtype,
                self.num_window_pages,
                self.num_slots * num_state_pages_of(self.config, self.num_positions),
            ),
            attention=range(self.config.num_layers),
            has_head=True,
            drafts=attention_drafts() if self.draft == LAYER_DRAFT else None,
            neuron_ids=self.hot_ids(),
            stripes=Stripes(0, num_stripes(self.config), num_stripes(self.config))
            if self.hot
            else None,
        )

    def cpu_specs(self) -> list[ServiceSpec]:
        """What the CPU services are to load."""
        if self.specs is not None:
            return [replace(spec, storage=None) for spec in self.specs if spec.is_cpu_service]
        threads = [self.num_threads] * self.num_services
        has_layer = self.draft == LAYER_DRAFT
        drafts = cpu_drafts(self.config, threads) if has_layer else [None] * len(threads)
        return [
            ServiceSpec(
                f"cpu{i}",
                1 + i,
                self.num_threads,
                self.system(),
                neuron_ids=shard,
                has_down_bias=i == 0,
                stripes=self.stripes()[i],
                drafts=drafts[i],
            )
            for i, shard in enumerate(self.layer_shards())
        ]

    def system(self) -> SystemConfig:
        """The options that services read."""
        if self.specs is not None:
            return self.specs[0].system
        return SystemConfig(
            str(self.path),
            weight_dtype=self.weight_dtype,
            has_down_norms=self.has_down_norms,
            draft=self.draft,
        )

    def num_outputs(self) -> int:
        """Sums that a CPU service passes on at most."""
        stripes = [
            part.stripes for part in self.topology.parts if part.is_cpu_service and part.stripes
        ]
        return num_outputs(stripes, self.config.ffn_bias) if stripes else 1

    def _gpu(self) -> Service:
        return load_attention_service(self.gpu_spec(), self.config, lambda num_bytes: None)

    def _cpus(self) -> list[Service]:
        load = load_dense_service if self.system().down_transposed else load_cpu_service
        return [load(spec, self.config, lambda num_bytes: None) for spec in self.cpu_specs()]

    def _count_python_answers(self, service: Service) -> None:
        answer = service.answer_in_python

        def counted() -> None:
            self.python_answers.append(service.name)
            answer()

        service.answer_in_python = counted  # type: ignore[method-assign]

    def shards(self) -> list[np.ndarray]:
        """The neurons of each CPU service, in its loading order; the same in every layer."""
        return [layers[0] for layers in self.layer_shards()]

    def hot_ids(self) -> list[np.ndarray] | None:
        """The GPU service's neurons of each layer; None where it has none."""
        if self.specs is not None:
            return self.specs[0].neuron_ids
        if self.hot is None:
            return None
        _, hot = every_stripe(self.config, self.hot(self.config.num_layers, self.config.ffn_size))
        return hot

    def stripes(self) -> list[Stripes]:
        """Each CPU service's stripes of neurons."""
        threads = [self.num_threads] * self.num_services
        if self.system().down_transposed:
            return output_stripes(self.config, threads, self.system().expert_pieces)
        return service_stripes(self.config, threads, None)

    def layer_shards(self) -> list[list[np.ndarray]]:
        """The neurons of each CPU service, layer by layer."""
        if self.specs is not None:
            return [spec.neuron_ids or [] for spec in self.specs if spec.is_cpu_service]
        hot = self.hot_ids() or [np.zeros(0, np.int32)] * self.config.num_layers
        everyone = [np.arange(size, dtype=np.int32) for size in self.config.ffn_sizes]
        shards = cold_shards(self.config, None, everyone, self.stripes())
        return [
            [ids[~np.isin(ids, own)] for ids, own in zip(shard, hot, strict=True)]
            for shard in shards
        ]

    def engine(
        self,
        mode: str,
        predictor: NeuronPredictor | None = None,
        thresholds: Sequence[Thresholds] | None = None,
    ) -> Engine:
        """A new engine on these services."""
        embedding = load_embedding(Checkpoint(self.path), self.config)
        if thresholds is None:
            of_steps = step_mode(self.config, mode, predictor)
        else:
            of_steps = StepMode(mode, thresholds, predictor)
        return Engine(self.config, embedding, self.exchange, self.topology, of_steps)

    def logits(
        self,
        mode: str,
        ids: np.ndarray,
        sizes: Sequence[int],
        slot: int = 0,
        predictor: NeuronPredictor | None = None,
        thresholds: Sequence[Thresholds] | None = None,
    ) -> np.ndarray:
        """Logits (T, V) of `ids` run in steps of `sizes` tokens, in turn."""
        engine, first = self.engine(mode, predictor, thresholds), 0
        parts: list[np.ndarray] = []
        while first < len(ids):
            last = min(first + sizes[len(parts) % len(sizes)], len(ids))
            step = range(first, last)
            found = engine.step(ids[first:last].tolist(), step, [slot] * len(step), len(step))
            parts.append(found.copy())
            first = last
        return np.concatenate(parts)

    def stop(self) -> None:
        """Ask all services to stop; raises unless all their threads end."""
        self.exchange.buffers.requests[:, OPERATION] = STOP
        self.exchange.request(range(len(self.services)))
        for service in self.services:
            if not service.join(60):
                raise AssertionError(f"a thread of {service.name} still runs")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
