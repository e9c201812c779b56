"""`LayerSpec`: one layer told once, as the reference and all backends compute it.

`ModelConfig.layers` makes them from what config.json says. Compiled kernels get the numbers as a
record (`numba_kernels/layer_record.py`), filled by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hotcold.model.config.activations import ActivationFn
from hotcold.model.config.layer_order import (
    OUTPUT_NORM,
    PARALLEL,
    PARALLEL_SHARED_NORM,
    POST_NORM,
    PRE_AND_OUTPUT_NORM,
    PRE_NORM,
    LayerOrder,
)

if TYPE_CHECKING:
    from hotcold.model.config.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """A layer's attention; learned vectors are in `LayerSpec.vectors`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: int  # an index of ModelConfig.ropes; -1: heads are not rotated
    window: int  # positions that a token attends to, its own included; 0: all
    scale: float  # of scores
    softcap: float  # of scores; 0: none


@dataclass(frozen=True, kw_only=True)
class FfnSpec:
    """A layer's FFN: blocks of neurons, each with rows of gate, up (with `has_gate`) and down."""

    activation_fn: ActivationFn
    activation_threshold: float  # of fatrelu
    has_gate: bool  # False: down(fn(first)); True: down(fn(gate) * up)
    has_biases: bool
    block_sizes: tuple[int, ...]  # neurons of each block; a dense model has one


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer; `vectors` are sizes of its `LayerVectors`, 0 for none."""

    attention: AttentionSpec
    order: LayerOrder
    ffn: FfnSpec
    norm_kind: Literal["rmsnorm", "layernorm"]
    norm_eps: float
    residual_scale: float  # of what attention and FFN add to the residual
    vectors: Mapping[str, int]

    @property
    def adds_late(self) -> bool:
        """Whether attention's output is normed or scaled before it is added to the residual."""
        return self.order.norms_added or self.residual_scale != 1


def layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return the layers of a model."""
    order, ffn, vectors = _order(config), _ffn(config), _vector_sizes(config)
    return tuple(
        LayerSpec(
            attention=_attention(config, layer),
            order=order,
            ffn=ffn,
            norm_kind=config.norm_kind,
            norm_eps=config.norm_eps,
            residual_scale=config.residual_scale,
            vectors=vectors,
        )
        for layer in range(config.num_layers)
    )


def _order(config: ModelConfig) -> LayerOrder:
    if config.post_norm:
        return POST_NORM
    if config.parallel_ffn:
        return PARALLEL if config.has_ffn_norm else PARALLEL_SHARED_NORM
    if config.has_output_norms:
        return PRE_AND_OUTPUT_NORM if config.has_norm else OUTPUT_NORM
    return PRE_NORM


def _attention(config: ModelConfig, layer: int) -> AttentionSpec:
    ropes = config.layer_ropes or (0 if config.ropes else -1,) * config.num_layers
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope=ropes[layer],
        window=config.windows[layer] if config.windows else 0,
        scale=config.attention_scale or config.head_dim**-0.5,
        softcap=config.attention_softcap,
    )


def _ffn(config: ModelConfig) -> FfnSpec:
    return FfnSpec(
        activation_fn=config.activation_fn,
        activation_threshold=config.activation_threshold,
        has_gate=config.has_gate,
        has_biases=config.ffn_bias,
        block_sizes=(config.ffn_size,),
    )


def _vector_sizes(config: ModelConfig) -> dict[str, int]:
    """The sizes of `LayerVectors`, by name."""
    hidden, kv_size = config.hidden_size, config.num_kv_heads * config.head_dim
    q_norm, k_norm = {
        "": (0, 0),
        "head": (config.head_dim, config.head_dim),
        "full": (config.attention_size, kv_size),
    }[config.qk_norm]
    return {
        "norm_weight": hidden * config.has_norm,
        "norm_bias": hidden * (config.has_norm and config.norm_bias),
        "ffn_norm_weight": hidden * config.has_ffn_norm,
        "ffn_norm_bias": hidden * (config.has_ffn_norm and config.norm_bias),
        "attention_norm_weight": hidden * config.has_output_norms,
        "q_norm_weight": q_norm,
        "k_norm_weight": k_norm,
        "qkv_bias": config.qkv_rows * config.attention_bias,
        "out_bias": hidden * config.out_bias,
    }
