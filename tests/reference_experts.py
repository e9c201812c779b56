"""A mixture's FFN in float64: the router, the chosen experts, the shared expert.

Written from the families' own code and llama.cpp's build_moe_ffn, apart from kernels and loaders:
it reads a checkpoint's tensors by their names alone.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch.nn import functional

from hotcold.model.config.activations import activated, activated_up
from hotcold.model.config.families import tensor_names
from hotcold.model.config.families.tensor_names import ExpertNames, layout_in
from hotcold.model.config.layer_spec import FfnSpec, RouterSpec
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.numba_kernels.load.convert import to_float32

# MXFP4's sixteen numbers: OCP Microscaling Formats 1.0, E2M1; a sign bit, then the magnitude.
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
_MXFP4 = torch.cat([_E2M1, -_E2M1])


def experts_output(
    checkpoint: Checkpoint,
    config: ModelConfig,
    layer: int,
    ffn_input: torch.Tensor,
    layer_input: torch.Tensor,
) -> torch.Tensor:
    """Return the FFN of a layer: of its experts, or of its one block where it has none.

    layer_input: what a router reads that does not read ffn_input

    Shapes:  ffn_input, layer_input, result (T, d) float64
    """
    spec = config.layers[layer].ffn
    names = tensor_names(config).of_layer(layer)
    tensors = Tensors(checkpoint)
    if spec.router is None:
        if not spec.num_neurons:
            return torch.zeros_like(ffn_input)
        dense = (
            tensors.of(name and f"{name}.weight") for name in (names.gate, names.up, names.down)
        )
        return _expert(spec, ffn_input, *dense)
    layout = layout_in(names.experts, checkpoint)
    assert layout is not None, f"layer {layer} has no experts"
    x = ffn_input if spec.router.reads == "ffn_input" else layer_input
    if spec.router.scales_input:
        x = x * tensors.of(layout.router_scale) * x.shape[-1] ** -0.5
    weights = expert_weights(spec.router, *_router(tensors, layout, spec.router), x)
    if spec.router.scales_experts:
        weights = weights * tensors.of(layout.expert_scale)
    out = torch.zeros_like(ffn_input)
    for expert in range(spec.router.num_experts):
        chosen = weights[:, expert] != 0
        if chosen.any():
            parts = expert_tensors(tensors, layout, spec, expert)
            rows = _expert(spec, ffn_input[chosen], *parts)
            out[chosen] += weights[chosen, expert, None] * rows
    if len(spec.block_sizes) > spec.router.num_experts:
        out += _shared(tensors, layout, spec, ffn_input)
    return out


def expert_weights(
    spec: RouterSpec,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    selection_bias: torch.Tensor | None,
    x: torch.Tensor,
) -> torch.Tensor:
    """Return what each expert weighs for each token, 0 for those that are not chosen.

    Shapes:  router (E, d), biases (E,), x (T, d), result (T, E)
    """
    logits = functional.linear(x, router, bias)
    scores = {
        "softmax": logits.softmax(-1),
        "sigmoid": logits.sigmoid(),
        "softmax_of_chosen": logits,
    }[spec.score]
    choice = scores if selection_bias is None else scores + selection_bias
    if spec.num_groups > 1:
        groups = choice.unflatten(-1, (spec.num_groups, -1))
        largest = groups.topk(1 if selection_bias is None else 2, dim=-1).values.sum(-1)
        best = largest.topk(spec.num_chosen_groups, dim=-1).indices
        is_out = torch.ones(len(x), spec.num_groups, dtype=torch.bool).scatter_(1, best, False)
        choice = groups.masked_fill(is_out[..., None], -torch.inf).flatten(1)
    chosen = choice.argsort(dim=-1, descending=True, stable=True)[:, : spec.num_chosen]
    weights = scores.gather(1, chosen)
    if spec.score == "softmax_of_chosen":
        weights = weights.softmax(-1)
    if spec.norms_chosen:
        weights = weights / weights.sum(-1, keepdim=True)
    return torch.zeros_like(logits).scatter_(1, chosen, weights * spec.scale)


def _router(
    tensors: Tensors, layout: ExpertNames, spec: RouterSpec
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    bias = tensors.of(layout.router_bias) if spec.has_bias else None
    selection = tensors.of(layout.selection_bias) if spec.has_selection_bias else None
    return tensors.of(layout.router), bias, selection


def _expert(
    spec: FfnSpec,
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    down: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    predictor: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """One expert of x (T, d); gate and up (I, d), down (d, I)."""
    name, limit = spec.activation_fn, spec.activation_threshold
    h = activated(name, functional.linear(x, gate, gate_bias), limit)
    if up is not None:
        h = h * activated_up(name, functional.linear(x, up, up_bias), limit)
    if predictor is not None:
        first, second = predictor
        h = h * (functional.linear(functional.linear(x, first).relu(), second) > 0)
    return functional.linear(h, down, down_bias)


def _shared(tensors: Tensors, layout: ExpertNames, spec: FfnSpec, x: torch.Tensor) -> torch.Tensor:
    assert spec.router is not None
    gate, up = tensors.of(layout.shared_gate), tensors.of(layout.shared_up)
    if layout.shared_gate == layout.shared_up:
        gate, up = gate.chunk(2)
    out = _expert(spec, x, gate, up, tensors.of(layout.shared_down))
    if spec.router.gates_shared:
        out = out * (x @ tensors.of(layout.shared_router).flatten()).sigmoid()[:, None]
    return out


def expert_tensors(tensors: Tensors, layout: ExpertNames, spec: FfnSpec, expert: int) -> tuple:
    """An expert's gate, up, down, their biases, its predictor."""
    gate, up, down = (
        tensors.of_expert(name, expert) for name in (layout.gate, layout.up, layout.down)
    )
    if layout.is_transposed:
        gate, up, down = gate.T, up.T, down.T
    gate, up = _apart(layout, gate, up, layout.gate == layout.up)
    biases: tuple[torch.Tensor | None, ...] = (None, None, None)
    if spec.has_biases:
        names = (layout.gate_bias, layout.up_bias, layout.down_bias)
        of_gate, of_up, of_down = (tensors.of_expert(name, expert) for name in names)
        biases = (*_apart(layout, of_gate, of_up, names[0] == names[1]), of_down)
    predictor = None
    if spec.has_predictors:
        predictor = tuple(tensors.of_expert(name, expert) for name in layout.predictor)
    return gate, up, down, *biases, predictor


