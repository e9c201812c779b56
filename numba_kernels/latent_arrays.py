"""Matrices of multi-head latent attention that widen a token's vectors of low rank."""

from typing import NamedTuple

from hotcold.numba_kernels.block_rows import BlockRows


class LatentArrays(NamedTuple):
    """Rows of all heads, head after head (`LatentSpec` of the model package says of what).

    queries: (H * query size, query rank): of a head first the rows that are rotated; or none
    keys: (H * rank, plain size): of a head K_h transposed, which queries are multiplied with
    values: (H * value size, rank)
    """

    queries: BlockRows
    keys: BlockRows
    values: BlockRows

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(matrices.nbytes for matrices in self)
