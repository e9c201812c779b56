"""The CPU service of a model larger than memory: neurons are read from storage when needed."""

from collections.abc import Callable
from pathlib import Path

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
from hotcold.numba_kernels.loops.mailbox import LAYER, NEXT_LAYER
from hotcold.predictors.predictor_file import read_predictors
from hotcold.predictors.read_ahead import shard_predictors


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

    def answer_in_python(self) -> None:
        """As `CpuService`; the next layer is read while attention computes the prompt."""
        super().answer_in_python()
        layer, following = self.buffers.requests[self.index, [LAYER, NEXT_LAYER]].tolist()
        if following not in (0, layer + 1):
            self.store.request_layer(following - 1)

    def layer_arrays(self, layer: int) -> tuple[FfnArrays | TransposedArrays, int]:
        """Arrays with what a prompt needs of the layer. Errors: ServiceError.

        Up and down rows may still be in flight until `await_up_down` returns.
        """

        def together(phase: Callable[[int], None]) -> None:
            with (matmul := self.matmul()).at_once():
                matmul.then(phase)

        return self.store.layer_arrays(layer, self.prompt_weights(), together)

    def block_firsts(self, layer: int) -> np.ndarray | None:
        """As `CpuService`."""
        return self.store.block_firsts(layer)

    def await_up_down(self) -> None:
        """Return when up and down rows of `layer_arrays` are loaded. Errors: ServiceError."""
        self.store.await_up_down()

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
