"""Multi-head latent attention: queries brought to the cache's rows, and heads out of them.

The cache has one row a position, [rotated part, latent vector], which is key and value of all heads
(`LatentSpec` of the model package). So a head's query is multiplied with that head's transposed key
matrix before attention, and what attention makes of latent vectors with its value matrix after it.
A model without it has None for the arrays, and nothing is compiled.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.by_format import with_matrix
from hotcold.numba_kernels.decode.norm import rms_norm_kernel
from hotcold.numba_kernels.decode.rows import block_products
from hotcold.numba_kernels.decode.vectors import (
    ActivationSpace,
    activation_space,
    aligned_zeros,
    copy_numbers,
    quantize_activations,
)
from hotcold.numba_kernels.loops.work_stealing import next_block

_TOKENS = 32  # of a head that a thread takes at once


class LatentSpace(NamedTuple):
    """Work space for up to T tokens, float32.

    inputs (T, rows of the layer's first product): queries or their vector, rotated part, latent
    low_queries (T, query rank): the queries' vector, normed; queries (T, H * query size)
    mixed (T, H * value size): heads as the output projection takes them
    rows (threads, at least _TOKENS * width), vectors: of one head's product
    """

    inputs: np.ndarray
    low_queries: np.ndarray
    queries: np.ndarray
    mixed: np.ndarray
    rows: np.ndarray
    vectors: ActivationSpace


def latent_space(
    num_threads: int, num_tokens: int, num_inputs: int, numbers: np.ndarray
) -> LatentSpace:
    """Work space; `numbers` (L,) of LAYER_NUMBERS. What is not used of it takes no memory."""
    one = numbers[0]
    size = int(one["plain_size"]) + 2 * int(one["rotated_pairs"])
    width = max(int(one["plain_size"]), int(one["latent_size"]))

    def space(row: int) -> np.ndarray:
        return aligned_zeros((num_tokens, row))

    return LatentSpace(
        inputs=space(num_inputs),
        low_queries=space(int(one["query_rank"])),
        queries=space(int(one["num_heads"]) * size),
        mixed=space(int(one["num_heads"]) * int(one["value_size"])),
        rows=aligned_zeros((num_threads, _TOKENS * width)),
        vectors=activation_space(num_threads, _TOKENS, width),
    )


@njit(nogil=True, cache=True)
def first_products(latent, space, qkv, num_tokens):
    """Where the products with a layer's input go: `qkv` (T, rows), or latent attention's inputs."""
    if latent is None:
        return qkv
    return space.inputs[:num_tokens]


@njit(nogil=True, cache=True)
def norm_inputs(latent, part, num_parts, layer, arrays, space, qkv):
    """Norm the queries' vector and the latent one, and write the key, of every num_parts-th token.

    qkv (T, (H + 1) * (rotated + latent)): its last head is the key
    """
    if latent is None:
        return
    numbers, vectors = arrays.numbers[layer], arrays.vectors
    dim, rank = numbers.head_dim, numbers.query_rank
    first = space.inputs.shape[1] - dim
    for t in range(part, qkv.shape[0], num_parts):
        inputs, key = space.inputs[t], qkv[t, numbers.num_heads * dim :]
        weight = vectors.k_norm_weight[layer]
        low = inputs[first + 2 * numbers.rotated_pairs :]
        copy_numbers(inputs[first:], key[:dim])
        rms_norm_kernel(low, weight, numbers.norm_eps, key[2 * numbers.rotated_pairs : dim])
        if rank > 0:
            weight = vectors.q_norm_weight[layer]
            rms_norm_kernel(inputs[:rank], weight, numbers.norm_eps, space.low_queries[t])
        else:
            copy_numbers(inputs, space.queries[t])


@njit(nogil=True, cache=True)
def _head_products(weights, first, last, thread, source, column, width, space, out):
    """out[t] = rows first..last-1 . source[t, column : column + width], of up to _TOKENS tokens."""
    count = source.shape[0]
    x = space.rows[thread, : count * width].reshape(count, width)
    for t in range(count):
        copy_numbers(source[t, column : column + width], x[t])
    vectors = quantize_activations(weights, x, space.vectors, thread)
    block_products(weights, vectors, out, first, last, 0)


@njit(nogil=True, cache=True)
def absorb_queries(latent, counters, thread, layer, numbers, space, queries, qkv):
    """Write the heads' queries (T, H * query size) for rows of the cache to qkv, blocks it takes.

    Of a head: its rotated part as it is, and K_h transposed times the rest.
    """
    if latent is None:
        return
    rope, rank, plain = 2 * numbers.rotated_pairs, numbers.latent_size, numbers.plain_size
    keys, dim, num_tokens = latent.keys, numbers.head_dim, qkv.shape[0]
    num_parts = (num_tokens + _TOKENS - 1) // _TOKENS
    taken = next_block(counters, 0)
    while taken < numbers.num_heads * num_parts:
        head, first = taken // num_parts, taken % num_parts * _TOKENS
        last = min(first + _TOKENS, num_tokens)
        begin, own = head * dim, queries[first:last]
        column = head * (rope + plain)
        for t in range(first, last):
            copy_numbers(queries[t, column : column + rope], qkv[t, begin : begin + rope])
        with_matrix(
            keys.arrays, keys.places[layer, 0], _head_products, head * rank, (head + 1) * rank,
            thread, own, column + rope, plain, space, qkv[first:last, begin + rope : begin + dim],
        )  # fmt: skip
        taken = next_block(counters, 0)


@njit(nogil=True, cache=True)
def mix_heads(latent, counters, thread, layer, numbers, space, heads):
    """Write V_h times each head's sum of latent vectors to `mixed`, of blocks that it takes.

    heads (T, H * (rotated + latent))
    """
    if latent is None:
        return
    rope, rank, size = 2 * numbers.rotated_pairs, numbers.latent_size, numbers.value_size
    values, dim, num_tokens = latent.values, numbers.head_dim, heads.shape[0]
    num_parts = (num_tokens + _TOKENS - 1) // _TOKENS
    taken = next_block(counters, 0)
    while taken < numbers.num_heads * num_parts:
        head, first = taken // num_parts, taken % num_parts * _TOKENS
        last = min(first + _TOKENS, num_tokens)
        with_matrix(
            values.arrays, values.places[layer, 0], _head_products, head * size, (head + 1) * size,
            thread, heads[first:last], head * dim + rope, rank, space,
            space.mixed[first:last, head * size : (head + 1) * size],
        )  # fmt: skip
        taken = next_block(counters, 0)


@njit(nogil=True, cache=True)
def mixed_heads(latent, space, heads):
    """What the output projection takes: `heads` (T, H * head_dim), or what `mix_heads` wrote."""
    if latent is None:
        return heads
    return space.mixed[: heads.shape[0]]
