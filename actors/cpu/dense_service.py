"""The CPU service where no neuron is chosen beforehand: down projections as the file has them."""

from hotcold.actors.cpu.cpu_service import CpuService, add_draft
from hotcold.actors.protocol.messages import ServiceSpec
from hotcold.actors.telemetry.snapshot import buckets_of
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.down_outputs import down_lengths, read_down_outputs
from hotcold.model.weights.ffn import read_ffn
from hotcold.model.weights.tensor_reader import OnBytes, TensorReader, Touch
from hotcold.numba_kernels.decode.activations import activation
from hotcold.numba_kernels.ffn_arrays import NO_NORMS, TransposedArrays


def load_dense_service(
    spec: ServiceSpec,
    config: ModelConfig,
    on_bytes: OnBytes,
    touch: Touch | None = None,
    max_rows: int | None = None,
) -> CpuService:
    """Read a run of each block's neurons; as `actors.cpu.cpu_service.load_cpu_service`.

    Errors:  CheckpointError
    """
    ids = spec.neuron_ids or []
    with TensorReader(Checkpoint(spec.path), on_bytes, None, touch, max_rows) as reader:
        weights = read_ffn(reader, config, ids, spec.has_down_bias, has_down=False)
        down = read_down_outputs(reader, config, ids)
    arrays = TransposedArrays(
        starts=weights.starts,
        gate=weights.gate,
        up=weights.up,
        down=down,
        gate_bias=weights.gate_bias,
        up_bias=weights.up_bias,
        down_bias=weights.down_bias,
        down_norms=down_lengths(down) if spec.system.has_down_norms else NO_NORMS,
    )
    buckets = buckets_of(config, ids)
    function = activation(config.activation_fn, config.activation_threshold)
    threads = spec.num_threads
    service = CpuService(spec.name, spec.index, threads, arrays, function, buckets)
    add_draft(service, spec, config, on_bytes, touch)
    return service
