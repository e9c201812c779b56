"""Names of a checkpoint's tensors, by role; each family fills them in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class ExpertNames:
    """Tensors of a layer's experts in one layout, whole names; "" where there is none.

    {} is an expert's number; a name without it is of all experts, stacked: (E, rows, columns).
    Where gate and up have one name, its rows are gate's, then up's.
    """

    router: str
    gate: str
    up: str
    down: str
    router_bias: str = ""
    selection_bias: str = ""
    gate_bias: str = ""
    up_bias: str = ""
    down_bias: str = ""
    shared_gate: str = ""
    shared_up: str = ""
    shared_down: str = ""
    shared_router: str = ""  # (d,) or (1, d): its product's sigmoid weighs the shared expert
    predictor: tuple[str, ...] = ()  # fc1 and fc2 of each expert
    alternates: bool = False  # rows of the tensor of gate and up are gate, up, gate, up, ...
    is_transposed: bool = False  # (E, columns, rows) instead

    def below(self, prefix: str) -> ExpertNames:
        """Return the names with `prefix` before each."""
        return _below(self, prefix)


def layout_in(layouts: Sequence[ExpertNames], has: Callable[[str], bool]) -> ExpertNames | None:
    """Return the layout that a checkpoint has, None for no experts; `has` says which tensors."""
    return next(
        (one for one in layouts if has(one.gate.format(0)) and has(one.down.format(0))), None
    )


def _below(names: Any, prefix: str) -> Any:
    def full(name: Any) -> Any:
        if isinstance(name, tuple):
            return tuple(full(each) for each in name)
        return prefix + name if isinstance(name, str) and name else name

    return replace(names, **{f.name: full(getattr(names, f.name)) for f in fields(names)})


@dataclass(frozen=True)
class LayerNames:
    """Modules of one layer, without ".weight" and ".bias"; "" where there is none."""

    norm: str
    qkv: tuple[str, ...]  # q, k, v; or one fused module
    out: str
    ffn_norm: str
    gate: str
    up: str  # gate's name where one module holds both
    down: str
    attention_norm: str = ""  # of attention's output
    ffn_output_norm: str = ""
    q_norm: str = ""
    k_norm: str = ""
    # PowerInfer's predictors, in checkpoints that have them.
    predictor: tuple[str, ...] = ("mlp.predictor.fc1", "mlp.predictor.fc2")

    sinks: str = ""  # a tensor without ".weight", but in GGUF files
    # Layouts of a mixture's FFN: a checkpoint has one of them. gate, up, down are dense layers'.
    experts: tuple[ExpertNames, ...] = ()

    def below(self, prefix: str) -> LayerNames:
        """Return the names with `prefix` before each."""
        experts = tuple(names.below(prefix) for names in self.experts)
        return replace(_below(replace(self, experts=()), prefix), experts=experts)


@dataclass(frozen=True)
class TensorNames:
    """Modules of the whole model, without a checkpoint's prefix; "" where there is none."""

    tokens: str
    layers: str  # prefix of layer {}
    layer: LayerNames
    final_norm: str
    positions: str = ""
    project_in: str = ""
    project_out: str = ""
    head: str = "lm_head"

    def of_layer(self, layer_id: int) -> LayerNames:
        """Return the names of layer `layer_id`."""
        return self.layer.below(self.layers.format(layer_id))

    def with_layer(self, **changes: Any) -> TensorNames:
        """Return the names with some of a layer's replaced."""
        return replace(self, layer=replace(self.layer, **changes))


LLAMA_NAMES = TensorNames(
    tokens="embed_tokens",
    layers="layers.{}.",
    layer=LayerNames(
        norm="input_layernorm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.o_proj",
        ffn_norm="post_attention_layernorm",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
    ),
    final_norm="norm",
)
