"""Attention and head of many tokens of one sequence (prefill), by torch.

What numba_kernels.serve.serve_attention computes, as matrix products over all tokens.
"""

import numpy as np
import torch

from actors.cpu.matrix_products import MatrixProducts
from model.config.layer_order import layer_input, mixed_and_ffn_input
from numba_kernels.decode.attention import read_kernel
from numba_kernels.decode.norm import RMS_NORM
from numba_kernels.decode.rows import split_range
from numba_kernels.serve.mailbox import FIRST_LOGIT, LAYER, NUM_TOKENS, Wires
from numba_kernels.serve.serve_attention import (
    AttentionArrays,
    AttentionShape,
    norm_whole,
    rotate_and_store,
)

_NO_BIAS = np.empty(0, np.float32)
_QUERIES = 128  # at a time: they read no keys but up to the last of them


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
    def ffn_norm(layer: int, x: torch.Tensor) -> torch.Tensor:
        return _norm(shape, x, arrays.ffn_norm_weight[layer], arrays.ffn_norm_bias[layer])

    return layer_input(shape.order, layer, torch.from_numpy(hidden), ffn_norm)


def _attend(
    products: MatrixProducts,
    wires: Wires,
    layer: int,
    qkv: np.ndarray,
    shape: AttentionShape,
    arrays: AttentionArrays,
) -> torch.Tensor:
    """Write keys and values to the cache, attend over all of it; returns (T, H * head_dim).

    qkv (T, rows) is overwritten.
    """
    num_tokens, num_threads, size = qkv.shape[0], products.num_threads, arrays.keys.shape[3]
    first = int(wires.positions[0])
    window = int(arrays.windows[layer])
    first_page = max(0, first + 1 - window) // size if window else 0
    end_page = -(-(first + num_tokens) // size)
    pages = wires.page_tables[wires.slots[0], first_page:end_page]
    cached = np.empty((2, shape.num_kv_heads, pages.size * size, shape.head_dim), np.float32)

    def norm(thread: int) -> None:
        norm_whole(thread, num_threads, layer, shape, arrays, qkv)

    def store(thread: int) -> None:
        rotate_and_store(thread, num_threads, layer, wires, shape, arrays, qkv)

    def read(thread: int) -> None:
        heads = split_range(shape.num_kv_heads, thread, num_threads, 1)
        for cache, out in zip((arrays.keys, arrays.values), cached, strict=True):
            read_kernel(cache[layer], pages, *heads, out)

    if arrays.q_norm_weight.shape[1] > shape.head_dim:
        products.each_thread(norm)
    products.each_thread(store)
    products.each_thread(read)
    heads = torch.from_numpy(qkv).view(num_tokens, -1, shape.head_dim)
    queries = heads[:, : shape.num_heads].transpose(0, 1)[None]
    keys, values = torch.from_numpy(cached)[:, None]
    attended = torch.empty(num_tokens, shape.num_heads, shape.head_dim)
    for begin in range(0, num_tokens, _QUERIES):
        end = min(begin + _QUERIES, num_tokens)
        seen = max(0, first + begin + 1 - window) if window else 0
        theirs = torch.arange(seen, first + end)
        own = torch.arange(first + begin, first + end)[:, None]
        mask = theirs <= own
        if window:
            mask &= theirs > own - window
        part = slice(seen - first_page * size, first + end - first_page * size)
        attended[begin:end] = _attention(
            shape, queries[:, :, begin:end], keys[:, :, part], values[:, :, part], mask
        )[0].transpose(0, 1)
    return attended.view(num_tokens, -1)


def _attention(
    shape: AttentionShape,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """queries (1, H, T, hd), keys and values (1, G, P, hd), mask (T, P): (1, H, T, hd)."""
    scale, cap = float(shape.scale), float(shape.softcap)
    if not cap:
        return torch.nn.functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            enable_gqa=shape.num_heads != shape.num_kv_heads,
            scale=scale,
        )
    group = shape.num_heads // shape.num_kv_heads
    keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
    scores = cap * torch.tanh(queries @ keys.transpose(2, 3) * scale / cap)
    shares = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return shares @ values


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

    def norm(x: torch.Tensor) -> torch.Tensor:
        return _norm(shape, x, arrays.norm_weight[layer], arrays.norm_bias[layer])

    def ffn_norm(x: torch.Tensor) -> torch.Tensor:
        return _norm(shape, x, arrays.ffn_norm_weight[layer], arrays.ffn_norm_bias[layer])

    def add_attention(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        qkv = products.linear(x, arrays.qkv[layer], arrays.qkv_bias[layer])
        heads = _attend(products, wires, layer, qkv.numpy(), shape, arrays)
        out = products.linear(heads, arrays.out[layer], arrays.out_bias[layer])
        out = _norm(shape, out, arrays.attention_norm_weight[layer], _NO_BIAS)
        return residual + (out if shape.residual_scale == 1 else out * float(shape.residual_scale))

    mixed, ffn_input = mixed_and_ffn_input(
        shape.order,
        _layer_input(wires.hidden[:num_tokens], layer, shape, arrays),
        norm=norm,
        ffn_norm=ffn_norm,
        add_attention=add_attention,
    )
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
    logits, cap = products.linear(x, arrays.head, _NO_BIAS), float(shape.logit_softcap)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    torch.from_numpy(wires.logits[: end - begin]).copy_(logits)
