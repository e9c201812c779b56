"""The model in plain float64 PyTorch: the reference for every kernel and service.

No cache, no batching: a sequence of T tokens in, logits of all T positions out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from hotcold.model.weights.embedding import (
    EmbeddingWeights,
    HeadWeights,
    load_embedding,
    load_head,
)
from hotcold.model.weights.ffn import FfnWeights, load_ffn
from hotcold.numba_kernels.load.convert import to_float32
from tests.reference_experts import experts_output
from tests.reference_recurrent import recurrent_output

KeysAndValues = dict[int, tuple[torch.Tensor, torch.Tensor]]  # by layer


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
    scaled = partial(_scaled_output, config, attention, _per_layer(config, embedding, tokens, h))
    kept: KeysAndValues = {}
    for layer in range(config.num_layers):
        own = None if thresholds is None else thresholds[layer]
        h = _layer(
            config, checkpoint, attention, ffn, embedding.ffn_output_norm[layer], layer, h, own,
            kept, scaled, embedding.pair_norm[layer : layer + 1],
        )  # fmt: skip
    order = config.layers[-1].order
    h = layer_input(order, config.num_layers, h, partial(_ffn_norm, config, attention), scaled)
    return _logits(config, load_head(checkpoint, config, dtype=dtype), h).numpy()


def _load_ffn(checkpoint: Checkpoint, config: ModelConfig, dtype: str) -> FfnWeights | None:
    """None of a mixture, whose tensors are read layer after layer."""
    if config.experts is not None:
        assert not dtype, "experts are not quantized here"
        return None
    all_ids = [np.arange(size, dtype=np.int32) for size in config.ffn_sizes]
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
    kept: KeysAndValues,
    scaled: Callable[[int, torch.Tensor], torch.Tensor],
    pair_norm: np.ndarray,
) -> torch.Tensor:
    spec, vectors = config.layers[layer], weights.vectors
    if spec.order.ends_pair:
        residual, first = kept[-1]
        x = _ffn_norm(config, weights, layer, residual)
        plain = _norm(spec, residual, np.ones(residual.shape[1], np.float32), pair_norm[0, :0])
        second = experts_output(checkpoint, config, layer, x, plain)
        both = first + _added(spec, second, ffn_output_norm)
        return residual + _norm(spec, both, pair_norm[0], pair_norm[0, :0])

    def norm(x: torch.Tensor) -> torch.Tensor:
        return _norm(spec, x, vectors.norm_weight[layer], vectors.norm_bias[layer])

    def add_attention(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if spec.recurrent is not None:
            out = recurrent_output(checkpoint, config, layer, x)
        else:
            out = _attention(config, checkpoint, weights, layer, x, kept)
        return residual + _added(spec, out, vectors.attention_norm_weight[layer])

    ffn_norm = partial(_ffn_norm, config, weights)
    before = config.layers[max(layer - 1, 0)].order
    own_input = layer_input(before, layer, h, ffn_norm, scaled)
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
    if spec.order.begins_pair:
        kept[-1] = ffn_residual, _added(spec, out, ffn_output_norm)
        return ffn_residual
    return ffn_residual + _added(spec, out, ffn_output_norm)


def _added(spec: LayerSpec, x: torch.Tensor, norm_weight: np.ndarray) -> torch.Tensor:
    """Attention's or FFN's output as it is added to the residual: normed, scaled."""
    normed = _norm(spec, x, norm_weight, norm_weight[:0]) if norm_weight.size else x
    return normed * spec.residual_scale


def _per_layer(
    config: ModelConfig, embedding: EmbeddingWeights, tokens: np.ndarray, h: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states before the first layer, and layers' own embeddings (T, L, P)."""
    if not config.per_layer_size:
        return h, h[:, :0]
    rows = torch.from_numpy(embedding.lookup_per_layer(tokens)).double()
    return h, rows.view(len(tokens), config.num_layers, -1)


def _scaled_output(
    config: ModelConfig,
    weights: AttentionWeights,
    inputs: tuple[torch.Tensor, torch.Tensor],
    layer: int,
    h: torch.Tensor,
) -> torch.Tensor:
    """What a layer with `scales_output` hands on; inputs: of `_per_layer`."""
    spec, vectors, matrices = config.layers[layer], weights.vectors, weights.per_layer
    if config.per_layer_size:
        no_bias, (first, own) = matrices.context_norm[:0], inputs
        context = _linear(first, matrices.context[layer], no_bias) * config.hidden_size**-0.5
        context = _norm(spec, context, matrices.context_norm, no_bias)
        gate = _linear(h, matrices.gate[layer], no_bias)
        x = activated("gelu_tanh", gate, 0.0) * (context + own[:, layer]) * 2**-0.5
        part = _linear(x, matrices.projection[layer], no_bias)
        h = h + _norm(spec, part, vectors.per_layer_norm_weight[layer], no_bias)
    return h * float(vectors.output_scale[layer, 0])


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


