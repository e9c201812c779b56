"""`LayerSpec`: one layer told once, as the reference and all backends compute it.

`ModelConfig.layers` makes them from what config.json says. Compiled kernels get the numbers as a
record (`numba_kernels/layer_record.py`), filled by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

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
    has_sinks: bool = False  # a learned logit a head joins the softmax, and has no value


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How a layer's router chooses experts for a token, and what they weigh.

    logits = router . x (+ bias); scores = `score` of them; the experts with the largest score, or
    score + selection bias, are chosen; their weights are the scores without that bias, divided by
    their sum with `norms_chosen`, times `scale`. Of equal ones the first is chosen.
    """

    num_experts: int  # the first blocks of the FFN; a further block is the shared expert
    num_chosen: int
    score: Literal["softmax", "sigmoid", "softmax_of_chosen"]  # of_chosen: among their logits only
    norms_chosen: bool
    scale: float = 1.0
    has_bias: bool = False
    has_selection_bias: bool = False
    # With several groups of equally many experts, a group's score is the sum of its two largest,
    # and only experts of the `num_chosen_groups` best are chosen.
    num_groups: int = 1
    num_chosen_groups: int = 1
    reads: Literal["ffn_input", "layer_input"] = "ffn_input"  # or hidden, before attention, no norm
    gates_shared: bool = False  # the shared expert weighs sigmoid(w . ffn_input), else 1


@dataclass(frozen=True, kw_only=True)
class FfnSpec:
    """A layer's FFN: blocks of neurons, each with rows of gate, up (with `has_gate`) and down."""

    activation_fn: ActivationFn
    activation_threshold: float  # of fatrelu; the limit of clamped_silu
    has_gate: bool  # False: down(fn(first)); True: down(fn(gate) * up)
    has_biases: bool
    # Neurons of each block: one in a dense layer; else of each expert, then of a shared expert.
    block_sizes: tuple[int, ...]
    router: RouterSpec | None = None  # None: all blocks, with weight 1
    # A neuron of an expert counts only where fc2 . relu(fc1 . ffn_input) is above 0.
    has_predictors: bool = False

    @property
    def num_neurons(self) -> int:
        """Neurons of all blocks."""
        return sum(self.block_sizes)


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
    order, vectors = _order(config), _vector_sizes(config)
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
        for layer, ffn in enumerate(_ffns(config))
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
        has_sinks=config.has_sinks,
    )


def _ffns(config: ModelConfig) -> list[FfnSpec]:
    """The FFN of each layer; layers that are alike share one."""
    shared: dict[str, Any] = {
        "activation_fn": config.activation_fn,
        "activation_threshold": config.activation_threshold,
        "has_gate": config.has_gate,
        "has_biases": config.ffn_bias,
    }
    dense = FfnSpec(block_sizes=(config.ffn_size,), **shared)
    experts = config.experts
    if experts is None:
        return [dense] * config.num_layers
    sizes = (experts.size,) * experts.router.num_experts
    sizes += (experts.shared_size,) if experts.shared_size else ()
    routed = FfnSpec(
        block_sizes=sizes,
        router=experts.router,
        has_predictors=experts.has_predictors,
        **shared,
    )
    dense_layers = set(experts.dense_layers)
    return [dense if layer in dense_layers else routed for layer in range(config.num_layers)]


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
        "sinks": config.num_heads * config.has_sinks,
    }
