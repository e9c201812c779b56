"""Makes a random model's layers one by one, and passes hidden states through each.

Matrices that write to the residual stream are scaled by the measured size of their inputs, so that
values stay bounded at any depth. Each gate is fitted to the layer's own inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from hotcold.model.config.activations import activated, activated_up
from hotcold.model.config.families.tensor_names import LayerNames
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.sparsity import MAX_DENSITY, hot_share
from hotcold.model.synthetic.gate import make_gate_rows
from hotcold.model.synthetic.random_source import NormalSource

# All updates together have this deviation, against 1 of the embedding that they are added to. With
# a tied head it is large: e_a . (w * e_b) is symmetric, so embeddings alone would say a b a b a b.
_UPDATES_RMS, _TIED_UPDATES_RMS = 0.5, 1.4
_BIAS_SCALE = 0.1  # of what the bias is added to
_SEQUENCE_TOKENS = 12
_NUM_SEQUENCES = 16
NUM_TOKENS = _SEQUENCE_TOKENS * _NUM_SEQUENCES
NUM_FITTED = NUM_TOKENS // 2  # whole sequences; the others check the fit


@dataclass(frozen=True)
class FiringStats:
    """The share of neurons that fires on tokens that were not fitted, and its skew."""

    density: float
    hot_share: float  # share of the neurons that makes 80% of the activations


class LayerMaker:
    """Writes layers by `write(name, tensor)`, in the order of `tensor_specs`."""

    def __init__(
        self,
        config: ModelConfig,
        density: float,
        source: NormalSource,
        write: Callable[[str, torch.Tensor], None],
    ) -> None:
        self._config = config
        self._density = density
        self._source = source
        self._write = write
        updates_rms = _TIED_UPDATES_RMS if config.tied_embeddings else _UPDATES_RMS
        self._update_rms = updates_rms / (2 * config.num_layers) ** 0.5

    def make(self, names: LayerNames, hidden_states: torch.Tensor) -> FiringStats:
        """Write one layer and apply it to `hidden_states` (NUM_TOKENS, D), in place."""
        has_own = self._config.has_ffn_norm
        attention_norm = self._norm(names.norm, _BIAS_SCALE if has_own else 1.0)
        ffn_norm = self._norm(names.ffn_norm, 1.0) if has_own else attention_norm
        if self._config.qk_norm:
            vectors = self._config.layers[0].vectors
            self._write(f"{names.q_norm}.weight", torch.ones(vectors["q_norm_weight"]))
            self._write(f"{names.k_norm}.weight", torch.ones(vectors["k_norm_weight"]))
        update = self._attention(names, attention_norm(hidden_states))
        if self._config.parallel_ffn:
            ffn_input = ffn_norm(hidden_states)
            hidden_states += update
        else:
            hidden_states += update
            ffn_input = ffn_norm(hidden_states)
        fires, update = self._ffn(names, ffn_input)
        hidden_states += update
        return _firing_stats(fires[NUM_FITTED:])

    def _norm(self, name: str, bias_rms: float) -> Callable[[torch.Tensor], torch.Tensor]:
        """Write a norm and return it. Its bias gives every input the direction that gates use."""
        hidden = self._config.hidden_size
        self._write(f"{name}.weight", torch.ones(hidden))
        if not self._config.norm_bias:
            return lambda x: functional.rms_norm(x, (hidden,))
        bias = self._source.normal((hidden,), bias_rms)
        self._write(f"{name}.bias", bias)
        return lambda x: functional.layer_norm(x, (hidden,), bias=bias)

    def _attention(self, names: LayerNames, x: torch.Tensor) -> torch.Tensor:
        """Causal attention without positions, which do not change the sizes measured here."""
        config, has_bias = self._config, self._config.attention_bias
        group = config.num_heads // config.num_kv_heads
        rows = zip(names.qkv, config.qkv_sizes, strict=True)
        projected = [self._linear(name, x, num_rows, has_bias) for name, num_rows in rows]
        parts = [
            p.view(_NUM_SEQUENCES, _SEQUENCE_TOKENS, config.num_kv_heads, -1, config.head_dim)
            for p in projected
        ]
        # Heads are (KV head, member of its group); a fused module's groups end in key and value.
        q, k, v = parts if len(parts) == 3 else parts[0].split([group, 1, 1], dim=3)
        q, k, v = (
            part.expand(-1, -1, -1, group, -1).flatten(2, 3).transpose(1, 2) for part in (q, k, v)
        )
        if config.qk_norm == "head":
            q, k = (functional.rms_norm(part, (config.head_dim,)) for part in (q, k))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(NUM_TOKENS, -1)
        return self._linear(names.out, mixed, config.hidden_size, has_bias, self._update_rms)

    def _ffn(self, names: LayerNames, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return firing neurons (NUM_TOKENS, N), those of relu, and the update (NUM_TOKENS, D)."""
        num_neurons, has_bias = self._config.ffn_size, self._config.ffn_bias
        bias = self._bias(num_neurons) if has_bias else None
        is_drelu = self._config.activation_fn == "drelu"  # half of up . x is negative
        density = min(2 * self._density, MAX_DENSITY) if is_drelu else self._density
        gate = make_gate_rows(x, NUM_FITTED, num_neurons, density, bias, self._source)
        self._write(f"{names.gate}.weight", gate.rows)
        if bias is not None:
            self._write(f"{names.gate}.bias", bias)
        pre_activations, fires = gate.pre_activations, gate.pre_activations > 0
        del gate  # one large matrix at a time
        name = self._config.activation_fn
        neurons = activated(name, pre_activations, self._config.activation_threshold)
        if names.up:
            factors = activated_up(name, self._linear(names.up, x, num_neurons, has_bias))
            fires = fires & (factors > 0) if is_drelu else fires
            neurons *= factors
        return fires, self._linear(
            names.down, neurons, self._config.hidden_size, has_bias, self._update_rms
        )

    def _linear(
        self,
        name: str,
        x: torch.Tensor,
        num_rows: int,
        has_bias: bool,
        output_rms: float = 1.0,
    ) -> torch.Tensor:
        """Write a random matrix scaled to `output_rms` for `x`; return its output."""
        std = output_rms / float(x.square().sum(dim=1).mean().sqrt())
        weight = self._source.normal((num_rows, x.shape[1]), std)
        self._write(f"{name}.weight", weight)
        bias = self._bias(num_rows, output_rms) if has_bias else None
        if bias is not None:
            self._write(f"{name}.bias", bias)
        return functional.linear(x, weight, bias)

    def _bias(self, num_rows: int, output_rms: float = 1.0) -> torch.Tensor:
        return self._source.normal((num_rows,), _BIAS_SCALE * output_rms)


def _firing_stats(fires: torch.Tensor) -> FiringStats:
    """Summarise which neurons fired: `fires` (T, N), bool."""
    return FiringStats(float(fires.float().mean()), hot_share(fires.sum(dim=0).numpy()))
