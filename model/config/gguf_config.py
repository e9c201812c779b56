"""A GGUF file's metadata as the content of config.json, BOS and EOS among it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotcold.model.config.families import GGUF_ARCHITECTURES
from hotcold.model.config.families.family import Family, GgufArchitecture
from hotcold.model.config.families.tensor_names import GGUF_NAMES
from hotcold.model.config.gguf_metadata import Metadata
from hotcold.model.config.gguf_rope import rope_values
from hotcold.model.config.unsupported_models import nearest_known, why_unsupported
from hotcold.model.errors import ConfigError, shown
from hotcold.model.gguf.file import GgufModel, open_gguf

# Tokens that end an answer; others are known by their texts (`model/text/end_tokens.py`).
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# By general.type: GGUF files that hold no model.
_NO_MODELS = {
    "adapter": "is an adapter (LoRA), and no model; merge it into its model, and give that file",
    "mmproj": "reads pictures for a model; give the model's own file, which is mostly beside it",
    "imatrix": "says which weights matter, and holds none; give the model's own file",
}
_DRAFTS = "guesses tokens ahead for a model (MTP), and is none; give the model's own file"
_POWERINFER_SPLIT = "generic.gpu_index"


def architecture_of(model: GgufModel) -> tuple[Family, GgufArchitecture]:
    """Return the model's entry in the table. Errors: ConfigError where it has none."""
    name = model.metadata.get("general.architecture")
    if name == _POWERINFER_SPLIT:
        raise ConfigError(
            f"{model.path}: says which neurons PowerInfer puts on a GPU, and holds no model; give "
            "the model's own file (`hotcold plan` places its neurons)"
        )
    if what := no_model(model):
        raise ConfigError(f"{model.path}: {what}")
    if why := why_unsupported(name):
        raise ConfigError(f"{model.path}: general.architecture is {shown(name)}: {why}")
    if not isinstance(name, str) or name not in GGUF_ARCHITECTURES:
        raise ConfigError(
            f"{model.path}: general.architecture is {shown(name)}, which is not supported; "
            + nearest_known(name, GGUF_ARCHITECTURES)
        )
    return GGUF_ARCHITECTURES[name]


def no_model(model: GgufModel) -> str:
    """What a file that holds no model is, and what to give instead; "" for others."""
    architecture = model.metadata.get("general.architecture")
    has_drafts = model.metadata.get(f"{architecture}.nextn_predict_layers")
    if has_drafts and not any(name.startswith("blk.0.") for name in model.names):
        return _DRAFTS
    is_projector = architecture == "clip"
    kind = "mmproj" if is_projector else model.metadata.get("general.type")
    return _NO_MODELS.get(kind, "") if isinstance(kind, str) else ""


def gguf_values(path: str | Path) -> dict[str, Any]:
    """Return what config.json of the model would hold. Errors: ConfigError, CheckpointError."""
    model = open_gguf(path)
    family, architecture = architecture_of(model)
    metadata = Metadata(model, architecture.rope_keys)
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    return {
        "model_type": family.name,
        "num_hidden_layers": metadata.integer("block_count"),
        "max_position_embeddings": metadata.integer("context_length"),
        "vocab_size": metadata.rows_of(f"{GGUF_NAMES.tokens}.weight"),
        "tie_word_embeddings": not metadata.has_tensor(f"{GGUF_NAMES.head}.weight"),
        "bos_token_id": model.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(model) if tokens is not None else None,
        **rope_values(metadata),
        **architecture.values(metadata),
    }


def _end_ids(model: GgufModel) -> list[Any]:
    """The ids of tokens that end a text, or a turn of a conversation, as the file names them."""
    ids = [model.metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))
