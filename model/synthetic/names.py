"""The tensors of a random-weight checkpoint: transformers' names, in the order they are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from model.files.safetensors_writer import TensorSpec
from model.synthetic.shape import SyntheticShape


@dataclass(frozen=True)
class LayerNames:
    """Module names of one layer, without `.weight` and `.bias`."""

    attention_norm: str
    ffn_norm: str  # the same as attention_norm where one norm feeds both
    qkv: tuple[str, ...]  # q, k, v, or one fused module
    attention_out: str
    gate: str
    up: str | None
    down: str


@dataclass(frozen=True)
class OuterNames:
    """Module names outside of the layers; None where the family has no such module."""

    embedding: str
    positions: str | None
    final_norm: str
    head: str | None  # None: the embedding is the head


OPT_POSITION_OFFSET = 2  # rows before position 0's


def outer_names(shape: SyntheticShape) -> OuterNames:
    """Return the names outside of the layers."""
    if shape.family == "llama":
        return OuterNames("model.embed_tokens", None, "model.norm", "lm_head")
    if shape.family == "opt":
        stem = "model.decoder"
        return OuterNames(
            f"{stem}.embed_tokens", f"{stem}.embed_positions", f"{stem}.final_layer_norm", None
        )
    return OuterNames("transformer.word_embeddings", None, "transformer.ln_f", None)


def layer_names(shape: SyntheticShape, layer_id: int) -> LayerNames:
    """Return the names of layer `layer_id`."""
    if shape.family == "llama":
        stem = f"model.layers.{layer_id}"
        return LayerNames(
            attention_norm=f"{stem}.input_layernorm",
            ffn_norm=f"{stem}.post_attention_layernorm",
            qkv=tuple(f"{stem}.self_attn.{part}_proj" for part in "qkv"),
            attention_out=f"{stem}.self_attn.o_proj",
            gate=f"{stem}.mlp.gate_proj",
            up=f"{stem}.mlp.up_proj",
            down=f"{stem}.mlp.down_proj",
        )
    if shape.family == "opt":
        stem = f"model.decoder.layers.{layer_id}"
        return LayerNames(
            attention_norm=f"{stem}.self_attn_layer_norm",
            ffn_norm=f"{stem}.final_layer_norm",
            qkv=tuple(f"{stem}.self_attn.{part}_proj" for part in "qkv"),
            attention_out=f"{stem}.self_attn.out_proj",
            gate=f"{stem}.fc1",
            up=None,
            down=f"{stem}.fc2",
        )
    stem = f"transformer.h.{layer_id}"
    norms = ("ln_attn", "ln_mlp") if shape.has_grouped_kv else ("input_layernorm",) * 2
    return LayerNames(
        attention_norm=f"{stem}.{norms[0]}",
        ffn_norm=f"{stem}.{norms[1]}",
        qkv=(f"{stem}.self_attention.query_key_value",),
        attention_out=f"{stem}.self_attention.dense",
        gate=f"{stem}.mlp.dense_h_to_4h",
        up=None,
        down=f"{stem}.mlp.dense_4h_to_h",
    )


def qkv_rows(shape: SyntheticShape) -> tuple[int, ...]:
    """Return the number of rows of each module of LayerNames.qkv."""
    query_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if shape.family == "falcon":
        return (query_rows + 2 * kv_rows,)
    return (query_rows, kv_rows, kv_rows)


def tensor_specs(shape: SyntheticShape) -> list[TensorSpec]:
    """Return every tensor of the checkpoint, in the order it is written."""
    outer = outer_names(shape)
    specs = [TensorSpec(f"{outer.embedding}.weight", (shape.vocab, shape.hidden))]
    if outer.positions:
        rows = shape.context + OPT_POSITION_OFFSET
        specs.append(TensorSpec(f"{outer.positions}.weight", (rows, shape.hidden)))
    for layer_id in range(shape.layers):
        specs.extend(_layer_specs(shape, layer_names(shape, layer_id)))
    specs.extend(_norm_specs(shape, outer.final_norm))
    if outer.head:
        specs.append(TensorSpec(f"{outer.head}.weight", (shape.vocab, shape.hidden)))
    return specs


def _layer_specs(shape: SyntheticShape, names: LayerNames) -> Iterator[TensorSpec]:
    for norm in dict.fromkeys((names.attention_norm, names.ffn_norm)):
        yield from _norm_specs(shape, norm)
    for name, rows in zip(names.qkv, qkv_rows(shape), strict=True):
        yield from _linear_specs(shape, name, rows, shape.hidden)
    yield from _linear_specs(shape, names.attention_out, shape.hidden, shape.heads * shape.head_dim)
    yield from _linear_specs(shape, names.gate, shape.ffn, shape.hidden)
    if names.up:
        yield from _linear_specs(shape, names.up, shape.ffn, shape.hidden)
    yield from _linear_specs(shape, names.down, shape.hidden, shape.ffn)


def _norm_specs(shape: SyntheticShape, name: str) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (shape.hidden,))
    if shape.family != "llama":
        yield TensorSpec(f"{name}.bias", (shape.hidden,))


def _linear_specs(
    shape: SyntheticShape, name: str, rows: int, columns: int
) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (rows, columns))
    if shape.family == "opt":
        yield TensorSpec(f"{name}.bias", (rows,))
