"""The tensors of a new checkpoint, with transformers' names, in the order of writing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hotcold.model.config.families import FAMILIES, tensor_names
from hotcold.model.config.families.tensor_names import LayerNames, TensorNames
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.safetensors_writer import TensorSpec


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
        specs.extend(_layer_specs(config, names.of_layer(layer_id)))
    specs.extend(_norm_specs(config, names.final_norm))
    if names.head:
        specs.append(TensorSpec(f"{names.head}.weight", table))
    return specs


def _layer_specs(config: ModelConfig, names: LayerNames) -> Iterator[TensorSpec]:
    hidden, ffn = config.hidden_size, config.ffn_size
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
    shapes[names.out] = (hidden, config.attention_size)
    for name, shape in shapes.items():
        yield from _linear_specs(name, shape, config.attention_bias)
    for name in filter(None, (names.gate, names.up)):
        yield from _linear_specs(name, (ffn, hidden), config.ffn_bias)
    yield from _linear_specs(names.down, (hidden, ffn), config.ffn_bias)


def _norm_specs(config: ModelConfig, name: str) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (config.hidden_size,))
    if config.norm_bias:
        yield TensorSpec(f"{name}.bias", (config.hidden_size,))


def _linear_specs(name: str, shape: tuple[int, int], has_bias: bool) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", shape)
    if has_bias:
        yield TensorSpec(f"{name}.bias", shape[:1])
