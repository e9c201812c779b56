"""How long prompts are multiplied on this CPU: found out by trying, once a process.

float32 products are fast everywhere, bfloat16 ones several times as fast or several times slower,
by torch or by own kernels; where they are slower, products of int16 with scales may be faster than
float32; integer products of quantized weights compete with those that widen the weights first.
"""

import functools
import math
import threading
from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch

from actors.cpu.pair_products import PairProducts, WordProducts
from actors.protocol.step_sizes import ProductChoice
from numba_kernels.decode.rows import rows_times_vectors
from numba_kernels.formats import Q8, row_items
from numba_kernels.ir.bfloat16_ir import has_pair_products
from numba_kernels.ir.int16_ir import has_word_products
from numba_kernels.load.convert import widen_kernel

_ROWS, _WIDTH, _TOKENS, _TRIES = 256, 2048, 64, 7
_MORE = 4
# What is chosen must not change from start to start: it changes the last bits of a prompt's
# results, and services that try at the same time disturb each other.
_CLEARLY = 2.0


_trying = threading.Lock()


def choose_products() -> ProductChoice:
    """Time one thread's products of each kind; takes a tenth of a second, once all is compiled.

    The process's answer stays the same; threads that ask at the same time get the same.
    """
    with _trying:
        return _choose()


@functools.cache
def _choose() -> ProductChoice:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x, weights = torch.rand(_TOKENS, _WIDTH), torch.rand(_ROWS, _WIDTH)
        narrow_x, narrow_weights = x.to(torch.bfloat16), weights.to(torch.bfloat16)
        wide_s = _fastest(lambda: x @ weights.T)
        narrow_s = _fastest(lambda: narrow_x @ narrow_weights.T)
    finally:
        torch.set_num_threads(threads)
    rows, block = np.zeros((_ROWS, row_items(Q8, _WIDTH)), Q8), np.empty((_ROWS, _WIDTH), np.int16)
    widen_s = _fastest(lambda: widen_kernel(rows, block, 0, _ROWS))
    vectors, halves = x.numpy(), weights.to(torch.float16).numpy().view(np.uint16)
    integers_s = _fastest(lambda: rows_times_vectors(rows, vectors))
    halves_s = _fastest(lambda: widen_kernel(halves, block, 0, _ROWS))
    own_s = _own_s(PairProducts, has_pair_products(), vectors, halves)
    bfloat16 = min(narrow_s, own_s) * _CLEARLY < wide_s
    has_words = has_word_products()
    # Tokens are rounded once for all rows, which takes longer than to round them to bfloat16.
    more = np.tile(halves, (_MORE, 1))
    words_s = _own_s(WordProducts, has_words and not bfloat16, vectors, more) / _MORE
    return ProductChoice(
        bfloat16=bfloat16,
        integers=integers_s < (widen_s + min(narrow_s, wide_s)) * _CLEARLY,
        own_bfloat16=own_s < (halves_s + narrow_s) * _CLEARLY,
        # Untried beside bfloat16, and for systems that have a service without it.
        words=has_words and (bfloat16 or words_s < (halves_s + wide_s) * _CLEARLY),
    )


def _own_s(
    kind: type[PairProducts] | type[WordProducts],
    is_possible: bool,
    x: np.ndarray,
    weights: np.ndarray,
) -> float:
    """Seconds of this project's kernels; infinite where they are impossible or not wanted."""
    if not is_possible:
        return math.inf
    products = kind(1, lambda run: run(0))
    out = np.empty((x.shape[0], weights.shape[0]), np.float32)
    return _fastest(lambda: products.linear(x, weights, out))


def _fastest(product: Callable[[], object]) -> float:
    """Seconds of the fastest try; the first one, which may compile, does not count."""
    product()
    times = []
    for _ in range(_TRIES):
        started = perf_counter()
        product()
        times.append(perf_counter() - started)
    return min(times)
