"""What a model is: the shape of its layers, read from a Hugging Face config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from model.config.layer_order import (
    PARALLEL,
    PARALLEL_SHARED_NORM,
    POST_NORM,
    PRE_NORM,
    LayerOrder,
)

ActivationFn = Literal["relu", "silu", "gelu"]
WeightDtype = Literal["float32", "float16", "bfloat16", "q8", "q4"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base period and how frequencies are scaled."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0

    def inv_freq(self, head_dim: int) -> np.ndarray:
        """Return the angle per position of each pair of dimensions, in radians.

        default: theta ** (-2i / head_dim);  linear: that / factor;  llama3: long waves / factor,
        short waves kept, those between interpolated
        Shapes:  (head_dim / 2,)
        Dtypes:  float32, computed by torch operation for operation as transformers computes it
        Source:  transformers/modeling_rope_utils.py
        """
        import torch  # here, as only services and tests compute it: reading a config stays fast

        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float) / head_dim
        inv_freq = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            inv_freq = inv_freq / self.factor
        elif self.kind == "llama3":
            wavelength = 2 * torch.pi / inv_freq
            long_wave = self.original_max_positions / self.low_freq_factor
            short_wave = self.original_max_positions / self.high_freq_factor
            scaled = torch.where(wavelength > long_wave, inv_freq / self.factor, inv_freq)
            smooth = (self.original_max_positions / wavelength - self.low_freq_factor) / (
                self.high_freq_factor - self.low_freq_factor
            )
            between = (1 - smooth) * scaled / self.factor + smooth * scaled
            is_between = ~(wavelength < short_wave) * ~(wavelength > long_wave)
            inv_freq = torch.where(is_between, between, scaled)
        return inv_freq.numpy()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model. All sizes are counts; `dtype` is what config.json says the matrices are.

    post_norm, parallel_ffn and has_ffn_norm say what `layer_order` tells in full.
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
    ffn_size: int
    has_gate: bool  # False: down(fn(first)); True: down(fn(gate) * up)
    activation_fn: ActivationFn
    norm_kind: Literal["rmsnorm", "layernorm"]
    norm_eps: float
    norm_affine: bool = True  # False: norms have no weights (all ones)
    has_ffn_norm: bool = True
    has_final_norm: bool = True
    post_norm: bool = False
    parallel_ffn: bool = False
    attention_bias: bool
    ffn_bias: bool
    fused_qkv: bool = False  # one query_key_value tensor, grouped by KV head
    max_positions: int
    rope: RopeConfig | None
    position_offset: int = 0  # added to a position to find its learned row
    tied_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def layer_order(self) -> LayerOrder:
        """How norms, attention and FFN follow one another."""
        if self.post_norm:
            return POST_NORM
        if self.parallel_ffn:
            return PARALLEL if self.has_ffn_norm else PARALLEL_SHARED_NORM
        return PRE_NORM

    @property
    def qkv_rows(self) -> int:
        """Rows of the stacked q | k | v matrix."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def qkv_sizes(self) -> tuple[int, ...]:
        """Rows of each tensor that holds them in a checkpoint: q, k and v, or all fused."""
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
