"""The GPU service on device="cpu": attention, its KV cache, the norms and the head.

It runs by compiled loops on all cores. Hot neurons, where a plan puts some here, are a CPU
service's work in this one's threads. `actors.attention.cuda.service` is the same service on a GPU.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.actors.attention.rope_cache import inv_freq
from hotcold.actors.cpu.cpu_service import CpuService, load_cpu_service
from hotcold.actors.cpu.lazy_matmul import LazyMatmul
from hotcold.actors.exchange.service import Service
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.messages import CacheSpec
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS
from hotcold.model.config.model_config import ModelConfig, RopeConfig
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import AttentionWeights, load_attention
from hotcold.model.weights.embedding import HeadWeights, load_head
from hotcold.model.weights.memory import aligned_empty
from hotcold.model.weights.tensor_reader import Touch
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS, rope_table
from hotcold.numba_kernels.decode.norm import norm_kind
from hotcold.numba_kernels.decode.vectors import empty_vectors
from hotcold.numba_kernels.serve.doorbell import clock_ns
from hotcold.numba_kernels.serve.mailbox import (
    ATTENTION,
    COUNT_FFN,
    FFN,
    HEAD,
    NO_COUNTERS,
    NUM_TOKENS,
    OPERATION,
    finish_request,
)
from hotcold.numba_kernels.serve.serve_attention import (
    NUM_COUNTERS,
    AttentionArrays,
    AttentionScratch,
    AttentionShape,
    serve_attention,
)
from hotcold.numba_kernels.serve.work_stealing import new_block_counters


class AttentionService(Service):
    """Computes attention and head for every token of a step."""

    def __init__(
        self,
        name: str,
        index: int,
        num_threads: int,
        shape: AttentionShape,
        arrays: AttentionArrays,
        hot: CpuService | None = None,
    ) -> None:
        """Serve `arrays`; see `load_gpu_service` for a service from a checkpoint.

        `hot` has the hot neurons, with this service's index and as many threads.
        """
        super().__init__(name, index, num_threads)
        self.shape = shape
        self.arrays = arrays
        self._hot = hot

    @property
    def fired_counts(self) -> np.ndarray:
        """Of the hot neurons; see `CpuService`."""
        return np.zeros(0, np.int64) if self._hot is None else self._hot.fired_counts

    def prepare(self, layout: ArenaLayout) -> None:
        """Work space for kernels of up to KERNEL_TOKENS tokens."""
        qkv, out, head = self.arrays.qkv, self.arrays.out, self.arrays.head
        dtypes = [matrix.dtype for matrix in (qkv.first, qkv.second, out, head)]
        self._matmul = LazyMatmul(self.num_threads, dtypes, self.thread_cores)
        if self._hot is not None:
            self._hot.work_within(self)
            self._hot.prepare(layout)
        tokens, width = min(KERNEL_TOKENS, layout.max_tokens), layout.width
        most_positions = layout.pages_a_slot * PAGE_POSITIONS
        shape = self.shape
        attention_size = shape.num_heads * shape.head_dim
        kv_size = shape.num_kv_heads * shape.head_dim
        self._scratch = AttentionScratch(
            residual=np.zeros((self.num_threads, tokens, width), np.float32),
            normed=np.zeros((self.num_threads, tokens, width), np.float32),
            qkv=np.zeros((tokens, attention_size + 2 * kv_size), np.float32),
            heads=np.zeros((tokens, attention_size), np.float32),
            scores=np.zeros((self.num_threads, most_positions), np.float32),
            projected=np.zeros((tokens, self.arrays.project_out.shape[0]), np.float32),
            inputs=empty_vectors(
                self.num_threads,
                tokens,
                max(width, attention_size, self.arrays.project_out.shape[0]),
            ),
            counters=new_block_counters(NUM_COUNTERS, self.num_threads),
        )

    def prepare_prompts(self) -> None:
        """See `Service.prepare_prompts`."""
        import hotcold.actors.attention.prompt_attention  # noqa: F401

        self._matmul.get()
        if self._hot is not None:
            self._hot.prepare_prompts()

    def release(self) -> None:
        """End the threads of the matmul."""
        self._matmul.close()
        if self._hot is not None:
            self._hot.release()

    def serve(self, thread: int, seen: int) -> int:
        """Run the loop of `numba_kernels.serve.serve_attention`, and a kernel for hot neurons."""
        while True:
            seen = self._serve_attention(thread, seen)
            if not self._asks_for_hot():
                return seen
            started = clock_ns()
            assert self._hot is not None
            self._hot.answer_share(thread)
            cells, replies = self.buffers.cells, self.buffers.replies
            number, threads = np.int32(seen), self.num_threads
            finish_request(cells, replies, NO_COUNTERS, self.index, number, threads, started)

    def _asks_for_hot(self) -> bool:
        request = self.buffers.requests[self.index]
        few = request[NUM_TOKENS] <= self._scratch.normed.shape[1]
        return self._hot is not None and request[OPERATION] == FFN and bool(few)

    def _serve_attention(self, thread: int, seen: int) -> int:
        return int(
            serve_attention(
                thread,
                self.num_threads,
                self.index,
                np.int32(seen),
                self.buffers,
                self.shape,
                self.arrays,
                self._scratch,
            )
        )

    def answer_in_python(self) -> None:
        """Attention, head or hot neurons for many tokens, by torch."""
        from hotcold.actors.attention.prompt_attention import (  # they import torch
            dense_attention,
            dense_head,
        )

        operation = self.buffers.requests[self.index, OPERATION]
        if operation == ATTENTION:
            dense_attention(self._matmul.get(), self.index, self.buffers, self.shape, self.arrays)
        elif operation == HEAD:
            dense_head(self._matmul.get(), self.index, self.buffers, self.shape, self.arrays)
        elif self._hot is not None and operation in (FFN, COUNT_FFN):
            self._hot.answer_in_python()
        else:
            raise ValueError(f"{self.name} knows no operation {operation}")


def attention_shape(config: ModelConfig) -> AttentionShape:
    """The numbers of `config` that the loops need."""
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_kind=norm_kind(config.norm_kind),
        norm_epsilon=np.float32(config.norm_eps),
        order=config.layer_order,
        scale=np.float32(config.score_scale),
        softcap=np.float32(config.attention_softcap),
        residual_scale=np.float32(config.residual_scale),
        logit_softcap=np.float32(config.logit_softcap),
    )


def cache_array(config: ModelConfig, cache: CacheSpec, num_layers: int) -> np.ndarray:
    """Keys or values of so many layers, which take memory as they are written."""
    shape = num_layers, cache.num_pages, config.num_kv_heads, PAGE_POSITIONS, config.head_dim
    dtype = np.float32 if cache.dtype == "float32" else np.uint16
    return aligned_empty(shape, dtype, huge_pages=False)


def position_arrays(config: ModelConfig, cache: CacheSpec) -> dict[str, Any]:
    """What layers need to know of positions: those of `AttentionArrays`, by their names.

    rope_tables (R, P, 2, half) float32 cosines and sines; layer_ropes, windows (L,) int32
    """
    tables = [_rope_array(rope, config.head_dim, cache.num_positions) for rope in config.ropes]
    layers = range(config.num_layers)
    return {
        "rope_tables": np.stack(tables) if tables else np.empty((0, 0, 2, 0), np.float32),
        "layer_ropes": np.array([config.rope_of_layer(layer) for layer in layers], np.int32),
        "windows": np.array([config.window_of_layer(layer) for layer in layers], np.int32),
    }


def attention_arrays(
    config: ModelConfig, cache: CacheSpec, attention: AttentionWeights, head: HeadWeights
) -> AttentionArrays:
    """The weights of all layers with room for the KV cache, and what is known of positions."""
    return AttentionArrays(
        **vars(attention),
        **vars(head),
        keys=cache_array(config, cache, config.num_layers),
        values=cache_array(config, cache, config.num_layers),
        **position_arrays(config, cache),
    )


def _rope_array(rope: RopeConfig, head_dim: int, num_positions: int) -> np.ndarray:
    """Of longrope's two lists of factors a system takes the one that fits its longest sequence."""
    table = rope_table(inv_freq(rope, head_dim, rope.is_long(num_positions)), num_positions)
    return table if rope.table_scale == 1 else table * np.float32(rope.table_scale)


