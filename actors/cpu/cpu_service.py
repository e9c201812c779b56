"""The CPU service: a shard of every layer's cold neurons."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hotcold.actors.exchange.service import Service
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.messages import ServiceSpec
from hotcold.actors.protocol.neuron_bundles import BundleLayout, write_count
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS
from hotcold.actors.protocol.stripes import shard_stripes
from hotcold.actors.telemetry.snapshot import buckets_of
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.ffn import load_ffn
from hotcold.model.weights.tensor_reader import OnBytes, Touch
from hotcold.numba_kernels.decode.activations import Activation, activation
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.ffn.expert_predictors import PredictorScratch, new_predictor_scratch
from hotcold.numba_kernels.ffn.ffn_loop import NeuronBuckets, ffn_request, serve_ffn
from hotcold.numba_kernels.ffn.in_memory import FfnScratch, new_scratch
from hotcold.numba_kernels.ffn.transposed import new_transposed_scratch
from hotcold.numba_kernels.ffn_arrays import (
    NO_NORMS,
    ExpertPredictors,
    FfnArrays,
    TransposedArrays,
    most_rows,
)
from hotcold.numba_kernels.load.convert import row_lengths
from hotcold.numba_kernels.loops.mailbox import (
    COUNT_FFN,
    FFN,
    LAYER,
    NO_NUMBER,
    NO_PROMPTS,
    NUM_COMPUTED,
    NUM_TOKENS,
    OPERATION,
    ROUND,
    SEND,
    is_for_others,
)

if TYPE_CHECKING:
    from hotcold.numba_kernels.ffn.prompt_plan import PromptFfnScratch, PromptPredictors

    Prompts = tuple[PromptFfnScratch, PromptPredictors | None]

_Made = TypeVar("_Made", bound="CpuService")


class CpuService(Service):
    """Computes the partial FFN output of its neurons."""

    _scratch: FfnScratch
    _predictor_scratch: PredictorScratch | None = None
    _prompt_scratch: Prompts | None = None

    def __init__(
        self,
        name: str,
        index: int,
        num_threads: int,
        arrays: FfnArrays | TransposedArrays,
        function: Activation,
        buckets: np.ndarray | None = None,
        predictors: ExpertPredictors | None = None,
    ) -> None:
        """Serve the shard `arrays`; `load_cpu_service` reads one from a checkpoint.

        `predictors` are those of the shard's experts, if these have some.

        `buckets` (uint16, one for each row) says in which bucket a neuron is counted; without it
        all are in the first.
        """
        super().__init__(name, index, num_threads)
        self.arrays = arrays
        self.source: tuple[Any, ...] = arrays  # what `layer_ffn` goes over
        self._making = threading.Lock()
        has_some = predictors is not None and predictors.inner.size > 0
        self.predictors = predictors if has_some else None
        num_rows = int(arrays.starts[-1, -1])
        self.fired_counts = np.zeros(num_rows, np.int64)  # by COUNT_FFN requests
        self.function = function
        self.buckets = np.zeros(num_rows, np.uint16) if buckets is None else buckets

    @property
    def may_leave_out(self) -> bool:
        """Not where neurons are offloaded: each thread has reads of its own."""
        return isinstance(self.source, FfnArrays | TransposedArrays)

    def prepare(self, layout: ArenaLayout) -> None:
        """Work space for kernels of up to KERNEL_TOKENS tokens."""
        predictors = self.predictors
        self._places = layout.bundles(self._arena)[self.index]
        starts = self.arrays.starts
        by_layer = np.split(self.buckets, starts[1:, 0])
        sizes = np.array([np.bincount(layer, minlength=layout.num_buckets) for layer in by_layer])
        num_tokens, width = min(KERNEL_TOKENS, layout.max_tokens), layout.width
        self.make_scratch(num_tokens, width)
        if predictors is not None:
            self._predictor_scratch = new_predictor_scratch(
                predictors, self.num_threads, num_tokens, most_rows(starts), width
            )
        self._buckets = NeuronBuckets(starts, self.buckets, sizes.astype(np.uint32))
        self._prompt_scratch, self._most_tokens = None, layout.max_tokens

    def prompts(self) -> Prompts:
        """Work space for prompts, made at the first call, in any thread."""
        with self._making:
            if self._prompt_scratch is None:
                self._prompt_scratch = self.new_prompts(self.num_threads, self._most_tokens)
            return self._prompt_scratch

    def new_prompts(self, num_threads: int, num_tokens: int) -> Prompts:
        """Work space for prompts of so many tokens, and experts' predictors with theirs."""
        from hotcold.actors.cpu.matmul import ffn_scratch, predictor_scratch

        sizes = num_threads, num_tokens, self.buffers.hidden.shape[1]
        return (
            ffn_scratch(self.arrays, *sizes),
            predictor_scratch(self.predictors, self.arrays.starts, *sizes),
        )

    def make_scratch(self, num_tokens: int, width: int) -> None:
        """Make work space for kernels of so many tokens, `width` numbers each."""
        arrays, starts = self.arrays, self.arrays.starts
        make: Callable[..., FfnScratch] = new_scratch
        stripes = arrays.stripes
        if isinstance(arrays, TransposedArrays):
            make, stripes = new_transposed_scratch, arrays.cuts
        sizes = num_tokens, most_rows(starts), width, starts.shape[1] - 1
        self._scratch = make(self.num_threads, *sizes, max(1, stripes.shape[2] - 1))

    def prepare_prompts(self) -> None:
        """Compile the kernels of prompts."""
        self._serve_prompts(0, NO_NUMBER, NO_PROMPTS)

    def release(self) -> None:
        """Nothing: no thread but the service's own serves requests."""

    def serve(self, thread: int, seen: int) -> int:
        """Run `serve_ffn`, and while there are prompts their loop."""
        while True:
            number = self.serve_few(thread, seen)
            if number == 0 or not self.is_for_prompts():
                return number
            number = self._serve_prompts(thread, number - 1, self._scratch.sums.shape[1])
            if number == 0:
                return number
            seen = number - 1  # it has yet to be served

    def is_for_prompts(self) -> bool:
        """Whether the request in the mailbox is for the loop of prompts."""
        request = self.buffers.requests[self.index]
        if is_for_others(request, self.weights):
            return False
        is_long = request[NUM_TOKENS] > self._scratch.sums.shape[1]
        return bool(request[OPERATION] == COUNT_FFN or (request[OPERATION] == FFN and is_long))

    def _serve_prompts(self, thread: int, seen: int, most_tokens: int) -> int:
        from hotcold.numba_kernels.ffn.serve_prefill import serve_prompt_ffn

        own = thread, self.num_threads, self.index
        given = np.int32(seen), self.weights, most_tokens
        return int(serve_prompt_ffn(*own, *given, *self._of_prompts()))

    def _of_prompts(self) -> tuple[Any, ...]:
        """What `prompt_ffn_request` is given."""
        scratch, predictors = self.prompts()
        held = self.arrays, predictors, self.fired_counts
        return self.buffers, *held, scratch, self.function

    def serve_few(self, thread: int, seen: int) -> int:
        """Run `serve_ffn`."""
        own = thread, self.num_threads, self.index
        return int(serve_ffn(*own, np.int32(seen), self.weights, *self._of_steps()))

    def _of_steps(self) -> tuple[Any, ...]:
        """What `ffn_request` is given."""
        predictors = self.predictors, self._predictor_scratch
        held = self.source, self._scratch, *predictors, self._buckets
        return self.buffers, *held, self.function

    def answer_share(self, thread: int) -> None:
        """Do one thread's share of the FFN request in the mailbox; every thread must do its own."""
        if self.is_for_prompts():
            from hotcold.numba_kernels.ffn.serve_prefill import prompt_ffn_request

            prompt_ffn_request(thread, self.num_threads, self.index, *self._of_prompts())
            return
        layer = self.buffers.requests[self.index, LAYER]
        ffn_request(thread, self.num_threads, self.index, layer, *self._of_steps())

    def answer_in_python(self) -> None:
        """Answer a request for neurons for a GPU."""
        request = self.buffers.requests[self.index]
        if request[OPERATION] != SEND:
            raise ValueError(f"{self.name} knows no operation {request[OPERATION]}")
        self._send(int(request[LAYER]), int(request[ROUND]))

    def together(self, call: Callable[[int], object]) -> None:
        """Call it with each thread's number, in threads side by side. Errors: of a call."""
        with ThreadPoolExecutor(self.num_threads) as pool:
            for _ in pool.map(call, range(self.num_threads)):
                pass

    def rows_of(self, layer: int) -> tuple[int, int]:
        """First and last row of a layer."""
        return int(self.arrays.starts[layer, 0]), int(self.arrays.starts[layer, -1])

    def _send(self, layer: int, number: int) -> None:
        """Copy the neurons of a round into the arena; the reply says how many rounds there are."""
        arrays = self.arrays
        assert isinstance(arrays, FfnArrays), "only services with neuron-major rows send to a GPU"
        begin, end = self.rows_of(layer)
        bundle = BundleLayout.of(
            arrays.gate,
            arrays.up,
            arrays.down,
            arrays.gate_bias.size > 0,
            self._places.shape[1],
            arrays.up.shape[0] > 0,
        )
        first, last = bundle.span(end - begin, number)
        place = self._places[number % 2]
        sources = arrays.gate, arrays.up, arrays.down, arrays.gate_bias, arrays.up_bias

        def copy(thread: int) -> None:
            part = slice(*split_range(last - first, thread, self.num_threads, 1))
            for index, source in enumerate(sources):
                rows = bundle.rows(place, index, last - first)
                if rows is not None:
                    own = source[begin + first : begin + last][part]
                    rows[part] = own.reshape(rows[part].shape).view(rows.dtype)

        self.together(copy)
        write_count(place, last - first)
        self.buffers.replies[self.index, NUM_COMPUTED] = bundle.rounds(end - begin)


