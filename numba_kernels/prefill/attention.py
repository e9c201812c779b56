"""Attention of many tokens of one sequence (prefill) over the paged KV cache.

Work is a block of tokens and the query heads of one KV head. It goes through the pages that its
tokens see, in the order of positions: a page's keys and values are widened to float32 once for the
whole block, and stay in the cache while groups of LANES tokens of a head meet them. A query's sums
change page by page, in an order that its own position and window alone decide. So its bits do not
depend on the chunk, its place in a block, or the threads.

Source:  FlashAttention, Dao et al., arXiv 2205.14135
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS, read_page
from hotcold.numba_kernels.ir.exp_ir import LOG2_E
from hotcold.numba_kernels.ir.prefill_attention_ir import (
    GROUPS,
    TILE_ROWS,
    add_values,
    cap_scores,
    mask_scores,
    score_rows,
    share_scores,
)
from hotcold.numba_kernels.ir.target import LANES
from hotcold.numba_kernels.loops.work_stealing import next_block

_MAX_GROUPS = 8  # of a block: its queries, sums and a page take 200 KB at a head_dim of 128
_NO_WINDOW = 1 << 30
_PAD = LANES  # floats behind a page's row: a power of two between rows would fill one set


def prompt_space_items(head_dim: int) -> int:
    """float32 numbers of a thread's work space, for heads of up to `head_dim` numbers."""
    width = -(-head_dim // TILE_ROWS) * TILE_ROWS
    page = PAGE_POSITIONS * (-(-width // LANES) * LANES + _PAD)
    of_groups = _MAX_GROUPS * (head_dim + 3 + width) + PAGE_POSITIONS * GROUPS
    return 2 * page + of_groups * LANES


@njit(nogil=True, cache=True)
def _spaces(space, head_dim):
    """The kernel's queries, page_keys, page_values, scores, sums, weighted in a thread's space.

    What they are: `numba_kernels.ir.prefill_attention_ir`.
    """
    width = (head_dim + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    row = (width + LANES - 1) // LANES * LANES + _PAD
    page, at = PAGE_POSITIONS * row, _MAX_GROUPS * head_dim * LANES
    queries = space[:at].reshape(_MAX_GROUPS, head_dim, LANES)
    page_keys = space[at : at + page].reshape(PAGE_POSITIONS, row)
    page_values = space[at + page : at + 2 * page].reshape(PAGE_POSITIONS, row)
    at += 2 * page
    end = at + PAGE_POSITIONS * GROUPS * LANES
    scores = space[at:end].reshape(PAGE_POSITIONS, GROUPS, LANES)
    at = end + _MAX_GROUPS * 3 * LANES
    sums = space[end:at].reshape(_MAX_GROUPS, 3, LANES)
    weighted = space[at : at + _MAX_GROUPS * width * LANES].reshape(_MAX_GROUPS, width, LANES)
    return queries, page_keys, page_values, scores, sums, weighted


@njit(nogil=True, cache=True)
def prompt_attention_kernel(
    numbers, sinks, qkv, first, keys, values, pages, space, counters, out
):  # fmt: skip
    """out[t] = softmax(scale * keys . queries[t]) . values of all heads, for blocks it takes.

    `sinks` (H,) are logits that join the heads' softmax and have no value; (0,): there are none.

    Token t is at position first + t and sees the positions up to its own, with a window the last of
    them; scores are brought between -softcap and softcap first, where that is not 0. Keys and
    values of all these positions are in the cache: position p in row p % PAGE_POSITIONS of page
    pages[p // PAGE_POSITIONS]. Others are not read. All threads call it with the same `counters`;
    blocks that see most positions are taken first. Checks nothing.
    Shapes:  numbers: a layer's LAYER_NUMBERS; qkv (T, rows), queries first, rotated; keys, values
             (M, KV heads, PAGE_POSITIONS, row); pages (>= of the last position + 1,);
             space (>= prompt_space_items(head_dim),): a thread's, aligned to 64 bytes; counters: a
             kind of `new_block_counters`, zero; out (T, H * head_dim)
    Dtypes:  qkv, out float32; keys, values as `decode.attention` has them; pages int32
    """
    queries, page_keys, page_values, scores, sums, weighted = _spaces(space, numbers.head_dim)
    num_kv_heads, num_tokens = numbers.num_kv_heads, qkv.shape[0]
    heads = numbers.num_heads // num_kv_heads
    num_parts = -(-heads // _MAX_GROUPS)
    at_once = -(-heads // num_parts)
    size = LANES * (_MAX_GROUPS // at_once)
    num_blocks, num_works = -(-num_tokens // size), num_kv_heads * num_parts
    taken = next_block(counters, 0)
    while taken < num_blocks * num_works:
        begin = (num_blocks - 1 - taken // num_works) * size
        end = min(begin + size, num_tokens)
        kv_head, part = taken % num_works // num_parts, taken % num_parts
        head = kv_head * heads + part * at_once
        count = min(at_once, heads - part * at_once)
        _pack(numbers, qkv, begin, end, head, count, queries)
        _attend_block(
            numbers, first + begin, first + end - 1, kv_head, count, keys, values, pages, queries,
            page_keys, page_values, scores, sums, weighted,
        )  # fmt: skip
        _unpack(weighted, sums, sinks, begin, end, head, count, numbers.head_dim, out)
        taken = next_block(counters, 0)


@njit(nogil=True, cache=True)
def _pack(numbers, qkv, begin, end, head, count, queries):
    """Tokens begin..end-1 of `count` heads in lanes, scaled so that shares are powers of two.

    With a softcap, so that scores are what `cap_scores` takes.
    """
    dim, scale = numbers.head_dim, numbers.scale * np.float32(LOG2_E)
    if numbers.softcap > 0:
        scale *= np.float32(2) / numbers.softcap
    for group in range(-(-(end - begin) // LANES) * count):
        h, token = head + group % count, begin + group // count * LANES
        for lane in range(LANES):
            if token + lane < end:
                vector = qkv[token + lane, h * dim : (h + 1) * dim]
                for i in range(dim):
                    queries[group, i, lane] = vector[i] * scale
            else:
                for i in range(dim):
                    queries[group, i, lane] = 0


@njit(nogil=True, cache=True)
def _unpack(weighted, sums, sinks, begin, end, head, count, dim, out):
    """out = weighted sums of values, by the sums of shares and a sink's.

    Zeros are positive, since positions that a token does not see may add 0 to -0.
    """
    for group in range(-(-(end - begin) // LANES) * count):
        h, token = head + group % count, begin + group // count * LANES
        for lane in range(min(LANES, end - token)):
            total = sums[group, 1, lane]
            if sinks.shape[0]:
                total += np.float32(2 ** (np.float64(sinks[h]) * LOG2_E - sums[group, 0, lane]))
            share = np.float32(1) / total
            vector = out[token + lane, h * dim : (h + 1) * dim]
            for i in range(dim):
                vector[i] = weighted[group, i, lane] * share + np.float32(0)


@njit(nogil=True, cache=True)
def _attend_block(
    numbers, first, most, kv_head, count, keys, values, pages, queries, page_keys, page_values,
    scores, sums, weighted,
):  # fmt: skip
    """Weighted sums of the values that positions first..most see, of `count` heads."""
    num_groups = -(-(most + 1 - first) // LANES) * count
    dim, window = numbers.head_dim, numbers.window if numbers.window > 0 else _NO_WINDOW
    sums[:num_groups, 0] = -np.inf
    sums[:num_groups, 1:] = 0
    weighted[:num_groups] = 0
    page_values[:, dim : weighted.shape[1]] = 0
    least = max(0, first + 1 - window)
    for start in range(least - least % PAGE_POSITIONS, most + 1, PAGE_POSITIONS):
        page = pages[start // PAGE_POSITIONS]
        low, high = max(0, least - start), min(PAGE_POSITIONS, most + 1 - start)
        read_page(keys, page, kv_head, low, high, dim, page_keys)
        read_page(values, page, kv_head, low, high, dim, page_values)
        for group in range(0, num_groups, GROUPS):
            _attend_page(
                numbers.softcap, first, most, window, start, group,
                min(GROUPS, num_groups - group), count, queries, page_keys, page_values, scores,
                sums, weighted,
            )  # fmt: skip


@njit(nogil=True, cache=True)
def _attend_page(
    softcap, first, most, window, start, group, num_groups, count, queries, page_keys, page_values,
    scores, sums, weighted,
):  # fmt: skip
    """What the page of positions from `start` on adds to groups group..group + num_groups - 1."""
    token = first + group // count * LANES
    last_group = first + (group + num_groups - 1) // count * LANES
    last_token = min(last_group + LANES - 1, most)
    low = max(0, token + 1 - window - start) // TILE_ROWS * TILE_ROWS
    high = min(PAGE_POSITIONS, last_token + 1 - start)
    if low >= high:
        return
    is_whole = token + 1 >= start + PAGE_POSITIONS and last_token - window < start
    last = -(-high // TILE_ROWS) * TILE_ROWS
    if num_groups == GROUPS:
        score_rows(queries, group, GROUPS, page_keys, low, last, scores)
    else:
        score_rows(queries, group, 1, page_keys, low, last, scores)
    for g in range(num_groups):
        if softcap > 0:
            cap_scores(scores, g, low, last, softcap * np.float32(LOG2_E))
        if not is_whole:
            lane_token = first + (group + g) // count * LANES
            mask_scores(scores, g, low, last, start, lane_token, most, window)
        share_scores(scores, g, low, last, sums, group + g)
    if num_groups < GROUPS:
        add_values(scores, page_values, low, high, sums, weighted, group, 1, 1)
    elif is_whole:
        add_values(scores, page_values, low, high, sums, weighted, group, GROUPS, 0)
    else:
        add_values(scores, page_values, low, high, sums, weighted, group, GROUPS, 1)
