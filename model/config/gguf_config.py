"""A GGUF file's metadata as the content of config.json, BOS and EOS among it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hotcold.model.config.gguf_architectures import ARCHITECTURES, Architecture
from hotcold.model.config.gguf_metadata import Metadata
from hotcold.model.config.gguf_rope import rope_values
from hotcold.model.errors import ConfigError, shown
from hotcold.model.gguf.file import GgufModel, open_gguf

# Tokens that end an answer, by their key in the metadata or their text.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>")
# Where one of _CHANNELS is a token (gpt-oss), <|end|> ends a channel, and the answer goes on.
_CHANNELS = {"<|return|>", "<|channel|>"}
_CHANNEL_END, _ENDS_OF_CHANNELS = "<|end|>", ("<|return|>", "<|call|>")
_CONTROL = 3
# By general.type: GGUF files that hold no model.
_NO_MODELS = {
    "adapter": "is an adapter (LoRA), and no model; merge it into its model, and give that file",
    "mmproj": "reads pictures for a model; give the model's own file, which is mostly beside it",
    "imatrix": "says which weights matter, and holds none; give the model's own file",
}
_POWERINFER_SPLIT = "generic.gpu_index"


def architecture_of(model: GgufModel) -> Architecture:
    """Return the model's entry in the table. Errors: ConfigError where it has none."""
    name = model.metadata.get("general.architecture")
    if name == _POWERINFER_SPLIT:
        raise ConfigError(
            f"{model.path}: says which neurons PowerInfer puts on a GPU, and holds no model; give "
            "the model's own file (`hotcold plan` places its neurons)"
        )
    if what := no_model(model):
        raise ConfigError(f"{model.path}: {what}")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(
            f"{model.path}: general.architecture is {shown(name)}, which is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    found = ARCHITECTURES[name]
    while True:
        names = set(model.names)
        variant = next((one for tensor, one in found.variants if tensor in names), None)
        if variant is None:
            return found
        found = variant


def no_model(model: GgufModel) -> str:
    """What a file that holds no model is, and what to give instead; "" for others."""
    is_projector = model.metadata.get("general.architecture") == "clip"
    kind = "mmproj" if is_projector else model.metadata.get("general.type")
    return _NO_MODELS.get(kind, "") if isinstance(kind, str) else ""


def gguf_values(path: str | Path) -> dict[str, Any]:
    """Return what config.json of the model would hold. Errors: ConfigError, CheckpointError."""
    model = open_gguf(path)
    architecture = architecture_of(model)
    metadata = Metadata(model)
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    names = architecture.names
    return {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "num_hidden_layers": metadata.integer("block_count"),
        "max_position_embeddings": metadata.integer("context_length"),
        "vocab_size": metadata.rows_of(f"{names.tokens}.weight"),
        "tie_word_embeddings": not metadata.has_tensor(f"{names.head}.weight"),
        "bos_token_id": model.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(model) if tokens is not None else None,
        **rope_values(metadata),
        **architecture.values(metadata),
    }


def _end_ids(model: GgufModel) -> list[Any]:
    """The ids of tokens that end a text, or a turn of a conversation."""
    ids = [model.metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    found = [token_id for token_id in ids if token_id is not None]
    texts = model.first.strings("tokenizer.ggml.tokens") or []
    kinds = model.first.numbers("tokenizer.ggml.token_type")
    if kinds is not None and len(kinds) == len(texts):
        controls = {texts[i]: i for i in np.flatnonzero(kinds == _CONTROL).tolist()}
        ends: tuple[str, ...] = _END_TEXTS
        if _CHANNELS & controls.keys():
            ends = (*_END_TEXTS, *_ENDS_OF_CHANNELS)
            no_end = controls.pop(_CHANNEL_END, None)
            found = [token_id for token_id in found if token_id != no_end]
        found += [controls[text] for text in ends if text in controls]
    return list(dict.fromkeys(found))
