"""Which tensors of a checkpoint hold a layer's neurons, in every layout of experts.

`ffn_tensors` finds them by their names alone; nothing is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hotcold.model.config.families import tensor_names
from hotcold.model.config.families.tensor_names import ExpertNames, LayerNames, layout_in
from hotcold.model.config.layer_spec import FfnSpec
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.gguf.file_names import is_gguf


@dataclass(frozen=True)
class NeuronRows:
    """A tensor with a row, or one number, for each neuron of a block, or of several blocks.

    Neuron i of a block has row begin + step * i of its `num_rows`. With `stack` the tensor is that
    many matrices, of one block each: (stack, num_rows, width). With `by_columns` its columns are
    what rows are otherwise.
    """

    name: str
    block: int  # the first
    size: int  # neurons of each block
    num_rows: int
    begin: int = 0
    step: int = 1
    stack: int = 0
    by_columns: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks whose neurons the tensor has."""
        return max(1, self.stack)

    def rows_of(self, neurons: np.ndarray) -> np.ndarray:
        """Return the rows of neurons that are counted from the first block's first.

        Rows of stacked matrices are counted on. Shapes and dtypes:  (N,) int32
        """
        block, own = np.divmod(neurons, np.int32(max(1, self.size)))
        return (block * self.num_rows + self.begin + self.step * own).astype(np.int32)


@dataclass
class FfnTensors:
    """A layer's tensors by role, each role's in the order of blocks.

    `down_biases` are (name, block, stack): vectors (d,), or (stack, d). `absent` names tensors that
    the config does not allow for.
    """

    gate: list[NeuronRows] = field(default_factory=list)
    up: list[NeuronRows] = field(default_factory=list)
    down: list[NeuronRows] = field(default_factory=list)
    gate_bias: list[NeuronRows] = field(default_factory=list)
    up_bias: list[NeuronRows] = field(default_factory=list)
    down_biases: list[tuple[str, int, int]] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)


def ffn_tensors(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> FfnTensors:
    """Return the tensors that hold the neurons of `layer`."""
    names, spec = tensor_names(config).of_layer(layer), config.layers[layer].ffn
    if spec.router is None:
        return _dense_tensors(config, names, spec.num_neurons)
    layout = expert_layout(checkpoint, names)
    found, num_experts = FfnTensors(), spec.router.num_experts
    size = spec.block_sizes[0]
    is_one = layout.gate == layout.up
    _add_gates(found.gate, found.up, layout.gate, layout.up, spec, layout)
    for name, stack, block in _of_experts(layout.down, num_experts):
        found.down.append(
            NeuronRows(name, block, size, size, stack=stack, by_columns=not layout.is_transposed)
        )
    if spec.has_biases:
        _add_gates(found.gate_bias, found.up_bias, layout.gate_bias, layout.up_bias, spec, layout)
        for name, stack, block in _of_experts(layout.down_bias, num_experts):
            found.down_biases.append((name, block, stack))
    else:
        biases = layout.gate_bias, layout.up_bias, layout.down_bias
        found.absent += [name.format(0) for name in biases if name]
    each = (layout.gate, layout.down) if is_one else (layout.gate, layout.up, layout.down)
    found.absent += [name.format(num_experts) for name in each if "{}" in name]
    _add_shared(found, spec, layout)
    return found


def _dense_tensors(config: ModelConfig, names: LayerNames, size: int) -> FfnTensors:
    found = FfnTensors()
    if not size:
        return found
    num_rows, first_up = (2 * size, size) if config.fused_gate_up else (size, 0)
    found.gate = [NeuronRows(f"{names.gate}.weight", 0, size, num_rows)]
    found.down = [NeuronRows(f"{names.down}.weight", 0, size, size, by_columns=True)]
    if config.has_gate:
        found.up = [NeuronRows(f"{names.up}.weight", 0, size, num_rows, first_up)]
    if config.ffn_bias:
        found.gate_bias = [NeuronRows(f"{names.gate}.bias", 0, size, size)]
        found.down_biases = [(f"{names.down}.bias", 0, 0)]
        if config.has_gate:
            found.up_bias = [NeuronRows(f"{names.up}.bias", 0, size, size)]
    else:
        found.absent.append(f"{names.gate}.bias")
    of_experts = [
        name for one in names.experts for name in (one.router, one.gate, one.up, one.down)
    ]
    found.absent += [name.format(0) for name in dict.fromkeys(of_experts) if name]
    return found


def _add_gates(
    gates: list[NeuronRows],
    ups: list[NeuronRows],
    gate: str,
    up: str,
    spec: FfnSpec,
    layout: ExpertNames,
) -> None:
    """Add the experts' tensors of gate and up: one for both where they have one name."""
    assert spec.router is not None
    size, num_experts = spec.block_sizes[0], spec.router.num_experts
    num_rows, up_begin, step = size, 0, 1
    if gate == up:
        num_rows, up_begin, step = (2 * size, 1, 2) if layout.alternates else (2 * size, size, 1)
    for rows, name, begin in ((gates, gate, 0), (ups, up, up_begin))[: 1 + spec.has_gate]:
        for each, stack, block in _of_experts(name, num_experts):
            rows.append(
                NeuronRows(each, block, size, num_rows, begin, step, stack, layout.is_transposed)
            )


def _add_shared(found: FfnTensors, spec: FfnSpec, layout: ExpertNames) -> None:
    """Add the shared expert's tensors; without one they must be absent."""
    assert spec.router is not None
    block = spec.router.num_experts
    if len(spec.block_sizes) == block:
        found.absent += [layout.shared_gate] if layout.shared_gate else []
        return
    size = spec.block_sizes[block]
    is_one = layout.shared_gate == layout.shared_up
    num_rows, up_begin = (2 * size, size) if is_one else (size, 0)
    found.gate.append(NeuronRows(layout.shared_gate, block, size, num_rows))
    if spec.has_gate:
        found.up.append(NeuronRows(layout.shared_up, block, size, num_rows, up_begin))
    found.down.append(NeuronRows(layout.shared_down, block, size, size, by_columns=True))


def _of_experts(name: str, num_experts: int) -> Iterator[tuple[str, int, int]]:
    """Yield (tensor, matrices stacked in it, first expert): one of all, or one each."""
    if "{}" not in name:
        yield name, num_experts, 0
        return
    for expert in range(num_experts):
        yield name.format(expert), 0, expert


def expert_layout(checkpoint: Checkpoint, names: LayerNames) -> ExpertNames:
    """Return the layout of a layer's experts; of an incomplete one that with most tensors there.

    Layouts of GGUF files are the last of a family's.
    """

    def num_found(layout: ExpertNames) -> int:
        each = (layout.router, layout.gate, layout.up, layout.down)
        return sum(checkpoint.has(name.format(0)) for name in each)

    found = layout_in(names.experts, checkpoint)
    if found is not None:
        return found
    return max(names.experts[:: -1 if is_gguf(checkpoint.path) else 1], key=num_found)
