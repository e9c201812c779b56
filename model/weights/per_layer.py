"""The matrices of layers' own embeddings of a token."""

from __future__ import annotations

import numpy as np

from hotcold.model.config.families import tensor_names
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.weights.tensor_reader import TensorReader
from hotcold.numba_kernels.per_layer_arrays import PerLayerArrays, no_per_layer


def read_per_layer(reader: TensorReader, config: ModelConfig) -> PerLayerArrays:
    """Read the matrices of all layers; none where layers have no embeddings of their own.

    Errors:  CheckpointError for a tensor that is missing, misshapen or not finite
    """
    size, hidden, layers = config.per_layer_size, config.hidden_size, config.num_layers
    if not size:
        return no_per_layer()
    names = tensor_names(config)
    context_name = f"{names.per_layer_context}.weight"
    context = reader.matrix((layers * size, hidden), context_name)
    reader.rows(context_name, layers * size, context)
    first = names.of_layer(0)
    gate = reader.matrix((layers, size, hidden), f"{first.per_layer_gate}.weight")
    projection = reader.matrix((layers, hidden, size), f"{first.per_layer_projection}.weight")
    for layer in range(layers):
        own = names.of_layer(layer)
        reader.rows(f"{own.per_layer_gate}.weight", size, gate[layer])
        reader.rows(f"{own.per_layer_projection}.weight", hidden, projection[layer])
    norm = reader.vector(f"{names.per_layer_context_norm}.weight", (size,))
    by_layer = context.reshape(layers, size, context.shape[1])
    return PerLayerArrays(by_layer, np.asarray(norm), gate, projection)
