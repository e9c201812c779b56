"""How long prompts are multiplied on this CPU: found out by trying, once a process.

float32 products are fast everywhere, bfloat16 ones several times as fast or several times slower;
integer products of quantized weights compete with those that widen the weights first.
"""

import functools
from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch

from actors.steps import ProductChoice
from numba_kernels.convert import widen_kernel
from numba_kernels.formats import Q8, row_items
from numba_kernels.rows import rows_times_vectors

_ROWS, _WIDTH, _TOKENS, _TRIES = 256, 2048, 64, 7
# What is chosen must not change from start to start, for it changes the last bits of a prompt's
# results, and services that try at the same time disturb each other.
_CLEARLY = 2.0


@functools.cache
def choose_products() -> ProductChoice:
    """Time one thread's products of each kind; takes some milliseconds."""
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
    vectors = x.numpy()
    integers_s = _fastest(lambda: rows_times_vectors(rows, vectors))
    return ProductChoice(
        bfloat16=narrow_s * _CLEARLY < wide_s,
        integers=integers_s < (widen_s + min(narrow_s, wide_s)) * _CLEARLY,
    )


def _fastest(product: Callable[[], object]) -> float:
    """Seconds of the fastest try; the first one, which may compile, does not count."""
    product()
    times = []
    for _ in range(_TRIES):
        started = perf_counter()
        product()
        times.append(perf_counter() - started)
    return min(times)
