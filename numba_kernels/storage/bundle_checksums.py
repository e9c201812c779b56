"""Sums of many bundles, where they are written and where a file is checked."""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.storage.neuron_file import part_sum


@njit(nogil=True, cache=True)
def _bundle_sums(bundles, gate_bytes, sums):
    for n in range(bundles.shape[0]):
        sums[n, 0] = part_sum(bundles[n, :gate_bytes])
        sums[n, 1] = part_sum(bundles[n, gate_bytes:])


def bundle_sums(bundles: np.ndarray, gate_bytes: int, sums: np.ndarray) -> None:
    """sums[n] = `part_sum` of both parts of bundle n.

    Shapes:  bundles (N, bundle bytes) uint8, sums (N, 2) uint32
    Errors:  ValueError where parts are no whole 64-bit words
    """
    if gate_bytes % 8 or bundles.shape[1] % 8:
        raise ValueError(f"parts of {gate_bytes} and {bundles.shape[1] - gate_bytes} bytes")
    _bundle_sums(bundles, gate_bytes, sums)
