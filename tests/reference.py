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
from hotcold.model.config.layer_order import layer_input, mixed_and_ffn_input
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import AttentionWeights, load_attention
from hotcold.model.weights.embedding import HeadWeights, load_embedding, load_head
from hotcold.model.weights.ffn import FfnWeights, load_ffn
from hotcold.numba_kernels.load.convert import to_float32


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
    all_ids = [np.arange(config.ffn_size, dtype=np.int32)] * config.num_layers
    attention = load_attention(checkpoint, config, dtype=dtype)
    ffn = load_ffn(checkpoint, config, all_ids, include_down_bias=True, dtype=dtype)
    tokens = np.asarray(ids, np.int64)
    embedding = load_embedding(checkpoint, config)
    h = torch.from_numpy(embedding.lookup(tokens, np.arange(len(tokens)))).double()  # (T, d)
    for layer in range(config.num_layers):
        own = None if thresholds is None else thresholds[layer]
        h = _layer(config, attention, ffn, embedding.ffn_output_norm[layer], layer, h, own)
    h = layer_input(config.layer_order, config.num_layers, h, partial(_ffn_norm, config, attention))
    return _logits(config, load_head(checkpoint, config, dtype=dtype), h).numpy()


def _layer(
    config: ModelConfig,
    weights: AttentionWeights,
    ffn: FfnWeights,
    ffn_output_norm: np.ndarray,
    layer: int,
    h: torch.Tensor,
    thresholds: tuple[float, float] | None,
) -> torch.Tensor:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return _norm(config, x, weights.norm_weight[layer], weights.norm_bias[layer])

    def add_attention(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        out = _attention(config, weights, layer, x)
        return residual + _added(config, out, weights.attention_norm_weight[layer])

    order, ffn_norm = config.layer_order, partial(_ffn_norm, config, weights)
    mixed, ffn_input = mixed_and_ffn_input(
        order,
        layer_input(order, layer, h, ffn_norm),
        norm=norm,
        ffn_norm=partial(ffn_norm, layer),
        add_attention=add_attention,
    )
    out = _ffn(config, ffn, layer, ffn_input, thresholds)
    return mixed + _added(config, out, ffn_output_norm)


def _added(config: ModelConfig, x: torch.Tensor, norm_weight: np.ndarray) -> torch.Tensor:
    """Attention's or FFN's output as it is added to the residual: normed, scaled."""
    normed = _norm(config, x, norm_weight, norm_weight[:0]) if norm_weight.size else x
    return normed * config.residual_scale


def _ffn_norm(
    config: ModelConfig, weights: AttentionWeights, layer: int, x: torch.Tensor
) -> torch.Tensor:
    return _norm(config, x, weights.ffn_norm_weight[layer], weights.ffn_norm_bias[layer])


def _double(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(to_float32(bits)).double()


def _linear(x: torch.Tensor, weight: np.ndarray, bias: np.ndarray) -> torch.Tensor:
    """x @ weight.T + bias, with weight (rows, columns) bits and bias (rows,) or (0,)."""
    return functional.linear(x, _double(weight), _double(bias) if bias.size else None)


def _norm(
    config: ModelConfig, x: torch.Tensor, weight: np.ndarray, bias: np.ndarray
) -> torch.Tensor:
    if config.norm_kind == "rmsnorm":
        mean_square = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean_square + config.norm_eps) * _double(weight)
    return functional.layer_norm(
        x, x.shape[-1:], _double(weight), _double(bias) if bias.size else None, config.norm_eps
    )


def _rope(config: ModelConfig, layer: int, x: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + size / 2) of the first `size` dimensions of x (T, heads, hd)."""
    index = config.rope_of_layer(layer)
    if index < 0:
        return x
    rope, is_long = config.ropes[index], config.ropes[index].is_long(len(x))
    inv_freq = torch.from_numpy(rope.inv_freq(config.head_dim, is_long))
    # Angles are rounded to float32, as in transformers.
    angles = torch.outer(torch.arange(x.shape[0], dtype=torch.float32), inv_freq).double()
    cos, sin = (part[:, None] * rope.table_scale for part in (angles.cos(), angles.sin()))
    rotated, rest = x.tensor_split([2 * len(inv_freq)], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _qk_norm(config: ModelConfig, x: torch.Tensor, weight: np.ndarray) -> torch.Tensor:
    """RMSNorm of every len(weight) numbers of x (T, heads, hd)."""
    if not weight.size:
        return x
    parts = x.reshape(len(x), -1, weight.size)
    return _norm(config, parts, weight, weight[:0]).reshape(x.shape)


def _attention(
    config: ModelConfig, weights: AttentionWeights, layer: int, x: torch.Tensor
) -> torch.Tensor:
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    parts = [_linear(x, part, weights.qkv_bias[layer][:0]) for part in weights.qkv.parts(layer)]
    qkv = torch.cat(parts, dim=1)
    if weights.qkv_bias.size:
        qkv += _double(weights.qkv_bias[layer])
    qkv = qkv.view(len(x), -1, size)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)  # each (T, heads, hd)
    q = _rope(config, layer, _qk_norm(config, q, weights.q_norm_weight[layer]))
    k = _rope(config, layer, _qk_norm(config, k, weights.k_norm_weight[layer]))
    k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * config.score_scale
    scores = _capped(scores, config.attention_softcap)
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)  # the future
    if config.window_of_layer(layer):
        hidden |= torch.ones(len(x), len(x), dtype=torch.bool).tril(-config.window_of_layer(layer))
    shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    out = torch.einsum("hts,shd->thd", shares, v).reshape(len(x), -1)
    return _linear(out, weights.out[layer], weights.out_bias[layer])


def _capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(x / cap) if cap else x


def _ffn(
    config: ModelConfig,
    weights: FfnWeights,
    layer: int,
    x: torch.Tensor,
    thresholds: tuple[float, float] | None,
) -> torch.Tensor:
    part = weights.part(layer)
    name = config.activation_fn
    gate = _linear(x, weights.gate[part], weights.gate_bias[part])
    h = activated(name, gate, config.activation_threshold)
    if config.has_gate:
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
        h = _norm(config, h, weights.final_norm_weight, weights.final_norm_bias)
    if weights.project_out.size:
        h = h @ _double(weights.project_out).T
    return _capped(h @ _double(weights.head).T, config.logit_softcap)
