"""A layer after the last that drafts (multi-token prediction): what it has beside other layers.

It is a model of one layer (`ModelConfig.draft_layer`). For each position it takes the hidden state
there and the token that follows, and guesses the token after that:
    input = projection . [norm(embedding of the next token), norm(final norm(hidden state))]
    logits = head . output norm(its output)
Source:  DeepSeek-V3, arXiv 2412.19437, section 2.2; the final norm before the other one, and the
         output norm before a guess's, as in llama.cpp
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hotcold.model.config.families import tensor_names
from hotcold.model.config.layer_order import LayerOrder
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import norm_weight
from hotcold.model.weights.embedding import EmbeddingWeights, HeadWeights, head_name
from hotcold.model.weights.tensor_reader import TensorReader
from hotcold.numba_kernels.load.convert import to_float32

_ROWS_COMPARED = 64  # of a head that may be the model's own, stored twice


@dataclass
class DraftInputs:
    """What makes the layer's input of hidden states and tokens; the driver holds it."""

    embedding: EmbeddingWeights  # of the layer's tokens, with the model's final norm
    projection: np.ndarray  # (d, 2d) float32
    token_norm: np.ndarray  # (d,) float32
    hidden_norm: np.ndarray  # (d,) float32
    output_norm: np.ndarray  # (d,) float32
    epsilon: np.float32

    def final(self, hidden: np.ndarray) -> np.ndarray:
        """Hidden states (T, d) after the model's last layer, normed for its head."""
        return self._normed(hidden, self.embedding.last_norm_weight)

    def output(self, hidden: np.ndarray) -> np.ndarray:
        """The same of hidden states after the layer that drafts."""
        return self._normed(hidden, self.output_norm)

    def inputs(self, normed: np.ndarray, next_ids: np.ndarray) -> np.ndarray:
        """The layer's input of normed hidden states and the tokens that follow them.

        Shapes:  normed (T, d), next_ids (T,), result (T, d)   Dtypes: float32, int64
        """
        tokens = self.embedding.lookup(next_ids, np.zeros_like(next_ids))
        parts = self._normed(tokens, self.token_norm), self._normed(normed, self.hidden_norm)
        found: np.ndarray = np.concatenate(parts, axis=1) @ self.projection.T
        return found

    def _normed(self, rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
        squares = np.square(rows).mean(axis=1, keepdims=True, dtype=np.float32)
        normed: np.ndarray = rows / np.sqrt(squares + self.epsilon) * weight
        return normed


def has_draft_layer(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Whether the checkpoint has a layer that drafts, of a model whose layers are plain ones."""
    plain = all(layer.order == LayerOrder() and not layer.adds_late for layer in config.layers)
    is_plain = plain and config.embed_size == config.hidden_size and config.norm_kind == "rmsnorm"
    names = tensor_names(config).of_draft(config.num_layers)
    return is_plain and checkpoint.has(f"{names.draft.projection}.weight")


def draft_input_bytes(layer: ModelConfig) -> int:
    """Bytes of `DraftInputs` of a layer that drafts."""
    return 4 * 2 * layer.hidden_size**2


def read_draft_inputs(
    reader: TensorReader, layer: ModelConfig, embedding: EmbeddingWeights
) -> DraftInputs:
    """Read what the driver holds of a layer that drafts; tokens' rows stay in the mapped file.

    Errors:  CheckpointError for a tensor that is missing, misshapen or not finite
    """
    names, hidden, checkpoint = tensor_names(layer), layer.hidden_size, reader.checkpoint
    projection = np.empty((hidden, 2 * hidden), np.float32)
    reader.rows(f"{names.draft.projection}.weight", hidden, projection)
    if checkpoint.has(f"{names.tokens}.weight"):
        tokens = reader.mapped(f"{names.tokens}.weight", embedding.tokens.shape)
        embedding = replace(embedding, tokens=tokens)
    return DraftInputs(
        embedding,
        projection,
        norm_weight(reader, layer, names.draft.token_norm, hidden),
        norm_weight(reader, layer, names.draft.hidden_norm, hidden),
        _output_norm(reader, layer),
        np.float32(layer.norm_eps),
    )


def read_draft_head(reader: TensorReader, layer: ModelConfig, head: HeadWeights) -> HeadWeights:
    """The model's head with the layer's own norm, and with its own rows where these are others.

    Errors:  CheckpointError as of `read_draft_inputs`
    """
    rows, name = head.head, own_head(reader.checkpoint, layer)
    if name:
        rows = reader.matrix((layer.vocab_size, layer.hidden_size), name)
        reader.rows(name, layer.vocab_size, rows)
    norm = _output_norm(reader, layer) * np.float32(layer.logit_scale)
    return replace(head, final_norm_weight=norm, head=rows)


def own_head(checkpoint: Checkpoint, layer: ModelConfig) -> str:
    """The layer's head; "" where it has none, or one with the rows of the model's, as some are."""
    name, other = (head_name(checkpoint, one) for one in (layer, replace(layer, drafts_after=0)))
    if name == other:
        return ""
    own, shared = checkpoint.array(name), checkpoint.array(other)
    if own.shape == shared.shape and own.dtype == shared.dtype:
        ids = np.linspace(0, len(own) - 1, _ROWS_COMPARED).astype(np.int64)
        if np.array_equal(to_float32(own[ids]), to_float32(shared[ids])):
            return ""
    return name


def _output_norm(reader: TensorReader, layer: ModelConfig) -> np.ndarray:
    own = tensor_names(layer).final_norm
    if not reader.checkpoint.has(f"{own}.weight"):
        own = tensor_names(replace(layer, drafts_after=0)).final_norm
    return norm_weight(reader, layer, own, layer.hidden_size)
