"""Products of 16-bit weights with many tokens' vectors, by this project's bfloat16 kernels."""

from collections.abc import Callable

import numpy as np

from model.memory import aligned_empty
from numba_kernels.bfloat16_products import (
    BUFFER_PAIRS,
    MOST_SUMS,
    combine_kernel,
    linear_kernel,
    num_groups,
    pack_tokens_kernel,
)
from numba_kernels.llvm_vectors import LANES
from numba_kernels.rows import share


class PairProducts:
    """Each thread has rows of `linear`, or columns of `combine`, and a buffer of its own."""

    def __init__(
        self, num_threads: int, each_thread: Callable[[Callable[[int], None]], None]
    ) -> None:
        """`each_thread` calls a function with every thread's number, in that thread."""
        self._num_threads = num_threads
        self._each_thread = each_thread
        self._buffers = [aligned_empty((BUFFER_PAIRS,), np.int32) for _ in range(num_threads)]
        self._tokens = aligned_empty((0,), np.int32)
        self._sums = aligned_empty((0,), np.float32)

    def linear(self, x: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
        """out = x @ weights.T.

        Shapes:  x (T, d), weights (N, d), out (T, N)
        Dtypes:  x, out float32; weights uint16 (float16 bits) or int16 (bfloat16 bits)
        """
        self._multiply(linear_kernel, x, weights, out)

    def combine(self, h: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
        """out = h @ rows.

        Shapes:  h (T, N), rows (N, d), out (T, d)
        Dtypes:  as in `linear`
        """
        self._multiply(combine_kernel, h, rows, out)

    def _multiply(
        self, kernel: Callable[..., None], x: np.ndarray, weights: np.ndarray, out: np.ndarray
    ) -> None:
        groups, num_pairs = num_groups(x.shape[0]), -(-x.shape[1] // 2)
        tokens = self._tokens_of((groups, num_pairs, LANES))
        sums = self._sums_of((self._num_threads, MOST_SUMS, groups, LANES))

        def pack(thread: int) -> None:
            part = share(groups, thread, self._num_threads, 1)
            pack_tokens_kernel(x, tokens, self._buffers[thread], *part)

        def multiply(thread: int) -> None:
            part = share(out.shape[1], thread, self._num_threads, LANES)
            kernel(weights, tokens, self._buffers[thread], sums[thread], out, *part)

        self._each_thread(pack)
        self._each_thread(multiply)

    def _tokens_of(self, shape: tuple[int, ...]) -> np.ndarray:
        """Space that is kept from call to call, as it takes long to get."""
        count = int(np.prod(shape))
        if self._tokens.size < count:
            self._tokens = aligned_empty((count,), np.int32)
        return self._tokens[:count].reshape(shape)

    def _sums_of(self, shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape))
        if self._sums.size < count:
            self._sums = aligned_empty((count,), np.float32)
        return self._sums[:count].reshape(shape)
