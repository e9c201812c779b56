"""Reading a whole bundle file once, to see that it is what was written."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from hotcold.model.bundles.bundle_file import BundleFile
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.config.weight_formats import numpy_dtype
from hotcold.numba_kernels.load.convert import row_lengths
from hotcold.numba_kernels.storage.neuron_file import bundle_checksums

_READ_BYTES = 16 << 20
_NORM_ERROR = 1e-5  # of a CPU that rounds otherwise


def damaged_bundles(
    file: BundleFile, on_bytes: Callable[[int, int], None] = lambda done, total: None
) -> list[tuple[int, int]]:
    """The layer and id of each neuron whose bundle does not agree with its sums, or its norm.

    Errors:  OSError
    """
    geometry, found = file.geometry, []
    rows = max(1, _READ_BYTES // geometry.bundle_bytes)
    total, done = geometry.num_layers * geometry.layer_bytes, 0
    with file.path.open("rb", buffering=0) as stream:
        for layer in range(geometry.num_layers):
            for first in range(0, geometry.num_neurons, rows):
                last = min(first + rows, geometry.num_neurons)
                bundles = np.zeros((last - first, geometry.bundle_bytes), np.uint8)
                begin = geometry.first_byte + layer * geometry.layer_bytes
                begin += first * geometry.bundle_bytes
                _fill(stream.fileno(), bundles, begin)
                sums = np.empty((last - first, 2), np.uint32)
                bundle_checksums(bundles, geometry.gate_bytes, sums)
                wrong = (sums != file.sums[layer, first:last]).any(axis=1)
                norms = row_lengths(_down_rows(geometry, bundles))
                wrong |= ~np.isclose(norms, file.norms[layer, first:last], _NORM_ERROR, 0)
                found += [(layer, int(n)) for n in file.order[layer, first:last][wrong]]
                done += bundles.nbytes
                on_bytes(done, total)
    return found


def _down_rows(geometry: BundleGeometry, bundles: np.ndarray) -> np.ndarray:
    """Of (N, bundle bytes) uint8 the down rows, in their format."""
    first = geometry.gate_bytes + geometry.up_row_bytes
    rows = np.ascontiguousarray(bundles[:, first : first + geometry.down_row_bytes])
    return rows.view(numpy_dtype(geometry.down_dtype))


def _fill(descriptor: int, into: np.ndarray, place: int) -> None:
    """Read until `into` is full, or the file ends."""
    view, done = into.reshape(-1).data, 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], place + done)
        if count == 0:
            return
        done += count
    os.posix_fadvise(descriptor, place, done, os.POSIX_FADV_DONTNEED)
