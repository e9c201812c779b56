"""A GGUF file's rope, from its keys and tensors of factors, as config.json's keys.

No key is left out in silence: one that llama.cpp does not apply to these architectures must say
what changes nothing.
Source:  llama.cpp, load_hparams in src/llama-model.cpp; src/llama-context.cpp; ggml's rope_yarn
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hotcold.model.config.gguf_metadata import LATENT_RANK, Metadata, head_dim
from hotcold.model.errors import CheckpointError, shown

_LLAMA3_FACTORS = "rope_freqs.weight"
_SHORT_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS = (_LLAMA3_FACTORS, _SHORT_FACTORS, _LONG_FACTORS)
_KINDS = ("none", "linear", "yarn", "longrope")
# `finetuned` tells how the model was made, and changes nothing.
_READ = ("freq_base", "dimension_count", "scale_linear", "scaling.type", "scaling.factor",
         "scaling.original_context_length", "scaling.attn_factor", "scaling.yarn_beta_fast",
         "scaling.yarn_beta_slow", "scaling.finetuned")  # fmt: skip
_NEVER = 1e29  # a factor of angles that are 0


def rope_values(metadata: Metadata) -> dict[str, Any]:
    """Return config.json's rope_theta, rope_scaling and partial_rotary_factor.

    Errors:  CheckpointError for what is not supported, and for unknown keys of the rope
    """
    theta, size = metadata.number("rope.freq_base", 10000.0), head_dim(metadata)
    rotated = metadata.integer("rope.dimension_count", size)
    kind = metadata.text("rope.scaling.type", "linear")
    if kind not in _KINDS:
        raise metadata.fail("rope.scaling.type", f"is {kind!r}, which is not supported")
    factor = 1.0 if kind == "none" else _factor(metadata)
    values: dict[str, Any] = {"rope_theta": theta}
    if rotated != size:
        values["partial_rotary_factor"] = rotated / max(1, size)
    if any(metadata.has_tensor(name) for name in FACTORS):
        if factor != 1 or kind == "yarn":
            raise metadata.fail("rope.scaling.factor", "stands beside factors in tensors")
        values["rope_scaling"] = _by_tensors(metadata, theta, rotated)
    elif kind == "yarn":
        values["rope_scaling"] = _yarn(metadata, factor)
    elif factor != 1:
        values["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    _require_neutral(metadata, values, rotated)
    return values


def _factor(metadata: Metadata) -> float:
    """The factor by which positions are divided; 0 is llama.cpp's word for none."""
    return metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 0.0)) or 1.0


def _yarn(metadata: Metadata, factor: float) -> dict[str, Any]:
    """attn_factor is multiplied with the usual factor of cosines and sines."""
    positions = metadata.integer("context_length")
    own_scale = metadata.number("rope.scaling.attn_factor", 1.0)
    below = metadata.number("rope.scaling.yarn_log_multiplier", 0.0)  # mscale_all_dim
    if metadata.has(LATENT_RANK):
        below *= 10  # stands there times 0.1, and mscale is the same
        if not below:
            raise metadata.fail("rope.scaling.yarn_log_multiplier", "is missing; use a newer file")
    own_scale /= _yarn_scale(factor, below) if below else 1.0
    return {
        "mscale_all_dim": below,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings":
            metadata.integer("rope.scaling.original_context_length", positions) or positions,
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
        "attention_factor":
            _yarn_scale(factor, below if metadata.has(LATENT_RANK) else 1.0) * own_scale,
        # llama.cpp rounds the bounds for gpt-oss, too; the model does not.
        "truncate": metadata.architecture != "gpt-oss",
    }  # fmt: skip


def _yarn_scale(factor: float, multiplier: float = 1.0) -> float:
    return 0.1 * multiplier * math.log(factor) + 1 if factor > 1 else 1.0


