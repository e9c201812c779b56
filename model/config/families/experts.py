"""What families of mixtures of experts share: keys of config.json, layouts of tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from hotcold.model.config.families.family import MAX_WIDTH, num_layers
from hotcold.model.config.families.tensor_names import GGUF_EXPERTS, ExpertNames
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


def shared_in(block: str) -> dict[str, Any]:
    """Return names of the shared expert's tensors in `block`, as of `ExpertNames`."""
    return {f"shared_{name}": f"{block}.{name}_proj.weight" for name in ("gate", "up", "down")}


def layouts_of(named: ExpertNames, block: str = "mlp") -> tuple[ExpertNames, ...]:
    """Return a family's own layout, that of transformers 5, and those of GGUF files."""
    return (named, fused(named, block), *GGUF_EXPERTS)


def fused(layout: ExpertNames, block: str = "mlp") -> ExpertNames:
    """Return a layout with all experts in two tensors of `block`, gate's rows before up's."""
    gate_up = f"{block}.experts.gate_up_proj"
    return replace(layout, gate=gate_up, up=gate_up, down=f"{block}.experts.down_proj")
