"""`ModelConfig`: the shape of a model's layers, as read from a Hugging Face config.json."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hotcold.model.config.activations import SPARSE_ACTIVATION_FNS, ActivationFn
from hotcold.model.config.layer_spec import LayerSpec, RouterSpec, layer_specs
from hotcold.model.config.rope import RopeConfig
from hotcold.numba_kernels.formats import WeightDtype

# Kinds of matrices, each with one format in all layers; up has gate's.
MatrixKind = Literal["qkv", "out", "gate", "down", "head"]


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
    ffn_size: int  # neurons of a layer without experts; `ffn_sizes` has those of each layer
    experts: ExpertsConfig | None = None
    has_gate: bool  # False: down(fn(first)); True: down(fn(gate) * up)
    activation_fn: ActivationFn
    activation_threshold: float = 0.0  # of fatrelu; the limit of clamped_silu
    norm_kind: Literal["rmsnorm", "layernorm"]
    norm_eps: float
    norm_affine: bool = True  # False: norms have no weights (all ones)
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
    qk_norm: Literal["", "head", "full"] = ""  # RMSNorm of each head of q and k, or of all at once
    attention_scale: float = 0.0  # of scores; 0: 1 / sqrt(head_dim)
    attention_softcap: float = 0.0
    has_sinks: bool = False
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and FFN add to the residual
    logit_scale: float = 1.0
    max_positions: int
    ropes: tuple[RopeConfig, ...] = ()  # none: positions are learned
    layer_ropes: tuple[int, ...] = ()  # of each layer: which rope, or -1 for none; empty: the first
    windows: tuple[int, ...] = ()  # of each layer: positions that a token attends to, or 0 for all
    position_offset: int = 0  # added to a position to find its learned row
    num_extra_layers: int = 0  # after the others, for drafts (MTP); they are not read
    firing_share: float = 0.0  # of the neurons of chosen blocks, at a token; 0: not known
    tied_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    other_dtypes: tuple[tuple[MatrixKind, WeightDtype], ...] = ()
    # Bytes of a row, on average, of kinds with two formats; `other_dtypes` has the first.
    mean_row_bytes: tuple[tuple[MatrixKind, float], ...] = ()
    # Of each layer's blocks the format of down, where that is kept a row an output.
    down_formats: tuple[tuple[WeightDtype, ...], ...] = ()

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
    def qkv_rows(self) -> int:
        """Rows of the stacked q | k | v matrix."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def qkv_sizes(self) -> tuple[int, ...]:
        """Rows of the checkpoint's tensors: of q, k and v, or of the fused one."""
        kv_rows = self.num_kv_heads * self.head_dim
        return (self.qkv_rows,) if self.fused_qkv else (self.attention_size, kv_rows, kv_rows)

    @property
    def attention_size(self) -> int:
        """Width of the attention's output before its output projection."""
        return self.num_heads * self.head_dim

    @property
    def norm_bias(self) -> bool:
        """Whether norms add a bias."""
        return self.norm_kind == "layernorm" and self.norm_affine
