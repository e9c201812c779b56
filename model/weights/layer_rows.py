"""Room for matrices of all layers: in one format, or in two where a file's layers differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hotcold.model.weights.tensor_reader import TensorReader
from hotcold.numba_kernels.formats import is_quantized
from hotcold.numba_kernels.layer_rows import LayerRows

# Of one layer, the tensors whose rows follow each other, and how many each has.
Tensors = Sequence[tuple[str, int]]


def empty_rows(
    reader: TensorReader, layers: Sequence[Tensors], width: int, by_layer: bool
) -> LayerRows:
    """Return arrays for rows of `width` weights of all `layers`' tensors.

    With `by_layer` each tensor has the format that suits its own in the file, where two are enough
    and their tensors follow one another in the same order everywhere. Else all have one.
    Errors:  CheckpointError, UsageError as of `TensorReader.loaded_dtype`
    """
    pair = _two_formats(reader, layers) if by_layer else None
    if pair is None:
        first = second = reader.loaded_dtype(layers[0][0][0])
    else:
        first, second = pair
    name = layers[0][0][0]
    counts = np.zeros((2, len(layers)), np.int64)
    for index, tensors in enumerate(layers):
        for tensor, num_rows in tensors:
            is_second = pair is not None and reader.own_dtype(tensor) == second != first
            counts[int(is_second), index] += num_rows
    ends = np.cumsum(counts, axis=1)
    spans = np.stack([ends - counts, ends], axis=2)
    arrays = [
        reader.matrix((int(span[-1, 1]), width), name, np.append(0, span[:, 1]), dtype)
        for dtype, span in zip((first, second), spans, strict=True)
    ]
    return LayerRows(arrays[0], arrays[1], spans[0], spans[1])


def tensor_places(rows: LayerRows, layer: int, sizes: Sequence[int]) -> list[np.ndarray]:
    """Where tensors of so many rows go, which follow one another in the layer."""
    parts = [rows.first[slice(*rows.first_rows[layer])]]
    parts.append(rows.second[slice(*rows.second_rows[layer])])
    places, begin = [], 0
    for size in sizes:
        if begin >= len(parts[0]):
            parts, begin = parts[1:], 0
        places.append(parts[0][begin : begin + size])
        begin += size
    return places


def _two_formats(
    reader: TensorReader, layers: Sequence[Tensors]
) -> tuple[np.dtype, np.dtype] | None:
    """The formats of first and of second rows; None where two are not enough, or one is."""
    found = [[reader.own_dtype(name) for name, _ in tensors] for tensors in layers]
    kinds = list(dict.fromkeys(kind for layer in found for kind in layer))
    if len(kinds) == 1:
        return kinds[0], kinds[0]
    if len(kinds) > 2 or not all(map(is_quantized, kinds)):
        return None
    for first, second in (kinds, kinds[::-1]):
        if all(layer == sorted(layer, key=lambda kind: kind == second) for layer in found):
            return first, second
    return None
