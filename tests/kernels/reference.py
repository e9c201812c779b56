"""The kernels' reference in float64 NumPy: same names, same order of arguments.

Nothing is checked and nothing is fast. Where a function takes weights, they are bits of float32,
float16 (uint16) or bfloat16 (int16), widened by torch, not by the code under test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def widened(bits: np.ndarray) -> np.ndarray:
    """The float64 values of weight bits."""
    bits = np.ascontiguousarray(bits)
    if bits.dtype == np.int16:
        return torch.from_numpy(bits.copy()).view(torch.bfloat16).to(torch.float64).numpy()
    return bits.view(np.float16 if bits.dtype == np.uint16 else bits.dtype).astype(np.float64)


def narrowed(values: np.ndarray, dtype: type) -> np.ndarray:
    """Values as weight bits of `dtype`, rounded by torch."""
    tensor = torch.from_numpy(np.ascontiguousarray(values, np.float32))
    if dtype is np.int16:
        return tensor.to(torch.bfloat16).view(torch.int16).numpy().copy()
    if dtype is np.uint16:
        return tensor.to(torch.float16).numpy().view(np.uint16).copy()
    return tensor.numpy().copy()


def gemv(weights: np.ndarray, x: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """out[t, n] = weights[n] . x[t] + bias[n]."""
    out = x.astype(np.float64) @ widened(weights).T
    return out if bias is None else out + bias


def activate(values: np.ndarray, activation_fn: str, threshold: float = 0.0) -> np.ndarray:
    """An FFN's function; gelu by erf."""
    if activation_fn in ("relu", "drelu"):
        return np.maximum(values, 0)
    if activation_fn == "relu2":
        return np.maximum(values, 0) ** 2
    if activation_fn == "fatrelu":
        return np.where(values > threshold, values, 0)
    if activation_fn == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (values + 0.044715 * values**3)
        return 0.5 * values * (1 + np.tanh(inner))
    if activation_fn == "clamped_silu":
        values = np.minimum(values, threshold)
        with np.errstate(over="ignore"):
            return values / (1 + np.exp(-1.702 * values))
    if activation_fn == "silu":
        with np.errstate(over="ignore"):
            return values / (1 + np.exp(-values))
    return 0.5 * values * (1 + np.vectorize(math.erf, otypes=[float])(values / math.sqrt(2)))


def activate_up(values: np.ndarray, activation_fn: str, limit: float = 0.0) -> np.ndarray:
    """The factor of up rows."""
    if activation_fn == "clamped_silu":
        return np.clip(values, -limit, limit) + 1
    return np.maximum(values, 0) if activation_fn == "drelu" else values