def _apart(
    layout: ExpertNames, gate: torch.Tensor, up: torch.Tensor, is_one: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if not is_one:
        return gate, up
    if layout.alternates:
        return gate[::2], gate[1::2]
    first, second = gate.chunk(2)
    return first, second


class Tensors:
    """A checkpoint's tensors in float64."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def of(self, name: str) -> torch.Tensor:
        """The whole tensor; none without a name, as up of an FFN of two matrices."""
        return self._values(name, None) if name else cast(torch.Tensor, None)

    def of_expert(self, name: str, expert: int) -> torch.Tensor:
        """An expert's tensor, or its part of all experts' tensor."""
        stacked = name and "{}" not in name
        return self._values(name, expert) if stacked else self.of(name.format(expert))

    def _values(self, name: str, part: int | None) -> torch.Tensor:
        whole = slice(None) if part is None else part
        if name.endswith("_blocks"):
            # Each group of 32 weights has 16 bytes here, and one among the scales.
            *matrices, num_bytes = self._checkpoint.shape(name)
            groups = *matrices, num_bytes // 17
            blocks, scales = (
                self._checkpoint.stored_bytes(name.removesuffix("blocks") + kind).reshape(shape)
                for kind, shape in (("blocks", (*groups, 16)), ("scales", groups))
            )
            return _mxfp4(blocks[whole], scales[whole])
        array = self._checkpoint.array(name)[whole]
        return torch.from_numpy(to_float32(np.array(array))).double()


def _mxfp4(blocks: np.ndarray, scales: np.ndarray) -> torch.Tensor:
    """Rows of MXFP4: blocks (..., B, 16) uint8, two weights a byte, low bits first.

    scales (..., B) are powers of two, with 127 added; result (..., 32 B).
    """
    codes = torch.from_numpy(np.stack([blocks & 15, blocks >> 4], axis=-1).astype(np.int64))
    powers = torch.from_numpy(np.exp2(scales.astype(np.float64) - 127))
    values = _MXFP4[codes] * powers[..., None, None]
    return values.flatten(-3)  # (..., B, 16, 2)
