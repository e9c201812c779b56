"""The arena: one zeroed piece of shared memory for all that the driver and services exchange.

The driver puts it into Ray's object store once; every actor of the host maps the same pages. What
`ray.get` returns is marked read-only, but its pages are mapped shared and writable, so the buffers
are views made from its address.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL
from hotcold.numba_kernels.loops.mailbox import (
    CELLS_A_SERVICE,
    NUM_BUCKETS,
    NUM_COUNTS,
    NUM_GROUPS,
    NUM_ORDER,
    NUM_REPLY_WORDS,
    NUM_REQUEST_WORDS,
    SharedBuffers,
)

_ALIGNMENT = 4096
_BUNDLES = "bundles"


@dataclass(frozen=True)
class ArenaLayout:
    """Sizes of the buffers: S services, T tokens a step, width d, N neurons a layer, R logit rows;
    sequences at once, KV cache pages of each at most, and layers (for neuron counts).
    """

    num_services: int
    max_tokens: int
    width: int
    max_neurons: int
    vocab_size: int
    max_logits: int
    num_slots: int
    pages_a_slot: int
    num_layers: int = 1
    layer_embeddings: int = 0  # numbers of a token's embeddings that layers have of their own
    num_outputs: int = 1  # sums that a service passes on at most, of its neurons
    num_blocks: int = 0  # of a layer's neurons, in a mixture of experts
    num_guessed: int = 0  # tokens of a step whose next layer's experts are guessed
    num_buckets: int = NUM_BUCKETS  # in which a layer's neurons are counted
    predictor_words: int = 0  # of 64 bits, where the driver and services share predictors
    state_pages_a_slot: int = 0  # of recurrent layers, whose pages are of fewer positions
    gpu_predicts: bool = False  # which of CPU services' neurons fire
    bundle_bytes: int = 0  # of each of a CPU service's two places for neurons to upload to a GPU

    def _parts(self) -> list[tuple[str, type, tuple[int, ...]]]:
        s, t, d = self.num_services, self.max_tokens, self.width
        pages_a_slot = max(self.pages_a_slot, self.state_pages_a_slot)
        cold_layers = self.num_layers if self.gpu_predicts else 0
        return [
            ("cells", np.int32, (s * CELLS_A_SERVICE * INTS_A_CELL,)),
            ("requests", np.int64, (s, NUM_REQUEST_WORDS)),
            ("replies", np.int64, (s, NUM_REPLY_WORDS)),
            ("positions", np.int32, (t,)),
            ("slots", np.int32, (t,)),
            ("page_tables", np.int32, (NUM_GROUPS, self.num_slots, pages_a_slot)),
            ("hidden", np.float32, (t, d)),
            ("embedded", np.float32, (t, d if self.layer_embeddings else 0)),
            ("layer_embeddings", np.float32, (t, self.layer_embeddings)),
            ("ffn_residual", np.float32, (t, d)),
            ("ffn_input", np.float32, (t, d)),
            ("active_ids", np.int32, (s, self.max_neurons)),
            ("active_masks", np.uint32, (s, self.max_neurons)),
            ("block_weights", np.float32, (t, self.num_blocks)),
            ("block_tokens", np.int32, (self.num_layers, self.num_blocks)),
            ("guessed_weights", np.float32, (self.num_guessed, self.num_blocks)),
            ("partials", np.float32, (s, t, d)),
            ("more_partials", np.float32, (s, self.num_outputs - 1, t, d)),
            ("logits", np.float32, (self.max_logits, self.vocab_size)),
            ("neuron_counts", np.uint32, (s, self.num_layers, self.num_buckets, NUM_COUNTS)),
            ("counted_steps", np.uint32, (s, self.num_layers)),
            ("block_misses", np.uint32, (s, self.num_layers, self.num_blocks)),
            ("sum_order", np.int32, (NUM_ORDER,)),
            ("cold_ids", np.int32, (cold_layers, self.max_neurons)),
            ("cold_bounds", np.int32, (cold_layers, s)),
            ("predictor_bits", np.uint64, (self.predictor_words,)),
            (_BUNDLES, np.uint8, (s, 2, self.bundle_bytes)),
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole arena."""
        return _ALIGNMENT + sum(_padded(kind, shape) for _, kind, shape in self._parts())

    @property
    def predictor_bytes(self) -> int:
        """Bytes of the arena that predictors take."""
        return _padded(np.uint64, (self.predictor_words,))

    def new_arena(self) -> np.ndarray:
        """A zeroed array, for the object store or for one process."""
        return np.zeros(self.num_bytes, np.uint8)

    def buffers(self, arena: np.ndarray) -> SharedBuffers:
        """Writable views of the arena's parts, which keep it alive.

        Errors:  ValueError if the arena is smaller than this layout
        """
        if arena.nbytes < self.num_bytes:
            raise ValueError(f"the arena has {arena.nbytes} bytes, the layout {self.num_bytes}")
        views = self._views(arena)
        del views[_BUNDLES]
        return SharedBuffers(**views)

    def bundles(self, arena: np.ndarray) -> np.ndarray:
        """The places for neurons to upload: (S, 2, bundle_bytes), which no kernel reads."""
        return self._views(arena)[_BUNDLES]

    def _views(self, arena: np.ndarray) -> dict[str, np.ndarray]:
        at = arena.ctypes.data + -arena.ctypes.data % _ALIGNMENT
        views: dict[str, np.ndarray] = {}
        for name, kind, shape in self._parts():
            num_bytes = int(np.prod(shape)) * np.dtype(kind).itemsize
            if not num_bytes:
                views[name] = np.empty(shape, kind)
                continue
            memory: Any = (ctypes.c_uint8 * num_bytes).from_address(at)
            memory.owner = arena
            items: np.ndarray = np.frombuffer(memory, kind)
            views[name] = items.reshape(shape)
            at += _padded(kind, shape)
        return views


def _padded(kind: type, shape: tuple[int, ...]) -> int:
    num_bytes = int(np.prod(shape)) * np.dtype(kind).itemsize
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
