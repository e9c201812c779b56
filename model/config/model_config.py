"""`ModelConfig`: the shape of a model's layers, as read from a Hugging Face config.json."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from hotcold.model.config.activations import SPARSE_ACTIVATION_FNS, ActivationFn
from hotcold.model.config.layer_spec import (
    HeadSizes,
    LatentSpec,
    LayerSpec,
    RecurrentSpec,
    RouterSpec,
    layer_specs,
)
from hotcold.model.config.rope import RopeConfig
from hotcold.numba_kernels.formats import WeightDtype

# Kinds of matrices; up counts as gate. queries, keys and values are `LatentArrays`.
MatrixKind = Literal["qkv", "out", "gate", "down", "head", "queries", "keys", "values", "per_layer"]
BlockFormats = tuple[WeightDtype, WeightDtype, WeightDtype]  # of gate, up and down


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The experts of a mixture: the same in all layers that have any."""

    router: RouterSpec
    size: int  # neurons of each expert
    shared_size: int = 0  # neurons of the shared expert, which all tokens have; 0: none
    dense_layers: tuple[int, ...] = ()  # they have one FFN of ffn_size neurons instead
    has_predictors: bool = False  # of which neurons count, in each expert
    mean_predictor_rank: float = 0.0  # of them, once tensors are known (`stored_config`)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model. All sizes are counts; `dtype` is the matrices' format in config.json.

    Kinds of matrices in other formats, as in most GGUF files, are in `other_dtypes`. The order of a
    layer follows from post_norm, parallel_ffn and has_..._norm. A scale of 1, a softcap of 0, an
    offset of 0 and an empty tuple mean none.
    """

    family: str  # a key of `families.FAMILIES`
    name: str
    dtype: WeightDtype
    num_layers: int
    hidden_size: int
    embed_size: int  # of a token's embedding; differs from hidden_size where it is projected
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_heads: tuple[HeadSizes, ...] = ()  # of each layer; empty: all have those above
    latent: LatentSpec | None = None  # of attention; the heads above are then those of the cache
    recurrent: RecurrentSpec | None = None  # of `recurrent_layers`, which have no heads
    recurrent_layers: tuple[int, ...] = ()
    fused_recurrent: bool = False  # its tensors: one of q | k | v | z and one of b | a, by key head
    ffn_size: int  # neurons of a layer without experts; `ffn_sizes` has those of each layer
    layer_ffn_sizes: tuple[int, ...] = ()  # of each layer without experts; empty: ffn_size
    experts: ExpertsConfig | None = None
    has_gate: bool  # False: down(fn(first)); True: down(fn(gate) * up)
    activation_fn: ActivationFn
    activation_threshold: float = 0.0  # of fatrelu; the limit of clamped_silu
    norm_kind: Literal["rmsnorm", "layernorm"]
    norm_eps: float
    norm_affine: bool = True  # False: norms have no weights (all ones)
    norm_bias: bool = False  # added by layernorms
    norm_offset: float = 0.0  # added to norms' weights, in float32
    has_norm: bool = True  # before attention
    has_ffn_norm: bool = True
    has_output_norms: bool = False  # of attention and of the FFN, before they are added
    has_final_norm: bool = True
    post_norm: bool = False
    parallel_ffn: bool = False
    attention_bias: bool  # of q, k and v
    out_bias: bool  # of attention's output projection
    ffn_bias: bool
    fused_qkv: Literal["", "stacked", "grouped"] = ""  # one tensor: q | k | v, or by KV head
    fused_gate_up: bool = False  # one tensor: gate's rows, then up's
    interleaved_rope: bool = False  # q and k in files: rows that rotate together are neighbours
    qk_norm: Literal["", "head", "full"] = ""  # RMSNorm of each head of q and k, or of all at once
    norms_rotated: bool = False  # those norms are behind the rotation
    has_value_norm: bool = False  # RMSNorm of each head of v, without weights
    key_value_layers: tuple[int, ...] = ()  # layers whose v is k before its norm and rope
    # Of each layer: the layer whose keys and values it has; empty: its own.
    kv_layers: tuple[int, ...] = ()
    attention_scale: float = 0.0  # of scores; 0: 1 / sqrt(head_dim)
    attention_softcap: float = 0.0
    has_sinks: bool = False
    has_attention_gate: bool = False  # q's tensor has a head's query, then its gate
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and FFN add to the residual
    has_ffn_pairs: bool = False  # two layers, even and odd, are one with two FFNs side by side
    has_output_scale: bool = False  # a learned number of each layer, of its output
    per_layer_size: int = 0  # of each layer's embedding of a token (Gemma 4 E2B, E4B); 0: none
    logit_scale: float = 1.0
    max_positions: int
    ropes: tuple[RopeConfig, ...] = ()  # none: positions are learned
    layer_ropes: tuple[int, ...] = ()  # of each layer: which rope, or -1 for none; empty: the first
    query_rope: int = -1  # which rope queries have; -1: their layer's, as keys
    windows: tuple[int, ...] = ()  # of each layer: positions that a token attends to, or 0 for all
    position_offset: int = 0  # added to a position to find its learned row
    num_extra_layers: int = 0  # after the others, for drafts (MTP): see `draft_layer`
    drafts_after: int = 0  # layers before it, of the model whose `draft_layer` it is
    firing_share: float = 0.0  # of the neurons of chosen blocks, at a token; 0: not known
    tied_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    other_dtypes: tuple[tuple[MatrixKind, WeightDtype], ...] = ()
    # Bytes of a row, on average, of kinds with several formats; `other_dtypes` has the first.
    mean_row_bytes: tuple[tuple[MatrixKind, float], ...] = ()
    # Of each layer's blocks, where down is kept a row an output.
    block_formats: tuple[tuple[BlockFormats, ...], ...] = ()

    def draft_layer(self) -> ModelConfig:
        """Return the layer after the last, which drafts (multi-token prediction), as a model.

        Of one layer with full attention, and with experts if others have any.
        """
        return replace(
            self,
            num_layers=1,
            drafts_after=self.num_layers,
            num_extra_layers=0,
            recurrent=None,
            recurrent_layers=(),
            layer_heads=(),
            layer_ropes=(),
            windows=(),
            layer_ffn_sizes=(),
            kv_layers=(),
            experts=self.experts and replace(self.experts, dense_layers=()),
            other_dtypes=(),
            mean_row_bytes=(),
            block_formats=(),
        )

    def dtype_of(self, kind: MatrixKind) -> WeightDtype:
        """Return the format of a kind of matrices."""
        return dict(self.other_dtypes).get(kind, self.dtype)

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer computes."""
        return layer_specs(self)

    @cached_property
    def ffn_sizes(self) -> tuple[int, ...]:
        """The neurons of each layer, of all its experts together."""
        return tuple(layer.ffn.num_neurons for layer in self.layers)

    @property
    def largest_ffn(self) -> int:
        """The neurons of the layer that has most of them."""
        return max(self.ffn_sizes)

    @property
    def num_neurons(self) -> int:
        """The neurons of all layers."""
        return sum(self.ffn_sizes)

    @property
    def num_experts(self) -> int:
        """The experts that routers choose from, of all layers."""
        routers = (layer.ffn.router for layer in self.layers)
        return sum(router.num_experts for router in routers if router is not None)

    @property
    def is_sparse(self) -> bool:
        """Whether activations may be exactly zero, so that a neuron does not fire."""
        return self.activation_fn in SPARSE_ACTIVATION_FNS

    @property
    def rope(self) -> RopeConfig | None:
        """The rope of most models' every layer; None where positions are learned."""
        return self.ropes[0] if self.ropes else None

    @property
    def heads(self) -> HeadSizes:
        """The heads of layers that `layer_heads` does not tell apart."""
        return HeadSizes(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )

    @property
    def has_like_layers(self) -> bool:
        """Whether attention has the same matrices in all layers, and no gates: a GPU needs that."""
        return not (self.layer_heads or self.recurrent_layers or self.has_attention_gate)

    @property
    def page_groups(self) -> tuple[int, ...]:
        """The groups of pages that a sequence has in the KV cache: FULL, and others of layers."""
        return tuple(sorted({0, *(layer.page_group for layer in self.layers)}))

    @property
    def most_inputs(self) -> int:
        """The most rows of a layer's matrix for its normed input, q | k | v."""
        return max(layer.num_inputs for layer in self.layers)

    @property
    def latent_shapes(self) -> dict[MatrixKind, tuple[int, int]]:
        """Rows and widths of a layer's `LatentArrays`; {} without latent attention."""
        spec, heads = self.latent, self.num_heads
        if spec is None:
            return {}
        queries = heads * spec.query_size if spec.query_rank else 0
        return {
            "queries": (queries, spec.query_rank),
            "keys": (heads * spec.rank, spec.plain_size),
            "values": (heads * spec.value_size, spec.rank),
        }

    @property
    def matrix_widths(self) -> tuple[int, ...]:
        """The widths of matrices' rows outside of the FFN, each once."""
        mixed = (layer.mixed_size for layer in self.layers if layer.mixed_size)
        own = (self.per_layer_size,) if self.per_layer_size else ()
        of_latent = (width for _, width in self.latent_shapes.values())
        widths = (self.hidden_size, *mixed, self.embed_size, *own, *of_latent)
        return tuple(dict.fromkeys(widths))

    def rotated_head_dim(self, rope: int) -> int:
        """Numbers of the vectors that are rotated by this one of `ropes`."""
        attentions = (layer.attention for layer in self.layers)
        dims = (a.rotated_head_dim for a in attentions if rope in (a.rope, a.query_rope))
        return next(dims, self.head_dim)
