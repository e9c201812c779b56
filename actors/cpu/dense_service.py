"""The CPU service where no neuron is chosen beforehand: down projections as the file has them."""

from hotcold.actors.cpu.cpu_service import CpuService, new_service
from hotcold.actors.protocol.messages import ServiceSpec
from hotcold.actors.protocol.stripes import runs_of_stripes, shard_stripes
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.down_outputs import down_lengths, read_down_outputs
from hotcold.model.weights.ffn import read_ffn, read_gates
from hotcold.model.weights.tensor_reader import OnBytes, TensorReader, Touch
from hotcold.numba_kernels.ffn_arrays import NO_NORMS, NO_STRIPES, TransposedArrays


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
        weights = read_ffn(reader, config, ids, spec.has_down_bias, has_matrices=False)
        gates, ups = read_gates(reader, config, weights)
        stripes = shard_stripes(
            weights.starts, weights.neuron_ids, config, spec.stripes, of_outputs=True
        )
        down = read_down_outputs(reader, config, ids, runs_of_stripes(config, spec.stripes))
    arrays = TransposedArrays(
        weights.starts,
        gates,
        ups,
        down,
        weights.gate_bias,
        weights.up_bias,
        weights.down_bias,
        down_lengths(down) if spec.system.has_down_norms else NO_NORMS,
        NO_STRIPES,
        *stripes,
    )
    return new_service(CpuService, spec, config, arrays, None, on_bytes, touch)