def load_gpu_service(
    path: Path,
    config: ModelConfig,
    index: int,
    num_threads: int,
    cache: CacheSpec,
    on_bytes: Callable[[int], None],
    weight_dtype: str = "",
    touch: Touch | None = None,
    neuron_ids: Sequence[np.ndarray] | None = None,
    has_down_norms: bool = False,
    keeps_pages: bool = True,
) -> AttentionService:
    """Read attention, head and the neurons `neuron_ids`; make room for the KV cache.

    `touch` takes each new matrix before it is filled. Without `keeps_pages` what was read of the
    files is not left in the page cache.

    Errors:  CheckpointError, MemoryBudgetError, UsageError
    """
    checkpoint = Checkpoint(path, keeps_pages)
    attention = load_attention(
        checkpoint, config, dtype=weight_dtype, on_bytes=on_bytes, touch=touch
    )
    head = load_head(checkpoint, config, dtype=weight_dtype, on_bytes=on_bytes, touch=touch)
    arrays = attention_arrays(config, cache, attention, head)
    hot = None
    if neuron_ids is not None:
        hot = load_cpu_service(
            path,
            config,
            index,
            num_threads,
            neuron_ids,
            False,
            on_bytes,
            weight_dtype,
            touch,
            has_down_norms,
        )
    return AttentionService("gpu", index, num_threads, attention_shape(config), arrays, hot)