def rope(heads: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
    """Each pair (i, half + i) of a head as a complex number, rotated; the rest stays."""
    half = cos_sin.shape[1]
    pairs = heads[:, :half].astype(np.float64) + 1j * heads[:, half : 2 * half]
    rotated = pairs * (cos_sin[0].astype(np.float64) + 1j * cos_sin[1])
    return np.concatenate([rotated.real, rotated.imag, heads[:, 2 * half :]], axis=1)


def decode_attention(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, length: int, **changes: Any
) -> np.ndarray:
    """`prompt_attention` of one token's queries (H, hd), which see `length` positions."""
    seen = keys[:, :length], values[:, :length]
    return prompt_attention(queries[None], *seen, **changes)[0]


def _shares(scores: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """Softmax of scores (H, ..., P), with a sink a head (H,)."""
    if sinks is not None:
        column = sinks.astype(np.float64).reshape(-1, *[1] * (scores.ndim - 1))
        column = np.broadcast_to(column, (*scores.shape[:-1], 1))
        return _shares(np.concatenate([scores, column], axis=-1), None)[..., :-1]
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    found: np.ndarray = shares / shares.sum(axis=-1, keepdims=True)
    return found


def prompt_attention(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    window: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """softmax(keys . query / sqrt(head_dim)) . values; each key-value head serves a group.

    Queries (T, H, hd) are the last ones of all positions of keys and values (G, P, hd); each sees
    keys up to its own. `sinks` (H,) are scores of a position that each head sees besides, whose
    value is 0.
    """
    group, first = queries.shape[1] // keys.shape[0], keys.shape[1] - queries.shape[0]
    k, v = (np.repeat(widened(each), group, axis=0) for each in (keys, values))
    scores = np.einsum("hpd,thd->htp", k, queries.astype(np.float64))
    scores *= queries.shape[2] ** -0.5 if scale is None else scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    positions = np.arange(keys.shape[1])
    own = positions[first:, None]
    is_seen = (positions <= own) & (positions > own - (window or keys.shape[1]))
    scores = np.where(is_seen, scores, -np.inf)
    return np.einsum("htp,hpd->thd", _shares(scores, sinks), v)


def to_bfloat16(weights: np.ndarray) -> np.ndarray:
    """Weights as the nearest bfloat16's bits."""
    return narrowed(widened(weights).astype(np.float32), np.int16)


def sample_shares(
    logits: np.ndarray,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    top_n_sigma: float = -1.0,
    typical_p: float = 1.0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
) -> np.ndarray:
    """The probability with which `sample` and `sample_filtered` must choose each id.

    One filter after the other on a list of ids that is sorted anew for each.
    """
    shares = np.zeros(logits.size)
    if temperature == 0:
        shares[int(np.argmax(logits))] = 1
        return shares
    z = [float(logit) for logit in logits]
    ids = sorted((one for one in range(len(z)) if z[one] > -math.inf), key=lambda one: -z[one])
    if top_n_sigma > 0:
        finite = np.array([z[one] for one in ids])
        ids = [one for one in ids if z[one] >= finite.max() - top_n_sigma * finite.std()]
    ids = ids[:top_k] if top_k else ids
    if typical_p < 1:
        p = _softmax(z, ids)
        entropy = sum(-p[one] * math.log(p[one]) for one in ids if p[one] > 0)
        possible = [one for one in ids if p[one] > 0]
        typical = sorted(possible, key=lambda one: abs(-math.log(p[one]) - entropy))
        held = np.cumsum([p[one] for one in typical])
        count = 1 + sum(1 for one in held if one <= typical_p)
        ids = [one for one in ids if one in typical[:count]]
    p = _softmax(z, ids, temperature)
    before = np.concatenate([[0], np.cumsum([p[one] for one in ids])[:-1]])
    likely = [one for one, sum_before in zip(ids, before, strict=True) if sum_before < top_p]
    ids = likely or ids[:1]
    ids = [one for one in ids if p[one] >= min_p * p[ids[0]]]
    for chance, kept in (
        (1 - xtc_probability, ids),
        (xtc_probability, _without_top_choices(z, ids, xtc_threshold)),
    ):
        for one, share in _softmax(z, kept, temperature).items():
            shares[one] += chance * share
    return shares


def _without_top_choices(z: list[float], ids: list[int], threshold: float) -> list[int]:
    """XTC on ids that are sorted by falling logits."""
    p = _softmax(z, ids)
    top = [one for one in ids if p[one] >= threshold]
    return ids if threshold > 0.5 or len(top) < 2 else ids[len(top) - 1 :]


def _softmax(z: list[float], ids: Sequence[int], temperature: float = 1.0) -> dict[int, float]:
    most = max(z[one] for one in ids)
    weights = {one: math.exp((z[one] - most) / temperature) for one in ids}
    total = sum(weights.values())
    return {one: weight / total for one, weight in weights.items()}


def mirostat_shares(
    logits: np.ndarray, *, version: int, temperature: float, mu: float
) -> np.ndarray:
    """The probability with which `sample_mirostat` must choose each id."""
    z = [float(logit) / temperature for logit in logits]
    ids = sorted((one for one in range(len(z)) if z[one] > -math.inf), key=lambda one: -z[one])
    p = _softmax(z, ids)
    if version == 2:
        ids = [one for one in ids if -math.log2(p[one] or 1e-320) <= mu] or ids[:1]
    else:
        pairs = [
            (math.log((i + 2) / (i + 1)), math.log(p[ids[i]] / p[ids[i + 1]]))
            for i in range(min(99, len(ids) - 1))
        ]
        s_hat = sum(t * b for t, b in pairs) / sum(t * t for t, _ in pairs)
        epsilon = s_hat - 1
        k = (epsilon * 2**mu / (1 - len(z) ** -epsilon)) ** (1 / s_hat)
        ids = ids[: max(int(k), 1)]
    shares = np.zeros(len(z))
    for one, share in _softmax(z, ids).items():
        shares[one] = share
    return shares
