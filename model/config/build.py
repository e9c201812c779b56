"""config.json -> ModelConfig: the family, the keys that all families share, refused keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotcold.model.config.families import FAMILIES
from hotcold.model.config.families.family import (
    MAX_POSITIONS,
    Family,
    max_positions,
    num_layers,
)
from hotcold.model.config.gguf_config import gguf_values
from hotcold.model.config.json_reader import ConfigReader, read_json_object
from hotcold.model.config.model_config import ModelConfig, RopeConfig
from hotcold.model.config.quantization import quantized_dtype
from hotcold.model.config.unsupported_models import nearest_known, why_unsupported
from hotcold.model.errors import shown
from hotcold.model.gguf.file_names import is_gguf
from hotcold.numba_kernels.formats import FLOAT_FORMATS, WeightDtype

DTYPES: dict[str, WeightDtype] = {kind.name: kind.name for kind in FLOAT_FORMATS.values()}
MAX_VOCAB = 1 << 24

# Models with a vision part: model_type -> that of the language model, which is in `text_config`, or
# beside the vision part where there is none; some name it otherwise than a model of text alone.
_WRAPPERS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "lfm2_vl": "lfm2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "glm4v": "glm4",
    "glm46v": "glm4",
    "glm4v_moe": "glm4_moe",
    "internvl": "qwen2",
    "kimi_k25": "deepseek_v3",
    "cohere2_vision": "cohere2",
    "aya_vision": "cohere2",
}
_TEXT_NAMES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
}
_WRAPPER_KEYS = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config")

# Keys of related models that would change the result silently, and the values without effect. What
# some family reads (`Family.reads`) is refused for all others, here or not.
_WITHOUT_EFFECT: dict[str, Callable[[Any], bool]] = {
    "num_local_experts": lambda value: value in (0, 1),
    "num_experts": lambda value: value in (0, 1),
    "n_routed_experts": lambda value: value in (0, 1),
    "layer_types": lambda value: (
        isinstance(value, list) and all(kind == "full_attention" for kind in value)
    ),
    "attn_output_gate": lambda value: value is False,
    "partial_rotary_factor": lambda value: value == 1,
    "no_rope_layers": lambda value: (
        isinstance(value, list) and all(has_rope == 1 for has_rope in value)
    ),
    "scale_emb": lambda value: value == 1,
    "clip_qkv": lambda value: False,
    "use_bias": lambda value: value is False,
    "num_nextn_predict_layers": lambda value: True,  # they only draft
    "use_cla": lambda value: value is False,
    "use_qk_norm": lambda value: value is False,
    "qk_layernorm": lambda value: value is False,
    "is_encoder_decoder": lambda value: value is False,
    "add_cross_attention": lambda value: value is False,
}


def read_config(path: str | Path) -> ModelConfig:
    """Read a model's config.json, or a GGUF file's metadata.

    Errors:  ConfigError naming the file and the key, CheckpointError for a damaged GGUF file
    """
    values, source = config_values(path)
    return build_config(values, source=source, name=_model_name(Path(path)))


def config_values(path: str | Path) -> tuple[dict[str, Any], str]:
    """Return config.json's content, and the file to name in errors. Errors: as `read_config`."""
    if is_gguf(path):
        return gguf_values(path), str(path)
    file = Path(path) / "config.json"
    return read_json_object(file), str(file)


def build_config(
    config: dict[str, Any], *, source: str = "config.json", name: str = "model"
) -> ModelConfig:
    """Build from config.json's content; `source` names it in errors. Errors: ConfigError."""
    reader = ConfigReader(_text_part(config), source)
    family = _family(reader)
    reader = ConfigReader({**family.defaults, **reader.values}, source)
    _refuse_unsupported(reader, family)
    fields = family.read_fields(reader)
    vocab_size = reader.integer("vocab_size", high=MAX_VOCAB)
    bos_ids = reader.token_ids("bos_token_id", _ids(family.bos_id), vocab_size)
    shared = {
        "family": family.name,
        "name": name,
        "dtype": _dtype(reader),
        "num_layers": fields.get("num_layers") or num_layers(reader),
        "vocab_size": vocab_size,
        "max_positions": max_positions(reader),
        "firing_share": reader.number("firing_share", 0.0, low=0.0, high=1.0),
        "bos_token_id": bos_ids[0] if bos_ids else None,
        "eos_token_ids": reader.token_ids("eos_token_id", _ids(family.eos_id), vocab_size),
        "tied_embeddings": reader.boolean("tie_word_embeddings", family.tied_embeddings),
        "embed_size": fields["hidden_size"],
    }
    result = ModelConfig(**shared | fields)
    if all(layer.ffn.router is None for layer in result.layers):
        result = replace(result, experts=None)
    for index, rope in enumerate(result.ropes):
        _check_rope(reader, rope, result.rotated_head_dim(index))
    longest = max(result.max_positions, *(rope.stretched for rope in result.ropes), 0)
    return replace(result, max_positions=min(longest, MAX_POSITIONS))