def _require_neutral(metadata: Metadata, values: dict[str, Any], rotated: int) -> None:
    """Raise CheckpointError for a key that is not read, unless its value changes nothing."""
    scaling = values.get("rope_scaling", {"rope_type": "default"})
    is_yarn = scaling["rope_type"] == "yarn"
    # A negative ext_factor is one that is not set.
    neutral: dict[str, tuple[float, ...]] = {
        "freq_base_swa": (values["rope_theta"],),
        "dimension_count_swa": (rotated,),
        "scaling.alpha": (0.0, 1.0),
        "scaling.yarn_ext_factor": (1.0 if is_yarn else 0.0, -1.0),
        "scaling.yarn_attn_factor": (1.0, _yarn_scale(scaling["factor"]) if is_yarn else 1.0),
        "scaling.yarn_log_multiplier": (0.0,),
    }
    own = f"{metadata.architecture}.rope."
    read = {*_READ, *metadata.rope_keys}
    if not is_yarn and scaling["rope_type"] != "longrope":
        read.remove("scaling.attn_factor")
        neutral["scaling.attn_factor"] = (1.0,)
    for key, value in metadata.model.metadata.items():
        if ".rope." not in key or (key.startswith(own) and key.removeprefix(own) in read):
            continue
        allowed = neutral.get(key.removeprefix(own), ())
        is_number = isinstance(value, (int, float))
        if not (is_number and any(math.isclose(value, one, rel_tol=1e-4) for one in allowed)):
            what = shown(value) if is_number or isinstance(value, str) else "an array"
            raise CheckpointError(
                f"{metadata.model.path}: key {shown(key)} is {what}, which is not supported and "
                "would change the result; use the model's safetensors files, or another GGUF file"
            )


def _by_tensors(metadata: Metadata, theta: float, size: int) -> dict[str, Any]:
    if metadata.has_tensor(_LLAMA3_FACTORS):
        for name in (_SHORT_FACTORS, _LONG_FACTORS):
            if metadata.has_tensor(name):
                raise CheckpointError(
                    f"{metadata.model.path}: tensor {name!r} stands beside {_LLAMA3_FACTORS!r}"
                )
        return _proportional(metadata, size) or _llama3(metadata, theta, size)
    for name in (_SHORT_FACTORS, _LONG_FACTORS):
        metadata.rows_of(name)
    scaling = {
        "rope_type": "longrope",
        "short_factor": metadata.floats(_SHORT_FACTORS).tolist(),
        "long_factor": metadata.floats(_LONG_FACTORS).tolist(),
        "original_max_position_embeddings":
            metadata.integer("rope.scaling.original_context_length"),
    }  # fmt: skip
    if metadata.has("rope.scaling.attn_factor"):
        scaling["attention_factor"] = metadata.number("rope.scaling.attn_factor")
    return scaling


def _proportional(metadata: Metadata, size: int) -> dict[str, Any]:
    """Gemma 4's rope: the first pairs of a head as they are, the others not rotated; {} of others.

    Source:  llama.cpp, conversion/gemma.py
    """
    factors = metadata.floats(_LLAMA3_FACTORS)
    count = int((factors == 1).sum())
    is_whole = factors.size == size // 2 and (factors[:count] == 1).all()
    if not is_whole or not count or not (factors[count:] > _NEVER).all() or count == factors.size:
        return {}
    return {"rope_type": "proportional", "partial_rotary_factor": 2 * count / size}


def _llama3(metadata: Metadata, theta: float, size: int) -> dict[str, Any]:
    """Llama 3's rope_scaling, from the factors: the file has nothing else of it.

    All known models have the same low and high frequencies, between which factors go from 1 to
    `factor`; those between tell the original context, which is mostly 8,192 positions.
    """
    factors = metadata.floats(_LLAMA3_FACTORS)
    factor, low, high, positions = float(factors.max(initial=1.0)), 1.0, 4.0, 8192
    if factors.size == size // 2:
        waves = 2 * np.pi * theta ** (2 * np.arange(size // 2) / size)
        if len(inner := np.flatnonzero((factors > 1.01) & (factors < 0.99 * factor))):
            smooth = (factor / factors[inner] - 1) / (factor - 1)
            positions = round(float(np.median(waves[inner] * (low + smooth * (high - low)))))
        smooth = (positions / waves - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        expected = np.where(waves > positions / low, factor, between)
        expected = np.where(waves < positions / high, 1.0, expected)
        if np.allclose(factors, expected, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": positions,
            }
    raise CheckpointError(
        f"{metadata.model.path}: tensor {_LLAMA3_FACTORS!r} has factors of no known model, which "
        "are not supported"
    )
