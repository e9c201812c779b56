"""What families of mixtures of experts share: keys of config.json, layouts of tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from hotcold.model.config.families.family import MAX_WIDTH, num_layers
from hotcold.model.config.families.tensor_names import ExpertNames
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.layer_spec import RouterSpec

MAX_EXPERTS = 1 << 16  # of a layer
MAX_ALL_EXPERTS = 1 << 20  # of all layers together
# The number of experts: transformers 5 writes another of these than a family's own files have.
COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_router(
    reader: ConfigReader,
    experts_key: str,
    score: Literal["softmax", "sigmoid", "softmax_of_chosen"],
    norms_chosen: bool,
    chosen_key: str = "num_experts_per_tok",
    **others: Any,
) -> RouterSpec:
    """Return the router of `experts_key` experts, `chosen_key` of them for a token.

    Another of COUNT_KEYS may stand in place of `experts_key`.
    Errors:  ConfigError for none, too many, or more chosen than there are
    """
    found = {
        key: reader.integer(key, high=MAX_EXPERTS)
        for key in (experts_key, *COUNT_KEYS)
        if reader.has(key)
    }
    experts = next(iter(found.values()), 0) or reader.integer(experts_key, high=MAX_EXPERTS)
    for key, count in found.items():
        if count != experts:
            raise reader.fail(key, f"is {count} but {experts_key} is {experts}; keep one")
    layers = num_layers(reader)
    if experts * layers > MAX_ALL_EXPERTS:
        raise reader.fail(
            experts_key,
            f"is {experts} in {layers} layers; at most {MAX_ALL_EXPERTS} experts are supported",
        )
    return RouterSpec(
        num_experts=experts,
        num_chosen=reader.integer(chosen_key, high=experts),
        score=score,
        norms_chosen=norms_chosen,
        **others,
    )


def expert_size(reader: ConfigReader, key: str) -> int:
    """Return the neurons of an expert."""
    return reader.integer(key, high=MAX_WIDTH)


def stepped_dense_layers(reader: ConfigReader) -> tuple[int, ...]:
    """Return Qwen's layers without experts: mlp_only_layers, all but each decoder_sparse_step-th.

    Errors:  ConfigError for anything but numbers of layers
    """
    step = reader.integer("decoder_sparse_step", 1, high=1 << 20)
    named = reader.values.get("mlp_only_layers") or []
    if not isinstance(named, list) or any(type(layer) is not int for layer in named):
        raise reader.fail("mlp_only_layers", f"is {named!r:.60}; give a list of layers")
    return tuple(
        layer for layer in range(num_layers(reader)) if layer in named or (layer + 1) % step != 0
    )


def named_experts(
    block: str,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    **others: Any,
) -> ExpertNames:
    """Return the layout with three tensors an expert in `block`.experts.{}."""
    of_one = f"{block}.experts.{{}}."
    router = {"router": f"{block}.gate.weight"} | others
    return ExpertNames(
        gate=f"{of_one}{gate}.weight",
        up=f"{of_one}{up}.weight",
        down=f"{of_one}{down}.weight",
        **router,
    )


def fused(layout: ExpertNames, gate_up: str, down: str) -> ExpertNames:
    """Return a layout with all experts in two tensors, gate's rows before up's."""
    return replace(layout, gate=gate_up, up=gate_up, down=down)


_GGUF = ExpertNames(
    router="ffn_gate_inp.weight",
    gate="ffn_gate_exps.weight",
    up="ffn_up_exps.weight",
    down="ffn_down_exps.weight",
    router_bias="ffn_gate_inp.bias",
    selection_bias="exp_probs_b.bias",
    gate_bias="ffn_gate_exps.bias",
    up_bias="ffn_up_exps.bias",
    down_bias="ffn_down_exps.bias",
    shared_gate="ffn_gate_shexp.weight",
    shared_up="ffn_up_shexp.weight",
    shared_down="ffn_down_shexp.weight",
    shared_router="ffn_gate_inp_shexp.weight",
)
# Of GGUF files: three tensors; gate and up in one; one an expert, as before April 2024.
GGUF_EXPERTS = (
    _GGUF,
    replace(_GGUF, gate="ffn_gate_up_exps.weight", up="ffn_gate_up_exps.weight"),
    replace(_GGUF, gate="ffn_gate.{}.weight", up="ffn_up.{}.weight", down="ffn_down.{}.weight"),
)