def load_cpu_service(
    spec: ServiceSpec,
    config: ModelConfig,
    on_bytes: OnBytes,
    touch: Touch | None = None,
    keeps_pages: bool = True,
    max_rows: int | None = None,
    of_outputs: bool = False,
) -> CpuService:
    """Read a shard from a checkpoint; of the attention service, its hot neurons.

    `touch` is called with each new matrix before it is filled. `keeps_pages`: the files that were
    read stay in the page cache. `max_rows`: as `TensorReader`. `of_outputs`: the spec's stripes are
    those of down rows that are an output each.
    Errors:  CheckpointError, UsageError
    """
    weights = load_ffn(
        Checkpoint(spec.path, keeps_pages),
        config,
        spec.neuron_ids or [],
        include_down_bias=spec.has_down_bias,
        dtype=spec.system.weight_dtype,
        on_bytes=on_bytes,
        touch=touch,
        max_rows=max_rows,
    )
    stripes = spec.stripes
    if of_outputs and stripes is not None and stripes.total == 1:
        stripes = None  # one service has all neurons, and its threads share them
    arrays = FfnArrays(
        weights.starts,
        weights.gate,
        weights.up,
        weights.down,
        weights.gate_bias,
        weights.up_bias,
        weights.down_bias,
        row_lengths(weights.down) if spec.system.has_down_norms else NO_NORMS,
        *shard_stripes(weights.starts, weights.neuron_ids, config, stripes, of_outputs),
    )
    return new_service(CpuService, spec, config, arrays, weights.predictors, on_bytes, touch)


def new_service(
    kind: Callable[..., _Made],
    spec: ServiceSpec,
    config: ModelConfig,
    held: Any,
    predictors: ExpertPredictors | None,
    on_bytes: OnBytes,
    touch: Touch | None = None,
) -> _Made:
    """The service `kind` of what is `held`: arrays, or a store.

    With `spec.draft` it has the same neurons in the weights of drafts too, which are loaded.
    """
    function = activation(config.activation_fn, config.activation_threshold)
    buckets = buckets_of(config, spec.neuron_ids or [])
    service = kind(spec.name, spec.index, spec.num_threads, held, function, buckets, predictors)
    if spec.draft is not None:
        service.draft = load_cpu_service(
            spec.draft,
            spec.system.draft_model(config),
            on_bytes,
            touch,
            spec.keeps_pages,
            of_outputs=spec.system.down_transposed and spec.drafts is None,
        )
    return service
