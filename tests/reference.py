"""The model in plain float64 PyTorch: the reference for every kernel and service.

No cache, no batching: a sequence of T tokens in, logits of all T positions out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from hotcold.model.config.activations import activated, activated_up
from hotcold.model.config.build import read_config
from hotcold.model.config.families import tensor_names
from hotcold.model.config.layer_order import ffn_residual_and_input, layer_input
from hotcold.model.config.layer_spec import FfnSpec, LayerSpec
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import AttentionWeights, load_attention
from hotcold.model.weights.embedding import HeadWeights, load_embedding, load_head
from hotcold.model.weights.ffn import FfnWeights, load_ffn
from hotcold.numba_kernels.load.convert import to_float32
from tests.reference_experts import experts_output


def relative_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference as a share of the largest logit."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def reference_logits(
    checkpoint_dir: str | Path,
    ids: Sequence[int] | np.ndarray,
    dtype: str = "",
    thresholds: Sequence[tuple[float, float]] | None = None,
) -> np.ndarray:
    """Return the logits after each token of `ids`.

    thresholds[l]: a neuron of layer l counts only where |fn(gate)| exceeds the first threshold and
    |fn(gate) * up| * |down row| the second.

    Shapes:  ids (T,), result (T, V)
    Dtypes:  computed and returned in float64 from the checkpoint's weights; `dtype` such as "q8"
             quantizes them first
    Errors:  ConfigError, CheckpointError, UsageError for an unknown dtype
    """
    config = read_config(checkpoint_dir)
    checkpoint = Checkpoint(checkpoint_dir)
    attention = load_attention(checkpoint, config, dtype=dtype)
    ffn = _load_ffn(checkpoint, config, dtype)
    tokens = np.asarray(ids, np.int64)
    embedding = load_embedding(checkpoint, config)
    h = torch.from_numpy(embedding.lookup(tokens, np.arange(len(tokens)))).double()  # (T, d)
    for layer in range(config.num_layers):
        own = None if thresholds is None else thresholds[layer]
        h = _layer(
            config, checkpoint, attention, ffn, embedding.ffn_output_norm[layer], layer, h, own
        )
    order = config.layers[-1].order
    h = layer_input(order, config.num_layers, h, partial(_ffn_norm, config, attention))
    return _logits(config, load_head(checkpoint, config, dtype=dtype), h).numpy()


def _load_ffn(checkpoint: Checkpoint, config: ModelConfig, dtype: str) -> FfnWeights | None:
    """None of a mixture, whose tensors are read layer after layer."""
    if config.experts is not None:
        assert not dtype, "experts are not quantized here"
        return None
    all_ids = [np.arange(config.ffn_size, dtype=np.int32)] * config.num_layers
    return load_ffn(checkpoint, config, all_ids, include_down_bias=True, dtype=dtype)


def _layer(
    config: ModelConfig,
    checkpoint: Checkpoint,
    weights: AttentionWeights,
    ffn: FfnWeights | None,
    ffn_output_norm: np.ndarray,
    layer: int,
    h: torch.Tensor,
    thresholds: tuple[float, float] | None,
) -> torch.Tensor:
    spec, vectors = config.layers[layer], weights.vectors

    def norm(x: torch.Tensor) -> torch.Tensor:
        return _norm(spec, x, vectors.norm_weight[layer], vectors.norm_bias[layer])

    def add_attention(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        out = _attention(config, checkpoint, weights, layer, x)
        return residual + _added(spec, out, vectors.attention_norm_weight[layer])

    ffn_norm = partial(_ffn_norm, config, weights)
    before = config.layers[max(layer - 1, 0)].order
    own_input = layer_input(before, layer, h, ffn_norm)
    ffn_residual, ffn_input = ffn_residual_and_input(
        spec.order,
        own_input,
        norm=norm,
        ffn_norm=partial(ffn_norm, layer),
        add_attention=add_attention,
    )
    if ffn is None:
        out = experts_output(checkpoint, config, layer, ffn_input, own_input)
    else:
        out = _ffn(spec.ffn, ffn, layer, ffn_input, thresholds)
    return ffn_residual + _added(spec, out, ffn_output_norm)


def _added(spec: LayerSpec, x: torch.Tensor, norm_weight: np.ndarray) -> torch.Tensor:
    """Attention's or FFN's output as it is added to the residual: normed, scaled."""
    normed = _norm(spec, x, norm_weight, norm_weight[:0]) if norm_weight.size else x
    return normed * spec.residual_scale


def _ffn_norm(
    config: ModelConfig, weights: AttentionWeights, layer: int, x: torch.Tensor
) -> torch.Tensor:
    vectors = weights.vectors
    return _norm(
        config.layers[layer], x, vectors.ffn_norm_weight[layer], vectors.ffn_norm_bias[layer]
    )


def _double(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(to_float32(bits)).double()


def _linear(x: torch.Tensor, weight: np.ndarray, bias: np.ndarray) -> torch.Tensor:
    """x @ weight.T + bias, with weight (rows, columns) bits and bias (rows,) or (0,)."""
    return functional.linear(x, _double(weight), _double(bias) if bias.size else None)


def _norm(spec: LayerSpec, x: torch.Tensor, weight: np.ndarray, bias: np.ndarray) -> torch.Tensor:
    if spec.norm_kind == "rmsnorm":
        mean_square = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean_square + spec.norm_eps) * _double(weight)
    return functional.layer_norm(
        x, x.shape[-1:], _double(weight), _double(bias) if bias.size else None, spec.norm_eps
    )


def _rope(config: ModelConfig, layer: int, x: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + size / 2) of the first `size` dimensions of x (T, heads, hd)."""
    index = config.layers[layer].attention.rope
    if index < 0:
        return x
    rope = config.ropes[index]
    inv_freq = torch.from_numpy(rope.inv_freq(config.head_dim, len(x)))
    # Angles are rounded to float32, as in transformers.
    angles = torch.outer(torch.arange(x.shape[0], dtype=torch.float32), inv_freq).double()
    cos, sin = (part[:, None] * rope.table_scale for part in (angles.cos(), angles.sin()))
    rotated, rest = x.tensor_split([2 * len(inv_freq)], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _qk_norm(spec: LayerSpec, x: torch.Tensor, weight: np.ndarray) -> torch.Tensor:
    """RMSNorm of every len(weight) numbers of x (T, heads, hd)."""
    if not weight.size:
        return x
    parts = x.reshape(len(x), -1, weight.size)
    return _norm(spec, parts, weight, weight[:0]).reshape(x.shape)


def _attention(
    config: ModelConfig,
    checkpoint: Checkpoint,
    weights: AttentionWeights,
    layer: int,
    x: torch.Tensor,
) -> torch.Tensor:
    spec, vectors = config.layers[layer], weights.vectors
    own = spec.attention
    heads, kv_heads, size = own.num_heads, own.num_kv_heads, own.head_dim
    parts = [_linear(x, part, vectors.qkv_bias[layer][:0]) for part in weights.qkv.parts(layer)]
    qkv = torch.cat(parts, dim=1)
    if vectors.qkv_bias.size:
        qkv += _double(vectors.qkv_bias[layer])
    qkv = qkv.view(len(x), -1, size)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)  # each (T, heads, hd)
    q = _rope(config, layer, _qk_norm(spec, q, vectors.q_norm_weight[layer]))
    k = _rope(config, layer, _qk_norm(spec, k, vectors.k_norm_weight[layer]))
    k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * own.scale
    scores = _capped(scores, own.softcap)
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)  # the future
    if own.window:
        hidden |= torch.ones(len(x), len(x), dtype=torch.bool).tril(-own.window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if own.has_sinks:
        sinks = _sinks(checkpoint, config, layer)
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(x), 1)], dim=-1)
    shares = scores.softmax(-1)[..., : len(x)]
    out = torch.einsum("hts,shd->thd", shares, v).reshape(len(x), -1)
    return _linear(out, weights.out[layer], vectors.out_bias[layer])


