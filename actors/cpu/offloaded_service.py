"""The CPU service of a model larger than memory: neurons are read from storage when needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hotcold.actors.cpu.cpu_service import CpuService, new_service
from hotcold.actors.cpu.unit_store import ExpertStore, NeuronStore
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.messages import ServiceSpec
from hotcold.actors.protocol.offloaded_neurons import OffloadedShare
from hotcold.actors.protocol.stripes import runs_of_stripes, shard_stripes
from hotcold.model.bundles.bundle_file import read_bundle_file
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.mapped_file import forget_pages
from hotcold.model.weights.check import stored_config
from hotcold.model.weights.ffn import load_ffn_biases
from hotcold.model.weights.tensor_reader import OnBytes
from hotcold.numba_kernels.decode.activations import Activation
from hotcold.numba_kernels.ffn_arrays import ExpertPredictors, FfnArrays, TransposedArrays
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL
from hotcold.numba_kernels.loops.mailbox import (
    CELLS_A_SERVICE,
    COUNT_FFN,
    LAYER,
    NEXT_LAYER,
    NUM_COMPUTED,
    NUM_TOKENS,
    NUM_UNWANTED,
    NUM_UP,
    OPERATION,
    WEIGHS_BLOCKS,
    decode_thresholds,
)
from hotcold.predictors.predictor_file import read_predictors
from hotcold.predictors.read_ahead import shard_predictors

if TYPE_CHECKING:
    from hotcold.actors.cpu.cpu_service import Prompts


class OffloadedService(CpuService):
    """`CpuService` over a store, which reads rows when they are needed."""

    def __init__(
        self,
        name: str,
        index: int,
        num_threads: int,
        store: NeuronStore | ExpertStore,
        function: Activation,
        buckets: np.ndarray | None = None,
        predictors: ExpertPredictors | None = None,
    ) -> None:
        """Serve what `store` holds; the rest as `CpuService`."""
        super().__init__(name, index, num_threads, store.arrays, function, buckets, predictors)
        self.store, self.source = store, store.stored

    def prepare(self, layout: ArenaLayout) -> None:
        """As `CpuService`; what is read ahead by may be in the arena."""
        super().prepare(layout)
        self.store.attach(self.buffers, self.index)
        self.source = self.store.stored

    def serve(self, thread: int, seen: int) -> int:
        """Run `serve_ffn`: prompts are left to Python, which awaits what they need."""
        return self.serve_few(thread, seen)

    def prepare_prompts(self) -> None:
        """Compile the kernels of prompts: for no tokens."""
        nothing = slice(0, 0)
        weights, counts = self.buffers.block_weights[nothing], self.fired_counts[nothing]
        firsts = self.arrays.starts[0, :-1]
        prompts = self.new_prompts(self.num_threads, 1)  # others may be in use
        self._compute(nothing, (self.arrays, 0, firsts), weights, True, counts, prompts)

    def answer_in_python(self) -> None:
        """A prompt; the next layer is read while attention computes it."""
        request = self.buffers.requests[self.index]
        if not self.is_for_prompts():
            super().answer_in_python()
            return
        layer, following = request[[LAYER, NEXT_LAYER]].tolist()
        wanted = slice(int(request[NUM_UNWANTED]), int(request[NUM_TOKENS]))
        weighed = wanted if request[WEIGHS_BLOCKS] else slice(0, 0)
        weights = self.buffers.block_weights[weighed]
        first, last = self.rows_of(layer)
        counts = self.fired_counts[first : last if request[OPERATION] == COUNT_FFN else first]
        skips = bool(decode_thresholds.py_func(request).gate >= 0)
        arrays, index = self.store.layer_arrays(layer, weights, self.together)
        blocks = self.store.block_firsts(layer)
        rows = arrays, index, arrays.starts[index, :-1] if blocks is None else blocks
        self._compute(wanted, rows, weights, skips, counts, self.prompts())
        self.buffers.replies[self.index, [NUM_COMPUTED, NUM_UP]] = last - first
        if following not in (0, layer + 1):
            self.store.request_layer(following - 1)

    def _compute(
        self,
        wanted: slice,
        rows: tuple[FfnArrays | TransposedArrays, int, np.ndarray],
        weights: np.ndarray,
        skips: bool,
        counts: np.ndarray,
        prompts: Prompts,
    ) -> None:
        """The FFN of the `wanted` tokens; rows: arrays, as which layer, where blocks begin."""
        from hotcold.numba_kernels.ffn.prompt_ffn import multiplies_ups, prompt_gates, prompt_sums

        (arrays, layer, firsts), buffers, waits = rows, self.buffers, skips or counts.size > 0
        (scratch, predictors), num_threads = prompts, self.num_threads
        x, cells = buffers.ffn_input[wanted], np.zeros(CELLS_A_SERVICE * INTS_A_CELL, np.int32)
        out, more = buffers.partials[self.index, wanted], buffers.more_partials[self.index]

        def gates(thread: int) -> None:
            prompt_gates(
                thread, num_threads, cells, 0, x, arrays, layer, firsts, weights, waits, predictors,
                scratch, self.function,
            )  # fmt: skip

        def sums(thread: int) -> None:
            prompt_sums(
                thread, num_threads, cells, 0, x, arrays, layer, weights, skips, counts, scratch,
                self.function, out, more[:, wanted.start :],
            )  # fmt: skip

        if multiplies_ups.py_func(self.function, waits):
            self.store.await_up_down()
        self.together(gates)
        self.store.await_up_down()
        self.together(sums)

    def explain(self, service: int) -> str:
        """Why the last read failed, if it did; else as `Service.explain`."""
        return self.store.failure() or super().explain(service)

    def release(self) -> None:
        """End the reading threads too."""
        super().release()
        self.store.close()


def load_offloaded_service(
    spec: ServiceSpec,
    config: ModelConfig,
    share: OffloadedShare,
    predictors: Path | None,
    on_bytes: OnBytes,
) -> OffloadedService:
    """A shard whose rows are in the bundle file; as `actors.cpu.cpu_service.load_cpu_service`.

    With the file `predictors` the next layer's neurons are read ahead; with `spec.among` (see
    `shard_predictors`) by those of its bits that the driver copies into the arena.
    Errors:  CheckpointError, UsageError; ArtifactError where the file is not this model's;
             ServiceError where it cannot be read
    """
    if spec.storage is None:
        raise ValueError(f"{spec.name} has no neurons on storage")
    bundles, neuron_ids = Path(spec.storage.path), spec.neuron_ids or []
    checkpoint, identity = Checkpoint(spec.path, spec.keeps_pages), ModelIdentity.of(spec.path)
    dtype, transposed = spec.system.weight_dtype, spec.system.down_transposed
    stored = stored_config(checkpoint, config, dtype, down_transposed=transposed)
    geometry = BundleGeometry.of(stored)
    file = read_bundle_file(bundles, geometry, identity)
    forget_pages(bundles)
    weights = load_ffn_biases(checkpoint, config, neuron_ids, spec.has_down_bias, dtype)
    weights.stripes = shard_stripes(
        weights.starts, weights.neuron_ids, config, spec.stripes, of_outputs=transposed
    )
    threads, has_norms = spec.num_threads, spec.system.has_down_norms
    store: NeuronStore | ExpertStore
    if config.experts is not None:
        layers = [layer.ffn for layer in config.layers]
        runs = runs_of_stripes(config, spec.stripes) if transposed else None
        store = ExpertStore(file, layers, weights, share, threads, on_bytes, has_norms, runs)
    else:
        ahead = None
        if predictors is not None:
            found = read_predictors(predictors, identity, config, keeps_pages=False)
            ahead = shard_predictors(found, neuron_ids, spec.among)
        store = NeuronStore(file, weights, share, threads, on_bytes, ahead, has_norms)
    return new_service(OffloadedService, spec, config, store, weights.predictors, on_bytes)