def _rope(config: ModelConfig, index: int, x: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + size / 2) of the first `size` dimensions of x (T, heads, hd)."""
    if index < 0:
        return x
    rope = config.ropes[index]
    inv_freq = torch.from_numpy(rope.inv_freq(config.rotated_head_dim(index), len(x)))
    # Angles are rounded to float32, as in transformers.
    angles = torch.outer(torch.arange(x.shape[0], dtype=torch.float32), inv_freq).double()
    growths = torch.ones(len(x), 1, 1, dtype=torch.float64)
    if rope.query_growth:
        times = torch.arange(len(x)).div(rope.original_max_positions, rounding_mode="floor")
        growths += rope.query_growth * torch.log(1 + times.double())[:, None, None]
    scales = growths * rope.table_scale
    cos, sin = (part[:, None] * scales for part in (angles.cos(), angles.sin()))
    rotated, rest = x.tensor_split([2 * len(inv_freq)], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat([*turned, rest * growths], dim=-1)


def _qk_norm(spec: LayerSpec, x: torch.Tensor, weight: np.ndarray) -> torch.Tensor:
    """RMSNorm of every len(weight) numbers of x (T, heads, hd)."""
    if not weight.size:
        return x
    parts = x.reshape(len(x), -1, weight.size)
    return _norm(spec, parts, weight, weight[:0]).reshape(x.shape)


def _normed_and_rotated(
    config: ModelConfig, spec: LayerSpec, x: torch.Tensor, norm: np.ndarray, rope: int
) -> torch.Tensor:
    """Queries or keys x (T, heads, hd), normed first or rotated first."""
    if spec.attention.norms_rotated:
        return _qk_norm(spec, _rope(config, rope, x), norm)
    return _rope(config, rope, _qk_norm(spec, x, norm))


def _attention(
    config: ModelConfig,
    checkpoint: Checkpoint,
    weights: AttentionWeights,
    layer: int,
    x: torch.Tensor,
    kept: KeysAndValues,
) -> torch.Tensor:
    """kept: keys and values of the layers before, for those that have none of their own."""
    spec, vectors = config.layers[layer], weights.vectors
    own = spec.attention
    if own.latent is not None:
        out = _latent_attention(config, weights, layer, x)
        return _linear(out, weights.out.matrix(layer), vectors.out_bias[layer])
    heads, kv_heads, size = own.num_heads, own.num_kv_heads, own.head_dim
    parts = [_linear(x, part, vectors.qkv_bias[layer][:0]) for part in weights.qkv.parts(layer)]
    qkv = torch.cat(parts, dim=1)
    if vectors.qkv_bias.size:
        qkv += _double(vectors.qkv_bias[layer, : qkv.shape[1]])
    qkv = qkv.view(len(x), -1, size)
    if own.has_gate:
        gate = qkv[:, heads : 2 * heads]
        qkv = torch.cat([qkv[:, :heads], qkv[:, 2 * heads :]], dim=1)
    q_norm, k_norm, v_norm = (
        getattr(vectors, name)[layer, : spec.vectors[name]]
        for name in ("q_norm_weight", "k_norm_weight", "v_norm_weight")
    )
    q = _normed_and_rotated(config, spec, qkv[:, :heads], q_norm, own.query_rope)
    if own.kv_layer == layer:
        k, v = qkv[:, heads:].split([kv_heads, kv_heads], dim=1)  # each (T, heads, hd)
        k = _normed_and_rotated(config, spec, k, k_norm, own.rope)
        kept[layer] = k, _qk_norm(spec, v, v_norm)
    k, v = kept[own.kv_layer]
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
    out = torch.einsum("hts,shd->thd", shares, v)
    if own.has_gate:
        out *= torch.sigmoid(gate)
    out = out.reshape(len(x), -1)
    return _linear(out, weights.out.matrix(layer), vectors.out_bias[layer])


def _latent_attention(
    config: ModelConfig, weights: AttentionWeights, layer: int, x: torch.Tensor
) -> torch.Tensor:
    """Multi-head latent attention as it is defined: with all heads' keys and values.

    Rotated numbers stand before the others here; a score does not depend on their order.
    """
    spec, vectors = config.layers[layer], weights.vectors
    own, latent = spec.attention, spec.attention.latent
    assert latent is not None
    none, parts = vectors.out_bias[layer][:0], weights.qkv.parts(layer)
    joined = torch.cat([_linear(x, part, none) for part in parts], dim=1)
    q, rotated, low = joined.split([spec.input_sizes[0], latent.rope_size, latent.rank], dim=1)
    if latent.query_rank:
        q = _norm(spec, q, vectors.q_norm_weight[layer], none)
        q = _linear(q, weights.latent.queries.matrix(layer), none)
    q_rotated, q_plain = q.view(len(x), own.num_heads, -1).split(
        [latent.rope_size, latent.plain_size], dim=2
    )
    low = _norm(spec, low, vectors.k_norm_weight[layer], none)
    absorbed = _double(weights.latent.keys.matrix(layer)).view(own.num_heads, latent.rank, -1)
    k_plain = torch.einsum("hrp,sr->shp", absorbed, low)
    v = _linear(low, weights.latent.values.matrix(layer), none).view(len(x), own.num_heads, -1)
    k_rotated = _rope(config, own.rope, rotated[:, None]).expand(-1, own.num_heads, -1)
    q = _rope(config, own.query_rope, torch.cat([q_rotated, q_plain], dim=2))
    scores = torch.einsum("thd,shd->hts", q, torch.cat([k_rotated, k_plain], dim=2)) * own.scale
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", shares, v).reshape(len(x), -1)


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
