"""Products of quantized weights with many tokens' vectors, quantized too, by integers."""

import numpy as np

from hotcold.actors.cpu.thread_team import Then
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.decode.vectors import QuantizedVectors, empty_vectors
from hotcold.numba_kernels.prompt.quantized_matmul import matmul_kernel, quantize_kernel

_ROWS = 8  # of which a thread has whole ones: as many as some tile takes side by side


class IntegerMatmul:
    """Each thread quantizes tokens and has rows of its own."""

    def __init__(self, num_threads: int, then: Then) -> None:
        """`then` has a function called with every thread's number, after those before."""
        self._num_threads, self._then = num_threads, then
        self._vectors = QuantizedVectors(*empty_vectors(1, 1, 0))

    def operand(self, x: np.ndarray, weights: np.ndarray) -> QuantizedVectors:
        """The vectors of x (T, d) float32, in space that is kept from call to call."""
        num_tokens, width = x.shape
        if self._vectors.values.shape[1] < num_tokens or self._vectors.values.shape[2] < width:
            self._vectors = empty_vectors(1, num_tokens, width)
        vectors = QuantizedVectors(*(array[0, :num_tokens] for array in self._vectors))

        def quantize(thread: int) -> None:
            part = split_range(num_tokens, thread, self._num_threads, 1)
            quantize_kernel(weights, x, vectors, *part)

        self._then(quantize)
        return vectors

    def linear(self, operand: QuantizedVectors, weights: np.ndarray, out: np.ndarray) -> None:
        """out (T, N) float32 = vectors @ weights.T; weights (N, row bytes) of ROW_FORMATS."""

        def multiply(thread: int) -> None:
            part = split_range(weights.shape[0], thread, self._num_threads, _ROWS)
            matmul_kernel(weights, operand, out, *part)

        self._then(multiply)
