"""The two ends of the model: token ids to hidden states, hidden states to logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from hotcold.model.config.families import tensor_names
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import requested_dtype
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import bare_name, norm_weight
from hotcold.model.weights.tensor_reader import OnBytes, TensorReader, Touch
from hotcold.numba_kernels.load.convert import to_float32


@dataclass
class EmbeddingWeights:
    """What the driver holds: embeddings, and the norms that it computes.

    Token rows stay in the mapped file. Loading reads all of them once, to find values that are not
    finite; later only rows of tokens that occur are read.
    """

    tokens: np.ndarray  # (V, E) bits, read-only, maybe unaligned
    positions: np.ndarray  # (P, d) float32, or (0, 0)
    project_in: np.ndarray  # (d, E) float32, or (0, 0)
    position_offset: int
    scale: float  # of token rows
    ffn_output_norm: np.ndarray  # (L, d) float32, or (L, 0)
    # Of the norm before the head, without logit_scale.
    last_norm_weight: np.ndarray  # (d,) float32, or (0,)
    last_norm_bias: np.ndarray  # (d,) float32, or (0,)
    release: Callable[[], None] | None = None  # unloads the token rows' pages
    # Layers' own embeddings: (V, L * P) bits as `tokens`, or (0, 0); scaled by sqrt(P).
    per_layer: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    per_layer_scale: float = 1.0
    last_scale: float = 1.0  # of the last layer's output, before the norm
    # Of the sum of two FFNs: (L, d) float32, those of layers that end a pair, or (L, 0).
    pair_norm: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))

    def lookup(self, token_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return hidden states of tokens at positions.

        out[t] = scale * (project_in @ tokens[token_ids[t]]) + learned[positions[t] + offset]
        Shapes:  token_ids (T,), positions (T,), out (T, d)
        Dtypes:  ids and positions int32 or int64, out float32
        Errors:  ValueError for an id outside the vocabulary or a position without a learned row
        """
        _check_range("token id", token_ids, self.tokens.shape[0])
        hidden_states = to_float32(self.tokens[token_ids])
        if self.release is not None:
            self.release()
        if self.project_in.size:
            # One product a token: a product of several sums in another order.
            hidden_states = np.stack([self.project_in @ row for row in hidden_states])
        if self.scale != 1:
            hidden_states = hidden_states * np.float32(self.scale)
        if self.positions.size:
            _check_range("position", positions, self.positions.shape[0] - self.position_offset)
            hidden_states = hidden_states + self.positions[positions + self.position_offset]
        return hidden_states

    def lookup_per_layer(self, token_ids: np.ndarray) -> np.ndarray:
        """Return all layers' own embeddings of tokens, scaled.

        Shapes:  token_ids (T,), out (T, L * P)   Dtypes: out float32
        Errors:  ValueError for an id outside the vocabulary
        """
        _check_range("token id", token_ids, self.tokens.shape[0])
        found = to_float32(self.per_layer[token_ids]) * np.float32(self.per_layer_scale)
        if self.release is not None:
            self.release()
        return found


@dataclass
class HeadWeights:
    """Final norm, projection to the embedding size where there is one, and vocabulary rows.

    logit_scale is multiplied into the final norm.
    """

    final_norm_weight: np.ndarray  # (d,) float32, or (0,)
    final_norm_bias: np.ndarray  # (d,) float32, or (0,)
    project_out: np.ndarray  # (E, d) float32, or (0, 0)
    head: np.ndarray  # (V, E) bits


def load_embedding(checkpoint: Checkpoint, config: ModelConfig) -> EmbeddingWeights:
    """Map the token rows, and read the small tensors beside them.

    Errors:  CheckpointError for a tensor that is missing, misshapen or not finite
    """
    with TensorReader(checkpoint) as reader:
        return read_embedding(reader, config)


def read_embedding(reader: TensorReader, config: ModelConfig) -> EmbeddingWeights:
    """`load_embedding` with a given reader."""
    names = tensor_names(config)
    hidden, embed = config.hidden_size, config.embed_size
    positions = project_in = np.empty((0, 0), np.float32)
    checkpoint, mapped = reader.checkpoint, [f"{names.tokens}.weight"]
    tokens = reader.mapped(mapped[0], (config.vocab_size, embed))
    per_layer = np.empty((0, 0), np.float32)
    if config.per_layer_size:
        mapped.append(f"{names.per_layer_tokens}.weight")
        width = config.num_layers * config.per_layer_size
        # Larger than the rest of the model: the driver checks the rows of tokens that occur.
        per_layer = reader.mapped(mapped[1], (config.vocab_size, width), is_checked=False)
    if not checkpoint.keeps_pages:
        for name in mapped:
            checkpoint.advise_random(name)
    if not config.ropes:
        num_rows = config.max_positions + config.position_offset
        positions = reader.vector(f"{names.positions}.weight", (num_rows, hidden))
    if embed != hidden:
        project_in = reader.vector(f"{names.project_in}.weight", (hidden, embed))
    pair_norm = np.zeros((config.num_layers, hidden * config.has_ffn_pairs), np.float32)
    for layer in range(1, config.num_layers if config.has_ffn_pairs else 0, 2):
        pair_norm[layer] = norm_weight(reader, config, names.of_layer(layer).pair_norm, hidden)
    return EmbeddingWeights(
        tokens,
        positions,
        project_in,
        config.position_offset,
        config.embedding_scale,
        read_output_norms(reader, config),
        *_last_norm(reader, config),
        None if checkpoint.keeps_pages else partial(_release, checkpoint, mapped),
        per_layer,
        config.per_layer_size**0.5,
        _last_scale(reader, config),
        pair_norm,
    )


