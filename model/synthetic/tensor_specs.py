"""The tensors of a new checkpoint, with transformers' names, in the order of writing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hotcold.model.config.families import FAMILIES, tensor_names
from hotcold.model.config.families.tensor_names import ExpertNames, LayerNames, TensorNames
from hotcold.model.config.layer_spec import FfnSpec
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.safetensors_writer import TensorSpec
from hotcold.model.synthetic.experts import predictor_parts


def written_names(config: ModelConfig) -> TensorNames:
    """Return the names of the family's tensors, with its checkpoints' prefix."""
    names, prefix = tensor_names(config), FAMILIES[config.family].prefixes[0]
    return replace(
        names,
        tokens=prefix + names.tokens,
        layers=prefix + names.layers,
        final_norm=prefix + names.final_norm,
        positions=names.positions and prefix + names.positions,
        head="" if config.tied_embeddings else names.head,
    )


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """Return all tensors of the checkpoint, in the order of writing."""
    names, table = written_names(config), (config.vocab_size, config.hidden_size)
    specs = [TensorSpec(f"{names.tokens}.weight", table)]
    if names.positions:
        rows = config.max_positions + config.position_offset
        specs.append(TensorSpec(f"{names.positions}.weight", (rows, config.hidden_size)))
    for layer_id in range(config.num_layers):
        specs.extend(_layer_specs(config, names.of_layer(layer_id), layer_id))
    specs.extend(_norm_specs(config, names.final_norm))
    if names.head:
        specs.append(TensorSpec(f"{names.head}.weight", table))
    return specs


def _layer_specs(config: ModelConfig, names: LayerNames, layer_id: int) -> Iterator[TensorSpec]:
    hidden = config.hidden_size
    for norm in filter(None, (names.norm, names.ffn_norm)):
        yield from _norm_specs(config, norm)
    vectors = config.layers[0].vectors
    for norm, size in (
        (names.q_norm, vectors["q_norm_weight"]),
        (names.k_norm, vectors["k_norm_weight"]),
    ):
        if norm:
            yield TensorSpec(f"{norm}.weight", (size,))
    shapes = {name: (rows, hidden) for name, rows in zip(names.qkv, config.qkv_sizes, strict=True)}
    for name, shape in shapes.items():
        yield from _linear_specs(name, shape, config.attention_bias)
    yield from _linear_specs(names.out, (hidden, config.attention_size), config.out_bias)
    if config.has_sinks:
        yield TensorSpec(names.sinks, (config.num_heads,))
    spec = config.layers[layer_id].ffn
    if spec.router is not None:
        yield from _expert_specs(names.experts[0], spec, hidden)
        return
    ffn = config.ffn_size
    for name in filter(None, (names.gate, names.up)):
        yield from _linear_specs(name, (ffn, hidden), config.ffn_bias)
    yield from _linear_specs(names.down, (hidden, ffn), config.ffn_bias)


def _expert_specs(names: ExpertNames, spec: FfnSpec, hidden: int) -> Iterator[TensorSpec]:
    """The router; gate and up, and predictors, of all experts; their downs; biases after each."""
    assert spec.router is not None
    experts, size = spec.router.num_experts, spec.block_sizes[0]
    yield TensorSpec(names.router, (experts, hidden))
    if spec.router.has_bias:
        yield TensorSpec(names.router_bias, (experts,))
    if "{}" in names.gate:
        for expert in range(experts):
            for name in (names.gate, names.up):
                yield TensorSpec(name.format(expert), (size, hidden))
            if spec.has_predictors:
                parts = 2 * predictor_parts(hidden) + 2
                fc1, fc2 = (name.format(expert) for name in names.predictor)
                yield TensorSpec(fc1, (parts, hidden))
                yield TensorSpec(fc2, (size, parts))
        for expert in range(experts):
            yield TensorSpec(names.down.format(expert), (hidden, size))
        return
    yield TensorSpec(names.gate, (experts, hidden, 2 * size))
    yield TensorSpec(names.gate_bias, (experts, 2 * size))
    yield TensorSpec(names.down, (experts, size, hidden))
    yield TensorSpec(names.down_bias, (experts, hidden))


def _norm_specs(config: ModelConfig, name: str) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (config.hidden_size,))
    if config.norm_bias:
        yield TensorSpec(f"{name}.bias", (config.hidden_size,))


def _linear_specs(name: str, shape: tuple[int, int], has_bias: bool) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", shape)
    if has_bias:
        yield TensorSpec(f"{name}.bias", shape[:1])