def _ids(default: int | None) -> tuple[int, ...]:
    return () if default is None else (default,)


def _check_rope(reader: ConfigReader, rope: RopeConfig, head_dim: int) -> None:
    size = rope.rotary_dim(head_dim)
    if size % 2 or size == 0:
        what = f"{head_dim}; rotary positions need an even number"
        raise reader.fail("head_dim", f"is {what}" + (f" of {size}" if size != head_dim else ""))
    if size == 2 and rope.kind == "dynamic":
        raise reader.fail("head_dim", f"is {head_dim}; dynamic rope needs more than one pair")
    for key, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if rope.kind == "longrope" and len(factors) != size // 2:
            raise reader.fail(key, f"has {len(factors)} numbers; give {size // 2}, one a pair")


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config with a vision part; else the config."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _WRAPPERS:
        return config
    inner = config.get("text_config", config)
    if not isinstance(inner, dict):
        return config
    outer = {
        key: value for key, value in config.items() if key in _WRAPPER_KEYS and value is not None
    }
    own = config if inner is config else inner
    name = _WRAPPERS[kind] if inner is config else inner.get("model_type", _WRAPPERS[kind])
    name = _TEXT_NAMES.get(name, name) if isinstance(name, str) else name
    # A head beside tied embeddings is used, so either may say it.
    is_tied = any(part.get("tie_word_embeddings") is True for part in (config, own))
    tied = {"tie_word_embeddings": True} if is_tied else {}
    return {**own, **outer, **tied, "model_type": name, "architectures": None}


def _family(reader: ConfigReader) -> Family:
    """Return the family of `architectures` and `model_type`, which must agree where both exist."""
    architectures = reader.values.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    kind = reader.values.get("model_type")
    for family in FAMILIES.values():
        is_named = named in family.architectures or (named is None and kind == family.name)
        if is_named and kind in (None, family.name):
            return family
    if why := why_unsupported(kind) or why_unsupported(named):
        raise reader.fail("model_type", f"is {shown(kind)}: {why}")
    found = "nothing" if named is None else shown(named)
    also = "" if kind is None else f" and model_type {shown(kind)}"
    known = [one for family in FAMILIES.values() for one in family.architectures]
    raise reader.fail(
        "architectures",
        f"names {found}{also}, which is not supported; {nearest_known(named, known)}",
    )


def _refuse_unsupported(reader: ConfigReader, family: Family) -> None:
    # Windows are refused below: a config may name their size and not use them.
    of_others = {key for other in FAMILIES.values() for key in other.reads} - {"sliding_window"}
    refused = {
        key: _WITHOUT_EFFECT.get(key, lambda value: False)
        for key in {*_WITHOUT_EFFECT, *of_others} - {*family.reads}
    }
    refused |= {key: values.__contains__ for key, values in family.fixed.items()}
    for key, accepted in sorted(refused.items()):
        reader.refuse(key, accepted, "not supported: it would change the result; use another model")
    reads_windows = "sliding_window" in family.reads
    if not reads_windows and reader.values.get("use_sliding_window") is not False:
        reader.refuse("sliding_window", lambda value: False, "sliding windows are not supported")


def _dtype(reader: ConfigReader) -> WeightDtype:
    quantized = quantized_dtype(reader)
    if quantized is not None:
        return quantized
    key = "dtype" if reader.has("dtype") else "torch_dtype"
    name = reader.text(key, "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise reader.fail(key, f"is {shown(name)}; supported: {', '.join(DTYPES)}")
    return DTYPES[name]


def _model_name(path: Path) -> str:
    """Return a file's stem, org/repo for huggingface_hub's cache, else the directory's name."""
    if is_gguf(path):
        return path.stem
    resolved = path.resolve()
    if resolved.parent.name == "snapshots":
        return resolved.parent.parent.name.removeprefix("models--").replace("--", "/")
    return resolved.name