def read_output_norms(reader: TensorReader, config: ModelConfig) -> np.ndarray:
    """Weights of the norms of FFNs' outputs: (L, d) float32, or (L, 0). Errors: CheckpointError."""
    names, width = tensor_names(config), config.hidden_size
    found = np.empty((config.num_layers, width * config.has_output_norms), np.float32)
    for layer in range(config.num_layers * config.has_output_norms):
        found[layer] = norm_weight(reader, config, names.of_layer(layer).ffn_output_norm, width)
    return found


def _release(checkpoint: Checkpoint, names: Sequence[str]) -> None:
    for name in names:
        checkpoint.release(name)


def load_head(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: str = "",
    on_bytes: OnBytes | None = None,
    touch: Touch | None = None,
) -> HeadWeights:
    """Load the weights from the last hidden state to logits; a tied head copies the token rows.

    `dtype`, such as "q8", quantizes the head. A quantized checkpoint's token rows are not
    quantized, but a head tied to them is. `touch` gets each new matrix before it is filled.
    Errors:  CheckpointError for a tensor that is missing, misshapen or not finite; UsageError for
             an unknown dtype
    """
    with TensorReader(checkpoint, on_bytes, requested_dtype(dtype), touch) as reader:
        return read_head(reader, config)


def read_head(reader: TensorReader, config: ModelConfig) -> HeadWeights:
    """`load_head` with a given reader."""
    names = tensor_names(config)
    hidden, embed = config.hidden_size, config.embed_size
    weight = bias = np.empty(0, np.float32)
    project_out = np.empty((0, 0), np.float32)
    if config.has_final_norm:
        weight, bias = _norm(reader, config, names.final_norm)
        if config.logit_scale != 1:
            weight, bias = (v * np.float32(config.logit_scale) for v in (weight, bias))
    else:
        reader.refuse(f"{names.final_norm}.weight")
    if embed != hidden:
        project_out = reader.vector(f"{names.project_out}.weight", (embed, hidden))
    name = head_name(reader.checkpoint, config)
    head = reader.matrix((config.vocab_size, embed), name)
    reader.rows(name, config.vocab_size, head)
    return HeadWeights(weight, bias, project_out, head)


def head_name(checkpoint: Checkpoint, config: ModelConfig) -> str:
    """Return the name of the head's tensor: that of the token rows for a tied head.

    A layer that drafts may have the model's.
    """
    names = tensor_names(config)
    if config.drafts_after and not checkpoint.has(f"{names.head}.weight"):
        return head_name(checkpoint, replace(config, drafts_after=0))
    # Some checkpoints whose config says tied have a head all the same: it is used.
    is_tied = config.tied_embeddings and not checkpoint.has(f"{names.head}.weight")
    return f"{names.tokens if is_tied else names.head}.weight"


def _last_norm(reader: TensorReader, config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias of the norm after the last layer: the final one, or that layer's own."""
    names = tensor_names(config)
    if config.has_final_norm:
        return _norm(reader, config, names.final_norm)
    if config.layers[-1].order.norms_output:
        return _norm(reader, config, names.of_layer(config.num_layers - 1).ffn_norm)
    return np.empty(0, np.float32), np.empty(0, np.float32)


def _last_scale(reader: TensorReader, config: ModelConfig) -> float:
    """The scale of the last layer's output."""
    if not config.has_output_scale:
        return 1.0
    name = tensor_names(config).of_layer(config.num_layers - 1).output_scale
    return float(reader.vector(bare_name(reader, name), (1,))[0])


def _norm(reader: TensorReader, config: ModelConfig, name: str) -> tuple[np.ndarray, np.ndarray]:
    weight, bias = norm_weight(reader, config, name, config.hidden_size), np.empty(0, np.float32)
    if config.norm_bias:
        bias = reader.vector(f"{name}.bias", (config.hidden_size,))
    return weight, bias


def _check_range(what: str, values: np.ndarray, size: int) -> None:
    if values.size and (values.min() < 0 or values.max() >= size):
        raise ValueError(f"{what} {values.min()} to {values.max()} do not lie in [0, {size})")
