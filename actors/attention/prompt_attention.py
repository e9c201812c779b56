"""Attention and head of many tokens of one sequence (prefill), by torch.

The same computation as `numba_kernels.serve.serve_attention`, as matmuls over all tokens. Calls
only record the work; all threads run it at the end of `Matmul.at_once`.
"""

import numpy as np
import torch

from hotcold.actors.cpu.matmul import Matmul
from hotcold.model.config.layer_order import layer_input, mixed_and_ffn_input
from hotcold.numba_kernels.decode.attention import read_kernel
from hotcold.numba_kernels.decode.norm import norm_rows_kernel
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.serve.mailbox import FIRST_LOGIT, LAYER, NUM_TOKENS, SharedBuffers
from hotcold.numba_kernels.serve.serve_attention import (
    AttentionArrays,
    norm_whole,
    rotate_and_store,
)

_NO_BIAS = np.empty(0, np.float32)
_QUERIES = 64  # at a time, which read keys up to the last of them
_PARTS = 4  # of the KV heads, if there are so many


class _Rows:
    """Operations on rows of tokens, recorded in `matmul`: each thread has its own tokens."""

    def __init__(self, matmul: Matmul, arrays: AttentionArrays) -> None:
        self._matmul, self._arrays = matmul, arrays

    def norm(
        self, layer: int, rows: torch.Tensor, weight: np.ndarray, bias: np.ndarray
    ) -> torch.Tensor:
        """The rows, normed as the layer does; `rows` itself without weights."""
        if not weight.size:
            return rows
        numbers = self._arrays.numbers[layer]
        kind, epsilon = numbers.norm_kind, numbers.norm_eps
        into, x = self._matmul.scratch(tuple(rows.shape)), rows.numpy()
        out = torch.from_numpy(into)

        def norm(first: int, last: int) -> None:
            norm_rows_kernel(kind, x, weight, bias, epsilon, into, first, last)

        self._matmul.then_rows(rows.shape[0], norm)
        return out

    def add(self, layer: int, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """residual + rows, scaled where the layer does so."""
        out = torch.from_numpy(self._matmul.scratch(tuple(rows.shape)))
        scale = float(self._arrays.numbers[layer].residual_scale)

        def add(first: int, last: int) -> None:
            torch.add(residual[first:last], rows[first:last], alpha=scale, out=out[first:last])

        self._matmul.then_rows(rows.shape[0], add)
        return out

    def ffn_norm(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """The rows, normed for the layer's FFN or the next layer."""
        vectors = self._arrays.vectors
        weight, bias = vectors.ffn_norm_weight[layer], vectors.ffn_norm_bias[layer]
        return self.norm(layer, rows, weight, bias)

    def layer_input(self, layer: int, hidden: np.ndarray) -> torch.Tensor:
        """The input of layer `layer`, or of the head after the last one."""
        before = self._arrays.numbers[max(layer - 1, 0)]
        return layer_input(before, layer, torch.from_numpy(hidden), self.ffn_norm)


def _attend(
    matmul: Matmul,
    buffers: SharedBuffers,
    layer: int,
    qkv: np.ndarray,
    arrays: AttentionArrays,
) -> torch.Tensor:
    """Write keys and values to the cache, attend over all of it: (T, H * head_dim) once run.

    Overwrites qkv (T, rows).
    """
    num_tokens, num_threads, size = qkv.shape[0], matmul.num_threads, arrays.keys.shape[3]
    numbers, first = arrays.numbers[layer], int(buffers.positions[0])
    num_heads, num_kv_heads = int(numbers.num_heads), int(numbers.num_kv_heads)
    head_dim, window = int(numbers.head_dim), int(numbers.window)
    first_page = max(0, first + 1 - window) // size if window else 0
    end_page = -(-(first + num_tokens) // size)
    pages = buffers.page_tables[buffers.slots[0], first_page:end_page]
    cached = matmul.scratch((2, num_kv_heads, pages.size * size, head_dim))

    def norm(thread: int) -> None:
        norm_whole(thread, num_threads, layer, arrays, qkv)

    def store(thread: int) -> None:
        rotate_and_store(thread, num_threads, layer, buffers, arrays, qkv)

    def read(thread: int) -> None:
        heads = split_range(num_kv_heads, thread, num_threads, 1)
        for cache, out in zip((arrays.keys, arrays.values), cached, strict=True):
            read_kernel(cache[layer], pages, *heads, out)

    if arrays.vectors.q_norm_weight.shape[1] > head_dim:
        matmul.then(norm)
    matmul.then(store)
    matmul.then(read)
    heads = torch.from_numpy(qkv).view(num_tokens, -1, head_dim)
    queries = heads[:, :num_heads].transpose(0, 1)
    keys, values = torch.from_numpy(cached)
    attended = torch.from_numpy(matmul.scratch((num_tokens, num_heads, head_dim)))
    group = num_heads // num_kv_heads

    def part(begin: int, own: slice) -> None:
        """Queries from `begin` on, of the heads that read KV heads `own`."""
        end = min(begin + _QUERIES, num_tokens)
        seen = max(0, first + begin + 1 - window) if window else 0
        key_at = torch.arange(seen, first + end)
        query_at = torch.arange(first + begin, first + end)[:, None]
        mask = key_at <= query_at
        if window:
            mask &= key_at > query_at - window
        span = slice(seen - first_page * size, first + end - first_page * size)
        of_group = slice(own.start * group, own.stop * group)
        # Heads with the same keys count as more queries of one head.
        grouped = queries[of_group, begin:end].reshape(own.stop - own.start, -1, head_dim)
        found = _attention(
            numbers, grouped, keys[own, span], values[own, span], mask.repeat(group, 1)
        )
        by_head = found.view(-1, end - begin, head_dim)
        attended[begin:end, of_group] = by_head.transpose(0, 1)

    # The last queries read most keys and go first; each part goes to the next free thread.
    at_once = max(1, num_kv_heads // _PARTS)
    starts = range(0, num_kv_heads, at_once)
    owns = [slice(start, min(start + at_once, num_kv_heads)) for start in starts]
    parts = [(begin, own) for begin in reversed(range(0, num_tokens, _QUERIES)) for own in owns]
    left = iter(parts)

    def attend(thread: int) -> None:
        for begin, own in left:
            part(begin, own)

    matmul.then(attend)
    return attended.view(num_tokens, -1)


def _attention(
    numbers: np.record,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """queries (G, T, hd), keys and values (G, P, hd), mask (T, P): (G, T, hd)."""
    scale, cap = float(numbers.scale), float(numbers.softcap)
    if not cap:
        whole = torch.nn.functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=mask, scale=scale
        )
        return whole[0]
    scores = cap * torch.tanh(queries @ keys.transpose(1, 2) * scale / cap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values


def prompt_attention(
    matmul: Matmul,
    service: int,
    buffers: SharedBuffers,
    arrays: AttentionArrays,
) -> None:
    """Answer an ATTENTION request whose tokens are consecutive positions of one sequence.

    Errors:  ValueError for tokens of several sequences
    """
    layer = int(buffers.requests[service, LAYER])
    num_tokens = int(buffers.requests[service, NUM_TOKENS])
    if np.ptp(buffers.slots[:num_tokens]) or (np.diff(buffers.positions[:num_tokens]) != 1).any():
        raise ValueError("prefill takes consecutive positions of one sequence")

    rows = _Rows(matmul, arrays)
    vectors = arrays.vectors
    matmul.begin_layer()

    def norm(x: torch.Tensor) -> torch.Tensor:
        return rows.norm(layer, x, vectors.norm_weight[layer], vectors.norm_bias[layer])

    def add_attention(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        num_rows = sum(map(len, arrays.qkv.parts(layer)))
        qkv = matmul.scratch((num_tokens, num_rows))
        matmul.layer_linear(x.numpy(), arrays.qkv, layer, vectors.qkv_bias[layer], qkv)
        heads = _attend(matmul, buffers, layer, qkv, arrays).numpy()
        product = matmul.scratch((num_tokens, len(arrays.out[layer])))
        matmul.linear(heads, arrays.out[layer], vectors.out_bias[layer], product)
        out = torch.from_numpy(product)
        out = rows.norm(layer, out, vectors.attention_norm_weight[layer], _NO_BIAS)
        return rows.add(layer, residual, out)

    with matmul.at_once():
        mixed, ffn_input = mixed_and_ffn_input(
            arrays.numbers[layer],
            rows.layer_input(layer, buffers.hidden[:num_tokens]),
            norm=norm,
            ffn_norm=lambda x: rows.ffn_norm(layer, x),
            add_attention=add_attention,
        )

        def answer(first: int, last: int) -> None:
            buffers.mixed[first:last] = mixed[first:last].numpy()
            buffers.ffn_input[first:last] = ffn_input[first:last].numpy()

        matmul.then_rows(num_tokens, answer)


def prompt_head(
    matmul: Matmul,
    service: int,
    buffers: SharedBuffers,
    arrays: AttentionArrays,
) -> None:
    """Answer a HEAD request for many tokens."""
    begin = int(buffers.requests[service, FIRST_LOGIT])
    end = int(buffers.requests[service, NUM_TOKENS])
    num_layers = len(arrays.numbers)
    logits, cap = torch.from_numpy(buffers.logits[: end - begin]), float(arrays.logit_softcap)
    rows = _Rows(matmul, arrays)
    matmul.begin_layer()
    with matmul.at_once():
        x = rows.layer_input(num_layers, buffers.hidden[begin:end])
        x = rows.norm(num_layers - 1, x, arrays.final_norm_weight, arrays.final_norm_bias)
        if arrays.project_out.shape[0]:
            x = torch.from_numpy(matmul.linear(x.numpy(), arrays.project_out, _NO_BIAS))
        matmul.linear(x.numpy(), arrays.head, _NO_BIAS, logits.numpy())
    if cap:
        logits.copy_(cap * torch.tanh(logits / cap))
