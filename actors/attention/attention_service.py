"""The attention service on the CPU: attention, KV cache, norms and head, in compiled loops.

If a plan puts hot neurons here, a CPU service computes them in this service's threads.
`actors.attention.cuda.service` is the same service on a GPU.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hotcold.actors.attention.arrays import attention_arrays
from hotcold.actors.cpu.cpu_service import CpuService, load_cpu_service
from hotcold.actors.exchange.service import Service
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.messages import ServiceSpec
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import requested_dtype
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import load_attention
from hotcold.model.weights.draft_layer import read_draft_head
from hotcold.model.weights.embedding import load_head
from hotcold.model.weights.tensor_reader import OnBytes, TensorReader, Touch
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS, SEGMENT_POSITIONS
from hotcold.numba_kernels.decode.vectors import activation_space, aligned_zeros
from hotcold.numba_kernels.loops.attention_loop import (
    NUM_COUNTERS,
    AttentionArrays,
    AttentionScratch,
    serve_attention,
)
from hotcold.numba_kernels.loops.doorbell import clock_ns
from hotcold.numba_kernels.loops.latent_attention import latent_space
from hotcold.numba_kernels.loops.mailbox import (
    ATTENTION,
    COUNT_FFN,
    FFN,
    FIRST_LOGIT,
    HEAD,
    NO_COUNTERS,
    NO_NUMBER,
    NO_PROMPTS,
    NUM_TOKENS,
    OPERATION,
    RECURRENT,
    finish_request,
    is_for_others,
)
from hotcold.numba_kernels.loops.work_stealing import new_block_counters
from hotcold.numba_kernels.recurrent.pages import recurrent_scratch

if TYPE_CHECKING:
    from hotcold.numba_kernels.prefill.serve_prefill import PromptScratch

_ROWS = 64  # queries, of tokens of one sequence, that read a segment together


class AttentionService(Service):
    """Computes attention and head for every token of a step."""

    def __init__(
        self,
        name: str,
        index: int,
        num_threads: int,
        arrays: AttentionArrays,
        hot: CpuService | None = None,
    ) -> None:
        """Serve `arrays`; `load_attention_service` reads them from a checkpoint.

        `hot` holds the hot neurons, with this service's index and number of threads.
        """
        super().__init__(name, index, num_threads)
        self.arrays = arrays
        parts = {
            "routers": arrays.routers.rows,
            "latent": arrays.latent.keys.arrays[0],
            "project_out": arrays.project_out,
            "per_layer": arrays.per_layer.gate,
            "recurrent": arrays.recurrent.conv_weight,
        }
        absent = {name: None for name, rows in parts.items() if rows.size == 0}
        self._compiled = arrays._replace(**absent)  # type: ignore[arg-type]
        self._hot = hot
        self._outer: AttentionService | None = None
        self._scratch: AttentionScratch
        self._prompt_scratch: PromptScratch | None = None
        self._making = threading.Lock()

    @property
    def cache_pages(self) -> list[tuple[int, np.ndarray]]:
        """The KV cache: the group of pages and these of each layer's keys, then of its values.

        None of values that are keys, and of layers that have those of another. Then the states of
        recurrent layers.
        """
        numbers = self.arrays.numbers
        caches = self.arrays.keys, self.arrays.values
        found = [
            (int(numbers[layer].page_group), cache.pages(layer))
            for cache in caches
            for layer in range(len(cache.spans))
            if numbers[layer].page_group != RECURRENT
            if numbers[layer].has_keys and cache.pages(layer).size
        ]
        found += [(RECURRENT, pages) for pages in self.arrays.recurrent_pages]
        return found if self._drafting is None else [*found, *self._drafting.cache_pages]

    @property
    def _drafting(self) -> AttentionService | None:
        """A layer that drafts, with pages of its own; None without one."""
        draft = self.draft
        if isinstance(draft, AttentionService) and draft.arrays.keys is not self.arrays.keys:
            return draft
        return None

    @property
    def may_leave_out(self) -> bool:
        """Not where it has hot neurons, which all threads compute."""
        return self._hot is None

    @property
    def fired_counts(self) -> np.ndarray:
        """How often each hot neuron fired in COUNT_FFN requests, in loading order."""
        return np.zeros(0, np.int64) if self._hot is None else self._hot.fired_counts

    def work_within(self, service: Service) -> None:
        """As `Service.work_within`; the two never attend at once, so segments are in one place."""
        super().work_within(service)
        assert isinstance(service, AttentionService)
        self._outer = service

    def prepare(self, layout: ArenaLayout) -> None:
        """Allocate the workspace of kernels, for up to KERNEL_TOKENS tokens."""
        if self._hot is not None:
            self._hot.work_within(self)
            self._hot.prepare(layout)
        tokens, width = min(KERNEL_TOKENS, layout.max_tokens), layout.width
        most_positions = layout.pages_a_slot * PAGE_POSITIONS
        numbers = self.arrays.numbers
        heads_size = int((numbers["num_heads"] * numbers["head_dim"]).max())
        widest = int(numbers["heads_size"].max())
        num_heads = int(numbers["num_heads"].max())
        num_inputs = int(self.arrays.qkv.heights.sum(axis=1).max(initial=0))
        has_latent = self.arrays.latent.keys.nbytes > 0
        qkv_size = heads_size + int(numbers["head_dim"].max()) if has_latent else num_inputs
        most_inputs = max(width, widest, int(numbers["query_rank"].max()))
        group = numbers["num_heads"] // np.maximum(numbers["num_kv_heads"], 1)
        rows = max(_ROWS, int(group.max()))
        segments = -(-most_positions // SEGMENT_POSITIONS)
        size = self.arrays.per_layer.context_norm.size
        if self._outer is None:
            part_sums = aligned_zeros((tokens, segments, heads_size))
            part_totals = aligned_zeros((tokens, segments, num_heads, 2))
        else:
            outer = self._outer._scratch
            part_sums, part_totals = outer.part_sums, outer.part_totals
        self._scratch = AttentionScratch(
            residual=aligned_zeros((self.num_threads, tokens, width)),
            normed=aligned_zeros((self.num_threads, tokens, width)),
            qkv=aligned_zeros((tokens, qkv_size)),
            heads=aligned_zeros((tokens * widest,)),
            scores=aligned_zeros((self.num_threads, rows, SEGMENT_POSITIONS)),
            sums=aligned_zeros((self.num_threads, rows, int(numbers["head_dim"].max()))),
            totals=aligned_zeros((self.num_threads, rows, 2)),
            part_sums=part_sums,
            part_totals=part_totals,
            projected=aligned_zeros((tokens, self.arrays.project_out.shape[0])),
            router_logits=aligned_zeros((tokens, int(numbers["num_experts"].max()))),
            gates=aligned_zeros((tokens, size)),
            contexts=aligned_zeros((tokens, size)),
            mixed=aligned_zeros((self.num_threads, tokens, size)),
            parts=aligned_zeros((tokens, width if size else 0)),
            inputs=activation_space(
                self.num_threads, tokens, max(most_inputs, self.arrays.project_out.shape[0])
            ),
            state_gates=aligned_zeros((tokens, self.arrays.recurrent.gates.shape[1])),
            recurrent=recurrent_scratch(self.num_threads, self.arrays.recurrent_numbers),
            counters=new_block_counters(
                NUM_COUNTERS + self.arrays.qkv.places.shape[1], self.num_threads
            ),
            latent=latent_space(self.num_threads, tokens, num_inputs, numbers)
            if has_latent
            else None,
        )
        self._prompt_scratch = None
        self._most_tokens = layout.max_tokens

    def _prompts(self) -> PromptScratch:
        """Work space of the compiled loop for prompts, made at the first call, in any thread."""
        from hotcold.actors.cpu.matmul import loop_tokens
        from hotcold.numba_kernels.prefill.serve_prefill import new_prompt_scratch

        with self._making:
            if self._prompt_scratch is None:
                qkv = self._scratch.qkv.shape[1]
                heads = int(self.arrays.numbers["heads_size"].max())
                self._prompt_scratch = new_prompt_scratch(
                    self.num_threads,
                    self._most_tokens,
                    (self._scratch.normed.shape[2], qkv, heads),
                    self.arrays,
                    partial(loop_tokens, self.num_threads, self._most_tokens),
                )
            return self._prompt_scratch

    def prepare_prompts(self) -> None:
        """Compile the loop for prompts, and what hot neurons' prompts take."""
        self._serve_prompts(0, NO_NUMBER, NO_PROMPTS)
        if self._hot is not None:
            self._hot.prepare_prompts()
        if self._drafting is not None:
            self._drafting.prepare_prompts()

    def release(self) -> None:
        """Nothing: no thread but the service's own serves requests."""

    def serve(self, thread: int, seen: int) -> int:
        """Run the loop of `numba_kernels.loops.attention_loop`, and the kernel of hot neurons.

        While there are prompts, that of `numba_kernels.prefill.serve_prefill`.
        """
        while True:
            seen = self._serve_attention(thread, seen)
            if seen == 0:
                return seen
            if self._is_for_prompts():
                following = self._serve_prompts(thread, seen - 1, self._scratch.normed.shape[1])
                if following in (0, seen):
                    return following
                seen = following - 1  # it has yet to be served
                continue
            if not self._is_for_hot():
                return seen
            started = clock_ns()
            assert self._hot is not None
            self._hot.answer_share(thread)
            buffers, number, threads = self.buffers, np.int32(seen), self.num_threads
            finish_request(
                buffers.cells, buffers.requests, buffers.replies, NO_COUNTERS, self.index, number,
                threads, started,
            )  # fmt: skip

    def _is_for_hot(self) -> bool:
        request = self.buffers.requests[self.index]
        if is_for_others(request, self.weights):
            return False
        return self._hot is not None and request[OPERATION] in (FFN, COUNT_FFN)

    def _is_for_prompts(self) -> bool:
        request = self.buffers.requests[self.index]
        if is_for_others(request, self.weights):
            return False
        count, operation = request[NUM_TOKENS], request[OPERATION]
        if operation == HEAD:
            count -= request[FIRST_LOGIT]
        return operation in (ATTENTION, HEAD) and bool(count > self._scratch.normed.shape[1])

    def _serve_prompts(self, thread: int, seen: int, most_tokens: int) -> int:
        from hotcold.numba_kernels.prefill.serve_prefill import serve_prompts

        return int(
            serve_prompts(
                thread,
                self.num_threads,
                self.index,
                np.int32(seen),
                self.weights,
                most_tokens,
                self.buffers,
                self._compiled,
                self._prompts(),
            )
        )

    def _serve_attention(self, thread: int, seen: int) -> int:
        return int(
            serve_attention(
                thread,
                self.num_threads,
                self.index,
                np.int32(seen),
                self.weights,
                self.buffers,
                self._compiled,
                self._scratch,
            )
        )

    def answer_in_python(self) -> None:
        """No request is served here. Errors: ValueError, always."""
        operation = self.buffers.requests[self.index, OPERATION]
        if operation == ATTENTION:
            raise ValueError("prefill takes consecutive positions of one sequence")
        raise ValueError(f"{self.name} knows no operation {operation}")


