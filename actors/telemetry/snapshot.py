"""A snapshot of a running system: which neurons fire, how fast it is, which actors are alive.

Nothing here is computed in the engine's thread; services count neurons only while it is watched.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hotcold.actors.protocol.topology import Topology
from hotcold.actors.telemetry.experts import ExpertCounts
from hotcold.actors.telemetry.step_times import StepRecord, StepTimes, sum_drafts
from hotcold.model.config import neurons
from hotcold.model.config.model_config import ModelConfig
from hotcold.numba_kernels.loops.mailbox import (
    ALL_FIRED,
    ALL_GATES,
    LAST_FIRED,
    LAST_GATES,
    NUM_BUCKETS,
    NUM_COUNTS,
    WATCHED,
    SharedBuffers,
)

WATCH_S = 5.0  # after the last snapshot services count no more
_RECENT_S = 2.0  # over which speeds are averaged


@dataclass(frozen=True, eq=False)
class NeuronMap:
    """Neurons of each layer in buckets of neighbours in the checkpoint, or by experts.

    A step is a token of a lone request; of several requests, one token of each. A neuron is
    computed (gate, up and down), only its gate is, or it is skipped; `hot` ones are on the GPU and
    not counted. Steps that read prompts alone are not counted. Means are of the last answer, where
    it ran alone, at most since the watch began.
    Shapes:  all (L, B); mean_*: neurons a step since the watch began
    Dtypes:  int64, mean_* float64
    """

    num_neurons: np.ndarray
    num_hot: np.ndarray
    last_computed: np.ndarray
    last_gates: np.ndarray
    mean_computed: np.ndarray
    mean_gates: np.ndarray
    num_steps: int
    experts: ExpertCounts | None = None  # of a mixture, of steps and prompts since the watch began


@dataclass(frozen=True)
class Speed:
    """Decoding in the last seconds; where nothing runs, all of the last answer's.

    tokens_per_step: new ones, of all requests
    Units:   per_step_ms as `StepTimes.ms_by_parts`; shares of all neurons, 0 to 1
    """

    tokens_per_s: float
    per_step_ms: dict[str, float]
    neurons_computed: float
    gates_computed: float
    tokens_per_step: float = 0.0
    drafts: dict[str, list[int]] = field(default_factory=dict)  # as of `StepRecord`
    reads: dict[str, float] = field(default_factory=dict)  # as `StepTimes.per_step_reads`


@dataclass(frozen=True)
class ActorHealth:
    """One actor; its state is "alive", "silent" (does not answer), "restarting" or "dead"."""

    name: str
    state: str
    pid: int
    memory_bytes: int  # resident, in the host's memory
    device: str


@dataclass(frozen=True, eq=False)
class Telemetry:
    """A system at one moment."""

    mode: str
    uptime_s: float
    num_running: int
    num_waiting: int
    kv_pages_used: int
    kv_pages: int
    speed: Speed
    neurons: NeuronMap
    actors: tuple[ActorHealth, ...] = ()
    host_memory_bytes: int = 0
    host_memory_used_bytes: int = 0
    draft: str = ""  # what drafts tokens, as `SystemConfig.draft`


def num_buckets(config: ModelConfig) -> int:
    """Buckets of each layer: NUM_BUCKETS, or in a mixture one for each block."""
    num_blocks = neurons.most_blocks(config)
    return num_blocks if num_blocks > 1 else NUM_BUCKETS


def bucket_of(config: ModelConfig, layer: int, neuron_ids: np.ndarray) -> np.ndarray:
    """The bucket that each neuron of a layer is counted in: its block, the same in all layers.

    Where a layer has one block, buckets are equal runs of neighbours.
    Dtypes:  uint16
    """
    sizes, count = config.layers[layer].ffn.block_sizes, num_buckets(config)
    if len(sizes) > 1:
        return np.searchsorted(np.cumsum(sizes), neuron_ids, side="right").astype(np.uint16)
    return (neuron_ids.astype(np.int64) * count // sizes[0]).astype(np.uint16)


def buckets_of(config: ModelConfig, layers: Sequence[np.ndarray]) -> np.ndarray:
    """`bucket_of` the neurons `layers`, ids of one layer each, one layer after another."""
    found = [bucket_of(config, layer, ids) for layer, ids in enumerate(layers)]
    return np.concatenate([np.zeros(0, np.uint16), *found])


def bucket_sizes(config: ModelConfig, layers: Sequence[np.ndarray]) -> np.ndarray:
    """How many of the neurons in `layers`, ids of one layer each, are in each bucket: (L, B)."""
    count = num_buckets(config)
    found = [
        np.bincount(bucket_of(config, layer, ids), minlength=count)
        for layer, ids in enumerate(layers)
    ]
    return np.array(found)


class NeuronWatch:
    """Lets services count neurons while the system is watched, and reads their counts."""

    def __init__(
        self,
        config: ModelConfig,
        buffers: SharedBuffers,
        topology: Topology,
        experts: Callable[[], ExpertCounts | None] = lambda: None,
        driver_steps: Callable[[], int] = lambda: 0,
    ) -> None:
        """`buffers` are those of the services of `topology`; the callables: the counts so far."""
        every = [np.arange(size) for size in config.ffn_sizes]
        self._num_neurons = bucket_sizes(config, every)
        self._num_hot = self._num_neurons.copy()
        for shard in topology.shards:
            self._num_hot -= bucket_sizes(config, shard)
        self._cpus = topology.cpu_services  # which count
        self._buffers = buffers
        self._changing = threading.Condition()
        self._watched_until = 0.0
        self._is_counted = True  # the next step
        self._ender: threading.Thread | None = None
        self._first_counts = buffers.neuron_counts.copy()
        self._first_steps = buffers.counted_steps.copy()
        self._experts, self._first_experts = experts, experts()
        self._driver_steps, self._first_driver_steps = driver_steps, 0

    @property
    def is_watching(self) -> bool:
        """Whether services count."""
        return self._ender is not None

    def watch(self, seconds: float = WATCH_S) -> None:
        """Let the services count for `seconds` from the last call on; 0: stop at once."""
        with self._changing:
            self._watched_until = time.monotonic() + seconds
            self._changing.notify()
            if self._ender is None and seconds > 0:
                self._begin()
                self._buffers.requests[self._cpus, WATCHED] = self._is_counted
                self._ender = threading.Thread(target=self._end_later, daemon=True)
                self._ender.start()

    def begin_answer(self) -> None:
        """Count from now on: an answer begins, and no other runs."""
        with self._changing:
            if self.is_watching:
                self._begin()

    def count_step(self, is_answer: bool) -> None:
        """Whether services count the next step: those that read prompts alone are not counted."""
        if is_answer == self._is_counted:
            return
        with self._changing:
            self._is_counted = is_answer
            self._buffers.requests[self._cpus, WATCHED] = is_answer and self.is_watching

    def _begin(self) -> None:
        self._first_counts = self._buffers.neuron_counts.copy()
        self._first_steps = self._buffers.counted_steps.copy()
        self._first_experts = self._experts()
        self._first_driver_steps = self._driver_steps()

    def _end_later(self) -> None:
        with self._changing:
            while (left_s := self._watched_until - time.monotonic()) > 0:
                self._changing.wait(left_s)
            self._buffers.requests[self._cpus, WATCHED] = 0
            self._ender = None

    def read(self) -> NeuronMap:
        """The counts so far; while a step runs, layers may be of two neighbouring steps."""
        cpus = self._cpus
        counts = self._buffers.neuron_counts[cpus]
        # Both counters wrap around, so differences are taken before the type is widened.
        sums = (counts - self._first_counts[cpus]).astype(np.int64)
        steps = (self._buffers.counted_steps[cpus] - self._first_steps[cpus]).astype(np.int64)
        means = (sums / np.maximum(steps, 1)[:, :, None, None]).sum(axis=0)
        has_counted = (steps > 0)[:, :, None, None]
        # A layer without cold neurons may be computed without these services.
        of_cold = steps[:, (self._num_hot < self._num_neurons).any(axis=1)]
        last = np.where(has_counted, counts, 0).astype(np.int64).sum(axis=0)
        experts = self._experts()
        if experts is not None and self._first_experts is not None:
            experts = experts.since(self._first_experts)
        return NeuronMap(
            self._num_neurons,
            self._num_hot,
            last[:, :, LAST_FIRED],
            last[:, :, LAST_GATES],
            means[:, :, ALL_FIRED],
            means[:, :, ALL_GATES],
            int(of_cold.min()) if of_cold.size else self._steps_of_driver(),
            experts,
        )

    def _steps_of_driver(self) -> int:
        """Steps since the watch began, of which no service counts any."""
        return self._driver_steps() - self._first_driver_steps if self.is_watching else 0

    def write(self, service: int, counts: np.ndarray, steps: np.ndarray) -> None:
        """Add the counts of a service that shares no memory.

        Shapes:  counts (L, B, NUM_COUNTS), steps (L,)
        """
        assert counts.shape[-1] == NUM_COUNTS
        if ((steps - self._buffers.counted_steps[service]).astype(np.int32) < 0).any():
            # A new process in a lost one's place counts from 0.
            self._first_counts[service], self._first_steps[service] = 0, 0
        self._buffers.neuron_counts[service] = counts
        self._buffers.counted_steps[service] = steps


def speed_of(
    recent: Iterable[StepRecord],
    num_neurons: int,
    now_s: float,
    is_running: bool,
    last: StepRecord | None = None,
) -> Speed:
    """The speed of the steps that ended in the last seconds; `num_neurons` are the model's.

    Not `is_running`: that of the `last` answer, if it ended then, as its result tells it.
    """
    records = [last] if last is not None and not is_running else recent
    steps = [record for record in records if now_s - record.ended_s < _RECENT_S]
    times = StepTimes()
    for record in steps:
        times.include(record.times)
    if not steps:
        return Speed(0.0, {}, 0.0, 0.0)
    # From the start of the first of them, so that a request just begun is not shown as slow.
    began_s = steps[0].began_s
    end_s = now_s if is_running else steps[-1].ended_s
    num_tokens = sum(record.num_new_tokens for record in steps)
    total = num_neurons * max(times.num_steps, 1)
    return Speed(
        tokens_per_s=num_tokens / max(end_s - began_s, 1e-9),
        per_step_ms=times.ms_by_parts(times.num_steps),
        neurons_computed=times.num_neurons / total,
        gates_computed=times.num_gates / total,
        tokens_per_step=num_tokens / max(times.num_steps, 1),
        drafts=sum_drafts(record.drafts for record in steps),
        reads=times.per_step_reads(),
    )
