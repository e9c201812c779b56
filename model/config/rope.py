"""Rotary position settings: rope_theta and rope_scaling, or transformers 5's rope_parameters."""

from __future__ import annotations

from typing import Any

from model.config.json_reader import ConfigReader
from model.config.model_config import RopeConfig
from model.errors import shown

KINDS = ("default", "linear", "llama3")
DEFAULT_THETA = 10_000.0
_MAX = 1e12


def read_rope(reader: ConfigReader, max_positions: int) -> RopeConfig:
    """Read both spellings; where both are given they must agree. Errors: ConfigError."""
    found = [
        _read(reader, key, max_positions)
        for key in ("rope_scaling", "rope_parameters")
        if reader.has(key)
    ]
    if not found:
        return RopeConfig(theta=reader.number("rope_theta", DEFAULT_THETA, low=1e-6, high=_MAX))
    if found[0] != found[-1]:
        raise reader.fail("rope_scaling", "and rope_parameters disagree; remove one of them")
    return found[0]


def _read(reader: ConfigReader, key: str, max_positions: int) -> RopeConfig:
    values = reader.values[key]
    if not isinstance(values, dict):
        raise reader.fail(key, f"is {shown(values, 60)}; give an object")
    rope = ConfigReader(values, f"{reader.source}: {key}")
    rope.refuse(
        "partial_rotary_factor", lambda value: value == 1, "partial rotation is not supported"
    )
    nested = next((name for name, value in values.items() if isinstance(value, dict)), None)
    if nested is not None:
        raise rope.fail(shown(nested), "sets a rope of its own; use one rope for all layers")
    kind = _kind(rope)
    theta = _theta(reader, rope)
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = rope.number("factor", low=1e-6, high=_MAX)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    low = rope.number("low_freq_factor", low=1e-6, high=_MAX)
    high = rope.number("high_freq_factor", low=1e-6, high=_MAX)
    if high <= low:
        raise rope.fail("high_freq_factor", f"is {high:g}; give more than low_freq_factor {low:g}")
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=_original_positions(reader, rope, max_positions),
    )


def _kind(rope: ConfigReader) -> Any:
    kinds = [rope.text(key) for key in ("rope_type", "type") if rope.has(key)] or ["default"]
    if kinds[0] != kinds[-1]:
        raise rope.fail(
            "rope_type", f"is {shown(kinds[0])} but type is {shown(kinds[-1])}; keep one"
        )
    if kinds[0] not in KINDS:
        raise rope.fail(
            "rope_type",
            f"is {shown(kinds[0])}, which is not supported; supported: {', '.join(KINDS)}",
        )
    return kinds[0]


def _theta(reader: ConfigReader, rope: ConfigReader) -> float:
    thetas = [
        r.number("rope_theta", low=1e-6, high=_MAX) for r in (rope, reader) if r.has("rope_theta")
    ]
    if thetas and thetas[0] != thetas[-1]:
        raise rope.fail(
            "rope_theta", f"is {thetas[0]:g} but outside it is {thetas[-1]:g}; keep one"
        )
    return thetas[0] if thetas else DEFAULT_THETA


def _original_positions(reader: ConfigReader, rope: ConfigReader, max_positions: int) -> int:
    key = "original_max_position_embeddings"
    outer = reader if reader.has(key) else rope
    return outer.integer(key, max_positions, high=1 << 26)
