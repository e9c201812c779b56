"""`LayerSpec`: one layer told once, as the reference and all backends compute it.

`ModelConfig.layers` makes them from what config.json says. Compiled kernels get the numbers as a
record (`numba_kernels/layer_record.py`), filled by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from hotcold.model.config.activations import ActivationFn
from hotcold.model.config.layer_order import LayerOrder

if TYPE_CHECKING:
    from hotcold.model.config.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """The heads of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def heads_size(self) -> int:
        """Numbers of all query heads of a token: the width of the output projection's rows."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Numbers of a token's keys, and of its values."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention: all heads' keys and values of one vector a position.

    latent = norm(first `rank` of W_a . x); key of head h = [K_h . latent, rotated rest of W_a . x]
    value of head h = V_h . latent; query = [q_plain, rotated q_rope]
    The cache has [rotated, latent] of each position, and queries are [rotated q_rope,
    transposed K_h . q_plain]: scores are the same, and V_h is applied to what attention makes.
    Source:  DeepSeek-V2, arXiv 2405.04434, section 2.1
    """

    rank: int
    query_rank: int  # of the vector that all heads' queries are made of; 0: of x itself
    rope_size: int
    plain_size: int  # of a query head's part that is not rotated
    value_size: int

    @property
    def query_size(self) -> int:
        """Numbers of a query head."""
        return self.rope_size + self.plain_size


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(HeadSizes):
    """A layer's attention; learned vectors are in `LayerSpec.vectors`."""

    rope: int  # an index of ModelConfig.ropes; -1: heads are not rotated
    query_rope: int  # the same for queries, whose cosines and sines may grow with the position
    window: int  # positions that a token attends to, its own included; 0: all
    scale: float  # of scores
    softcap: float  # of scores; 0: none
    has_sinks: bool = False  # a learned logit a head joins the softmax, and has no value
    kv_layer: int  # whose keys and values it attends to: its own, or those of a layer before
    has_keys: bool  # of its own
    has_gate: bool = False  # a head's output times sigmoid of a row more of the query's tensor
    norms_rotated: bool = False  # q and k are normed after they are rotated
    # With it there is one KV head, whose rows in the cache are keys and values at once.
    latent: LatentSpec | None = None

    @property
    def rotated_head_dim(self) -> int:
        """Numbers of the vectors that rope takes."""
        return self.head_dim if self.latent is None else self.latent.rope_size


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec:
    """What a layer has in place of attention, whose state is of a fixed size.

    delta: a gated delta net, a state of dk x dv numbers for each value head. A short convolution
    and silu, then for each token, with q and k of length 1,
        state = exp(g) state, state += beta k (v - k . state), out = norm(q . state) silu(z)
    mamba: Mamba-2; the same but for
        state += dt k v, out = norm((q . state + skip v) silu(z)), of all value heads of a key head
    conv: out = c * conv(b * x) of rows b | c | x alone; its values have heads in name, to be shared
    among threads, and it has no keys.
    """

    kind: Literal["delta", "mamba", "conv"]
    num_key_heads: int
    num_value_heads: int  # a multiple of num_key_heads
    key_dim: int
    value_dim: int
    conv_size: int  # positions that the convolution reads, its own included
    has_conv_bias: bool = False
    # Whether value head h has key head h % num_key_heads, as in GGUF files; else those of a key
    # head stand side by side.
    has_tiled_heads: bool = False

    @property
    def num_channels(self) -> int:
        """Numbers of a token that are convolved: its queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.values_size

    @property
    def values_size(self) -> int:
        """Numbers of a token's values: the width of the output projection's rows."""
        return self.num_value_heads * self.value_dim

    @property
    def num_states(self) -> int:
        """Heads that have a state, a decay and gates."""
        return 0 if self.kind == "conv" else self.num_value_heads

    @property
    def num_gates(self) -> int:
        """Gates of a token: b and a of each head, or dt."""
        return self.num_states * (2 if self.kind == "delta" else 1)

    @property
    def norm_size(self) -> int:
        """Weights of the norm: of a head's output, or of all."""
        return {"delta": self.value_dim, "mamba": self.values_size, "conv": 0}[self.kind]

    @property
    def num_others(self) -> int:
        """Rows of the inputs' tensor that are gates'."""
        return self.num_gates if self.kind == "mamba" else 0


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
    # With several groups of equally many experts, a group's score is its largest, with a selection
    # bias the sum of its two largest; only experts of the `num_chosen_groups` best are chosen.
    num_groups: int = 1
    num_chosen_groups: int = 1
    # Or hidden, before attention, no norm; or ffn_residual, normed without weights.
    reads: Literal["ffn_input", "layer_input", "normed_residual"] = "ffn_input"
    scales_input: bool = False  # by a learned vector / sqrt(d), which loading multiplies into rows
    scales_experts: bool = False  # a learned number of each expert multiplies its weight
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
    """One layer; `vectors` are sizes of its `LayerVectors`, 0 for none.

    input_sizes: rows of each tensor that is multiplied with the layer's normed input: q, k and v,
    or the fused one; of a recurrent layer q | k | v, and z
    A recurrent layer's attention has no heads.
    """

    attention: AttentionSpec
    recurrent: RecurrentSpec | None = None
    input_sizes: tuple[int, ...]
    order: LayerOrder
    ffn: FfnSpec
    norm_kind: Literal["rmsnorm", "layernorm"]
    norm_eps: float
    residual_scale: float  # of what attention and FFN add to the residual
    vectors: Mapping[str, int]

    @property
    def num_inputs(self) -> int:
        """Rows of the tensors of `input_sizes` together."""
        return sum(self.input_sizes)

    @property
    def mixed_size(self) -> int:
        """Numbers of a token before the output projection."""
        if self.order.ends_pair:
            return 0
        own = self.attention
        if self.recurrent is not None:
            return self.recurrent.values_size
        return own.heads_size if own.latent is None else own.num_heads * own.latent.value_size

    @property
    def heads_size(self) -> int:
        """Numbers of a token that attention's heads make, or the recurrence in their place."""
        return self.attention.heads_size if self.recurrent is None else self.mixed_size

    @property
    def page_group(self) -> int:
        """Which pages the layer has: FULL, WINDOWED or RECURRENT of the loops' mailbox."""
        return int(self.attention.window > 0) if self.recurrent is None else 2

    @property
    def adds_late(self) -> bool:
        """Whether attention's output is normed or scaled before it is added to the residual."""
        return self.order.norms_added or self.residual_scale != 1


def layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return the layers of a model."""
    heads = [*(config.layer_heads or (config.heads,) * config.num_layers)]
    recurrent = dict.fromkeys(config.recurrent_layers, config.recurrent)
    for layer in recurrent:
        heads[layer] = replace(config.heads, num_heads=0, num_kv_heads=0)
    return tuple(
        LayerSpec(
            attention=_attention(config, layer, own),
            recurrent=recurrent.get(layer),
            input_sizes=_input_sizes(config, layer, own),
            order=_order(config, layer),
            ffn=ffn,
            norm_kind=config.norm_kind,
            norm_eps=config.norm_eps,
            residual_scale=config.residual_scale,
            vectors=_vector_sizes(config, layer, own),
        )
        for layer, (own, ffn) in enumerate(zip(heads, _ffns(config), strict=True))
    )


def _order(config: ModelConfig, layer: int) -> LayerOrder:
    begins_pair = config.has_ffn_pairs and layer % 2 == 0
    return LayerOrder(
        norms_input=config.has_norm and not config.post_norm,
        norms_sum=config.post_norm,
        is_parallel=config.parallel_ffn,
        norms_ffn_input=config.has_ffn_norm and not config.post_norm,
        norms_output=config.post_norm,
        scales_output=config.has_output_scale and not begins_pair,
        begins_pair=begins_pair,
        ends_pair=config.has_ffn_pairs and not begins_pair,
        norms_added=config.has_output_norms,
    )


def _kv_layer(config: ModelConfig, layer: int) -> int:
    """The layer whose keys and values it has."""
    if config.has_ffn_pairs:
        return layer - layer % 2
    return config.kv_layers[layer] if config.kv_layers else layer


def _input_sizes(config: ModelConfig, layer: int, heads: HeadSizes) -> tuple[int, ...]:
    if config.recurrent is not None and layer in config.recurrent_layers:
        return _recurrent_sizes(config, config.recurrent)
    if _kv_layer(config, layer) != layer:
        return () if config.has_ffn_pairs else (heads.heads_size,)
    if config.latent is not None:
        queries = config.latent.query_rank or heads.num_heads * config.latent.query_size
        return queries, config.latent.rank + config.latent.rope_size
    sizes = heads.heads_size * (1 + config.has_attention_gate), heads.kv_size, heads.kv_size
    return (sum(sizes),) if config.fused_qkv else sizes


def _recurrent_sizes(config: ModelConfig, recurrent: RecurrentSpec) -> tuple[int, ...]:
    if recurrent.kind == "conv":
        return (3 * recurrent.values_size,)
    own = recurrent.num_channels, recurrent.values_size
    return (sum(own),) if config.fused_recurrent or recurrent.kind == "mamba" else own


def _attention(config: ModelConfig, layer: int, heads: HeadSizes) -> AttentionSpec:
    ropes = config.layer_ropes or (0 if config.ropes else -1,) * config.num_layers
    rope = ropes[layer] if heads.num_heads else -1
    return AttentionSpec(
        **vars(heads),
        rope=rope,
        query_rope=rope if config.query_rope < 0 else config.query_rope,
        window=config.windows[layer] if config.windows else 0,
        scale=config.attention_scale or heads.head_dim**-0.5,
        softcap=config.attention_softcap,
        has_sinks=config.has_sinks,
        norms_rotated=config.norms_rotated,
        latent=config.latent,
        kv_layer=_kv_layer(config, layer),
        has_keys=_kv_layer(config, layer) == layer,
        has_gate=config.has_attention_gate and heads.num_heads > 0,
    )


def _ffns(config: ModelConfig) -> list[FfnSpec]:
    """The FFN of each layer; layers that are alike share one."""
    shared: dict[str, Any] = {
        "activation_fn": config.activation_fn,
        "activation_threshold": config.activation_threshold,
        "has_gate": config.has_gate,
        "has_biases": config.ffn_bias,
    }
    experts = config.experts
    own_sizes = config.layer_ffn_sizes or (config.ffn_size,) * config.num_layers
    of_size = {size: FfnSpec(block_sizes=(size,), **shared) for size in own_sizes}
    dense = [of_size[size] for size in own_sizes]
    if experts is None:
        return dense
    sizes = (experts.size,) * experts.router.num_experts
    sizes += (experts.shared_size,) if experts.shared_size else ()
    routed = FfnSpec(
        block_sizes=sizes,
        router=experts.router,
        has_predictors=experts.has_predictors,
        **shared,
    )
    dense_layers = set(experts.dense_layers)
    return [own if layer in dense_layers else routed for layer, own in enumerate(dense)]


def _vector_sizes(config: ModelConfig, layer: int, heads: HeadSizes) -> dict[str, int]:
    """The sizes of `LayerVectors`, by name."""
    hidden = config.hidden_size
    q_norm, k_norm = {
        "": (0, 0),
        "head": (heads.head_dim, heads.head_dim),
        "full": (heads.heads_size, heads.kv_size),
    }[config.qk_norm if heads.num_heads else ""]
    if config.latent is not None:
        q_norm, k_norm = config.latent.query_rank, config.latent.rank
    has_keys = _kv_layer(config, layer) == layer
    has_attention = has_keys or not config.has_ffn_pairs
    return {
        "norm_weight": hidden * (config.has_norm and has_attention),
        "norm_bias": hidden * (config.has_norm and config.norm_bias),
        "ffn_norm_weight": hidden * config.has_ffn_norm,
        "ffn_norm_bias": hidden * (config.has_ffn_norm and config.norm_bias),
        "attention_norm_weight": hidden * (config.has_output_norms and has_attention),
        "q_norm_weight": q_norm * has_attention,
        "k_norm_weight": k_norm * has_keys,
        "v_norm_weight": heads.head_dim * (config.has_value_norm and has_keys),
        "output_scale": int(config.has_output_scale and _order(config, layer).scales_output),
        "per_layer_norm_weight": hidden * (config.per_layer_size > 0),
        "qkv_bias": sum(_input_sizes(config, layer, heads)) * config.attention_bias,
        "out_bias": hidden * config.out_bias,
        "sinks": heads.num_heads * config.has_sinks,
    }
