"""Attention and head of many tokens of one sequence (prefill), by torch.

The same layer orders as numba_kernels.serve_attention, as matrix products over all tokens.
"""

import numpy as np
import torch

from actors.matrix_products import MatrixProducts, as_tensor
from numba_kernels.mailbox import FIRST_LOGIT, LAYER, NUM_TOKENS, Wires
from numba_kernels.norm import RMS_NORM
from numba_kernels.serve_attention import PARALLEL, POST_NORM, AttentionArrays, AttentionShape

_NO_BIAS = np.empty(0, np.float32)


def _norm(
    shape: AttentionShape, x: torch.Tensor, weight: np.ndarray, bias: np.ndarray
) -> torch.Tensor:
    if not weight.size:
        return x
    scale, width = torch.from_numpy(weight), (x.shape[-1],)
    epsilon = float(shape.norm_epsilon)
    if shape.norm_kind == RMS_NORM:
        return torch.nn.functional.rms_norm(x, width, scale, epsilon)
    shift = torch.from_numpy(bias) if bias.size else None
    return torch.nn.functional.layer_norm(x, width, scale, shift, epsilon)


def _layer_input(
    hidden: np.ndarray, layer: int, shape: AttentionShape, arrays: AttentionArrays
) -> torch.Tensor:
    x = torch.from_numpy(hidden)
    if shape.order == POST_NORM and layer > 0:
        return _norm(shape, x, arrays.ffn_norm_weight[layer - 1], arrays.ffn_norm_bias[layer - 1])
    return x


def _rotate(heads: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """heads (T, H, head_dim), table (T, 2, head_dim / 2)."""
    cos, sin = table[:, None, 0], table[:, None, 1]
    a, b = heads.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _cached(
    cache: np.ndarray, pages: np.ndarray, positions: np.ndarray, new: torch.Tensor
) -> torch.Tensor:
    """Put the tensor `new` (T, G, head_dim) at `positions`; returns all (G, last + 1, head_dim).

    cache (M, G, P, head_dim) of one layer; the result is float32.
    """
    store, size, length = as_tensor(cache), cache.shape[2], int(positions[-1]) + 1
    page_ids = torch.from_numpy(pages[: -(-length // size)].astype(np.int64))
    at = torch.from_numpy(positions.astype(np.int64))
    store[page_ids[at // size], :, at % size] = new.to(store.dtype)
    whole = store[page_ids].to(torch.float32).transpose(0, 1)
    return whole.reshape(cache.shape[1], -1, cache.shape[3])[:, :length]


def _attend(
    wires: Wires,
    layer: int,
    num_tokens: int,
    qkv: torch.Tensor,
    shape: AttentionShape,
    arrays: AttentionArrays,
) -> torch.Tensor:
    """Write keys and values to the cache, attend over all of it; returns (T, H * head_dim)."""
    positions, pages = wires.positions[:num_tokens], wires.page_tables[wires.slots[0]]
    heads = qkv.view(num_tokens, -1, shape.head_dim)
    queries, keys, values = heads.split(
        [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1
    )
    if arrays.rope_table.shape[0]:
        table = torch.from_numpy(arrays.rope_table[positions])
        queries, keys = _rotate(queries, table), _rotate(keys, table)
    first, last = int(positions[0]), int(positions[-1]) + 1
    mask = torch.arange(last) <= torch.arange(first, last)[:, None]
    attended = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        _cached(arrays.keys[layer], pages, positions, keys)[None],
        _cached(arrays.values[layer], pages, positions, values)[None],
        attn_mask=mask,
        enable_gqa=shape.num_heads != shape.num_kv_heads,
    )
    return attended[0].transpose(0, 1).reshape(num_tokens, -1)


def dense_attention(
    products: MatrixProducts,
    service: int,
    wires: Wires,
    shape: AttentionShape,
    arrays: AttentionArrays,
) -> None:
    """Answer an ATTENTION request whose tokens are consecutive positions of one sequence.

    Errors:  ValueError for tokens of several sequences
    """
    layer = int(wires.requests[service, LAYER])
    num_tokens = int(wires.requests[service, NUM_TOKENS])
    if np.ptp(wires.slots[:num_tokens]) or (np.diff(wires.positions[:num_tokens]) != 1).any():
        raise ValueError("prefill takes consecutive positions of one sequence")
    residual = _layer_input(wires.hidden[:num_tokens], layer, shape, arrays)
    norm = arrays.norm_weight[layer], arrays.norm_bias[layer]
    ffn_norm = arrays.ffn_norm_weight[layer], arrays.ffn_norm_bias[layer]
    normed = residual if shape.order == POST_NORM else _norm(shape, residual, *norm)
    qkv = products.linear(normed, arrays.qkv[layer], arrays.qkv_bias[layer])
    heads = _attend(wires, layer, num_tokens, qkv, shape, arrays)
    mixed = residual + products.linear(heads, arrays.out[layer], arrays.out_bias[layer])
    if shape.order == POST_NORM:
        mixed = ffn_input = _norm(shape, mixed, *norm)
    elif shape.order == PARALLEL:
        ffn_input = _norm(shape, residual, *ffn_norm) if ffn_norm[0].size else normed
    else:
        ffn_input = _norm(shape, mixed, *ffn_norm)
    torch.from_numpy(wires.mixed[:num_tokens]).copy_(mixed)
    torch.from_numpy(wires.ffn_input[:num_tokens]).copy_(ffn_input)


def dense_head(
    products: MatrixProducts,
    service: int,
    wires: Wires,
    shape: AttentionShape,
    arrays: AttentionArrays,
) -> None:
    """Answer a HEAD request for many tokens."""
    begin = int(wires.requests[service, FIRST_LOGIT])
    end = int(wires.requests[service, NUM_TOKENS])
    num_layers = arrays.norm_weight.shape[0]
    x = _layer_input(wires.hidden[begin:end], num_layers, shape, arrays)
    x = _norm(shape, x, arrays.final_norm_weight, arrays.final_norm_bias)
    if arrays.project_out.shape[0]:
        x = products.linear(x, arrays.project_out, _NO_BIAS)
    torch.from_numpy(wires.logits[: end - begin]).copy_(products.linear(x, arrays.head, _NO_BIAS))