def _sinks(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> torch.Tensor:
    """One logit (H,) a head, of a position that has no value."""
    name = tensor_names(config).of_layer(layer).sinks
    stored = checkpoint.array(name if checkpoint.has(name) else f"{name}.weight")
    return _double(np.array(stored)[None])[0]


def _capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(x / cap) if cap else x


def _ffn(
    spec: FfnSpec,
    weights: FfnWeights,
    layer: int,
    x: torch.Tensor,
    thresholds: tuple[float, float] | None,
) -> torch.Tensor:
    part = weights.part(layer)
    name = spec.activation_fn
    gate = _linear(x, weights.gate[part], weights.gate_bias[part])
    h = activated(name, gate, spec.activation_threshold)
    if spec.has_gate:
        gates = h
        h = gates * activated_up(name, _linear(x, weights.up[part], weights.up_bias[part]))
        if thresholds is not None:
            lengths = _double(weights.down[part]).norm(dim=1)
            passes = _exceeds(gates, thresholds[0]) & _exceeds(h * lengths, thresholds[1])
            h = torch.where(passes, h, 0)
    out = h @ _double(weights.down[part])  # (T, N) @ (N, d)
    return out + _double(weights.down_bias[layer, 0]) if weights.down_bias.size else out


def _exceeds(values: torch.Tensor, threshold: float) -> torch.Tensor:
    return values.abs() > threshold


def _logits(config: ModelConfig, weights: HeadWeights, h: torch.Tensor) -> torch.Tensor:
    if weights.final_norm_weight.size:
        last = config.layers[-1]
        h = _norm(last, h, weights.final_norm_weight, weights.final_norm_bias)
    if weights.project_out.size:
        h = h @ _double(weights.project_out).T
    return _capped(h @ _double(weights.head).T, config.logit_softcap)