def load_attention_service(
    spec: ServiceSpec, config: ModelConfig, on_bytes: OnBytes, touch: Touch | None = None
) -> AttentionService:
    """Read attention, head and hot neurons; allocate the KV cache.

    `touch` gets each new matrix before it is filled.
    Errors:  CheckpointError, MemoryBudgetError, UsageError
    """
    if spec.cache is None:
        raise ValueError(f"the {spec.name} service has no KV cache")
    checkpoint, dtype = Checkpoint(spec.path, spec.keeps_pages), spec.system.weight_dtype
    attention = load_attention(checkpoint, config, dtype=dtype, on_bytes=on_bytes, touch=touch)
    head = load_head(checkpoint, config, dtype=dtype, on_bytes=on_bytes, touch=touch)
    arrays = attention_arrays(config, spec.cache, attention, head)
    hot = None if spec.neuron_ids is None else load_cpu_service(spec, config, on_bytes, touch)
    service = AttentionService(spec.name, spec.index, spec.num_threads, arrays, hot)
    if spec.drafts is not None and spec.draft is not None:
        layer, dtype = config.draft_layer(), spec.draft.system.weight_dtype
        attention = load_attention(checkpoint, layer, dtype=dtype, on_bytes=on_bytes, touch=touch)
        with TensorReader(checkpoint, on_bytes, requested_dtype(dtype), touch) as reader:
            head = read_draft_head(reader, layer, head)
        arrays = attention_arrays(layer, spec.cache, attention, head)
        service.draft = AttentionService(spec.name, spec.index, spec.num_threads, arrays)
    elif spec.draft is not None:
        dtype = spec.draft.system.weight_dtype
        attention = load_attention(checkpoint, config, dtype=dtype, on_bytes=on_bytes, touch=touch)
        head = load_head(checkpoint, config, dtype=dtype, on_bytes=on_bytes, touch=touch)
        arrays = arrays._replace(**vars(attention), **vars(head))
        hot_draft = None if hot is None else hot.draft
        assert hot_draft is None or isinstance(hot_draft, CpuService)
        service.draft = AttentionService(spec.name, spec.index, spec.num_threads, arrays, hot_draft)
    return service
