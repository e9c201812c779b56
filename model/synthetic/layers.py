"""Makes a random model's layers one by one, and passes hidden states through each.

Matrices that write to the residual stream are scaled by the measured size of their inputs, so that
values stay bounded at any depth. Each gate is fitted to the layer's own inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from hotcold.model.config.families import FAMILIES, tensor_names
from hotcold.model.config.families.tensor_names import ExpertNames, LayerNames, TensorNames
from hotcold.model.config.layer_spec import LayerSpec, RouterSpec
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.synthetic.ffn import BIAS_SCALE, FfnMaker, FiringStats, ffn_names
from hotcold.model.synthetic.random_source import NormalSource
from hotcold.model.synthetic.router import Router, RoutingStats, make_router
from hotcold.model.synthetic.topics import SampleText, Topics

# All updates together have this deviation, against 1 of the embedding that they are added to. With
# a tied head it is large: e_a . (w * e_b) is symmetric, so embeddings alone would say a b a b a b.
_UPDATES_RMS, _TIED_UPDATES_RMS = 0.5, 1.4


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


def normalization(config: ModelConfig) -> Callable[..., torch.Tensor]:
    """Return torch's function for the family's kind of norm."""
    return functional.rms_norm if config.norm_kind == "rmsnorm" else functional.layer_norm


@dataclass(frozen=True)
class LayerMaker:
    """Writes layers one by one; all have tensors of the same shapes."""

    config: ModelConfig
    density: float
    source: NormalSource
    write: Callable[[str, torch.Tensor], None]
    text: SampleText
    topics: Topics | None = None  # of a mixture
    routing: RoutingStats | None = None  # that is wanted of a mixture

    @property
    def _update_rms(self) -> float:
        updates_rms = _TIED_UPDATES_RMS if self.config.tied_embeddings else _UPDATES_RMS
        return float(updates_rms / (2 * self.config.num_layers) ** 0.5)

    def make(self, spec: LayerSpec, names: LayerNames, hidden_states: torch.Tensor) -> FiringStats:
        """Write one layer and apply it to `hidden_states` (T, D), in place."""
        has_own = self.config.has_ffn_norm
        attention_norm = self._norm(names.norm, BIAS_SCALE if has_own else 1.0)
        ffn_norm = self._norm(names.ffn_norm, 1.0) if has_own else attention_norm
        if self.config.qk_norm:
            for name, vector in ((names.q_norm, "q_norm_weight"), (names.k_norm, "k_norm_weight")):
                self.write(f"{name}.weight", torch.ones(spec.vectors[vector]))
        layer_input = hidden_states.clone() if spec.ffn.router is not None else hidden_states
        update = self._attention(names, attention_norm(hidden_states))
        if self.config.parallel_ffn:
            ffn_input = ffn_norm(hidden_states)
            hidden_states += update
        else:
            hidden_states += update
            ffn_input = ffn_norm(hidden_states)
        ffn, router, fitted = ffn_names(names, spec.ffn), None, self.text.num_fitted
        if spec.ffn.router is not None:
            router = self._router(spec.ffn.router, ffn, ffn_input, layer_input)
        maker = FfnMaker(spec.ffn, ffn, self.density, fitted, self.source, self.write)
        hidden_states += maker.make(ffn_input, router, self._update_rms)
        return maker.stats(None if router is None else router.stats)

    def _norm(self, name: str, bias_rms: float) -> Callable[[torch.Tensor], torch.Tensor]:
        """Write a norm and return it. Its bias gives every input the direction that gates use."""
        hidden = self.config.hidden_size
        self.write(f"{name}.weight", torch.ones(hidden))
        if not self.config.norm_bias:
            norm = normalization(self.config)
            return lambda x: norm(x, (hidden,))
        bias = self.source.normal((hidden,), bias_rms)
        self.write(f"{name}.bias", bias)
        return lambda x: functional.layer_norm(x, (hidden,), bias=bias)

    def _attention(self, names: LayerNames, x: torch.Tensor) -> torch.Tensor:
        """Causal attention without positions, which do not change the sizes measured here."""
        config, has_bias = self.config, self.config.attention_bias
        group = config.num_heads // config.num_kv_heads
        rows = zip(names.qkv, config.layers[0].input_sizes, strict=True)
        projected = [self._linear(name, x, num_rows, has_bias) for name, num_rows in rows]
        if config.qk_norm == "full":
            for i in range(2):
                projected[i] = functional.rms_norm(projected[i], projected[i].shape[1:])
        text = self.text
        by_token = (text.num_sequences, text.sequence_tokens)
        parts = [p.view(*by_token, config.num_kv_heads, -1, config.head_dim) for p in projected]
        # Heads are (KV head, member of its group); a fused module's groups end in key and value.
        q, k, v = parts if len(parts) == 3 else parts[0].split([group, 1, 1], dim=3)
        q, k, v = (
            part.expand(-1, -1, -1, group, -1).flatten(2, 3).transpose(1, 2) for part in (q, k, v)
        )
        if config.qk_norm == "head":
            q, k = (functional.rms_norm(part, (config.head_dim,)) for part in (q, k))
        sinks = self.source.normal((config.num_heads,)) if config.has_sinks else None
        attended = _attended(q, k, v, sinks).transpose(1, 2).reshape(text.num_tokens, -1)
        rms, has_bias = self._update_rms, config.out_bias
        update = self._linear(names.out, attended, config.hidden_size, has_bias, rms)
        if sinks is not None:
            self.write(names.sinks, sinks)
        return update

    def _router(
        self, spec: RouterSpec, names: ExpertNames, x: torch.Tensor, layer_input: torch.Tensor
    ) -> Router:
        """Write a router and return it; `x` are the FFN's inputs."""
        assert self.topics is not None and self.routing is not None
        bias = self._bias(spec.num_experts) if spec.has_bias else None
        inputs = layer_input if spec.reads == "layer_input" else x
        router = make_router(inputs, self.topics, self.text, spec, self.routing, bias, self.source)
        self.write(names.router, router.rows)
        if bias is not None:
            self.write(names.router_bias, bias)
        return router

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
        weight = self.source.normal((num_rows, x.shape[1]), std)
        self.write(f"{name}.weight", weight)
        bias = self._bias(num_rows, output_rms) if has_bias else None
        if bias is not None:
            self.write(f"{name}.bias", bias)
        return functional.linear(x, weight, bias)

    def _bias(self, num_rows: int, output_rms: float = 1.0) -> torch.Tensor:
        return self.source.normal((num_rows,), BIAS_SCALE * output_rms)


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Causal attention of (sequences, H, tokens, size); a sink is a key without a value."""
    if sinks is None:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    tokens = q.shape[2]
    k, v = (functional.pad(part, (0, 0, 0, 1)) for part in (k, v))
    seen = torch.ones(tokens, tokens + 1, dtype=torch.bool).tril()
    mask = torch.zeros(len(sinks), tokens, tokens + 1).masked_fill_(~seen, -torch.inf)
    mask[:, :, tokens] = sinks[:, None]
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
