"""Routers of a mixture of experts: float32, whatever the matrices' format."""

from __future__ import annotations

import numpy as np

from hotcold.model.config.families import tensor_names
from hotcold.model.config.families.tensor_names import ExpertNames
from hotcold.model.config.layer_spec import RouterSpec
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.weights.ffn_tensors import expert_layout
from hotcold.model.weights.tensor_reader import TensorReader
from hotcold.numba_kernels.router_arrays import RouterArrays, no_routers


def read_routers(reader: TensorReader, config: ModelConfig, layers: range) -> RouterArrays:
    """Read the routers of `layers`: rows, biases, and what weighs shared experts.

    Errors:  CheckpointError for a tensor that is missing, misshapen or not finite, or that
             config.json does not allow for
    """
    if config.experts is None:
        return no_routers(len(layers))
    spec, hidden = config.experts.router, config.hidden_size
    counts = [_num_experts(config, layer) for layer in layers]
    starts = np.append(0, np.cumsum(counts)).astype(np.int64)
    total = int(starts[-1])
    found = RouterArrays(
        starts=starts,
        rows=reader.empty((total, hidden), np.dtype(np.float32)),
        bias=np.zeros(total * spec.has_bias, np.float32),
        selection_bias=np.zeros(total * spec.has_selection_bias, np.float32),
        shared=np.zeros((len(layers), hidden * spec.gates_shared), np.float32),
        input_scale=np.zeros((len(layers), hidden * spec.scales_input), np.float32),
        expert_scale=np.zeros(total * spec.scales_experts, np.float32),
    )
    for index, layer in enumerate(layers):
        if counts[index]:
            layout = expert_layout(reader.checkpoint, tensor_names(config).of_layer(layer))
            _read_router(reader, spec, layout, found, index)
    return found


def _num_experts(config: ModelConfig, layer: int) -> int:
    router = config.layers[layer].ffn.router
    return 0 if router is None else router.num_experts


def _read_router(
    reader: TensorReader, spec: RouterSpec, layout: ExpertNames, found: RouterArrays, index: int
) -> None:
    part = slice(int(found.starts[index]), int(found.starts[index + 1]))
    rows = found.rows[part]
    reader.require_floats(layout.router, rows.shape)
    reader.rows(layout.router, len(rows), rows)
    biases = (
        (spec.has_bias, layout.router_bias, found.bias),
        (spec.has_selection_bias, layout.selection_bias, found.selection_bias),
        (spec.scales_experts, layout.expert_scale, found.expert_scale),
    )
    for is_there, name, values in biases:
        if is_there:
            values[part] = _vector(reader, name, spec.num_experts)
        elif name:
            reader.refuse(name)
    if spec.scales_input:
        width = found.input_scale.shape[1]
        found.input_scale[index] = _vector(reader, layout.router_scale, width) * width**-0.5
    elif layout.router_scale:
        reader.refuse(layout.router_scale)
    if spec.gates_shared:
        found.shared[index] = _vector(reader, layout.shared_router, found.shared.shape[1])
    elif layout.shared_router:
        reader.refuse(layout.shared_router)


def _vector(reader: TensorReader, name: str, width: int) -> np.ndarray:
    """A vector (width,) that is stored as such or as a matrix of one row."""
    is_row = len(reader.checkpoint.shape(name)) == 2
    return reader.vector(name, (1, width) if is_row else (width,)).reshape(-1)
