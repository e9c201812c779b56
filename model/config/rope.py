"""Rotary position embedding (rope): its settings in config.json, and the frequencies they give.

config.json has rope_theta and rope_scaling, or transformers 5's rope_parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.errors import shown

if TYPE_CHECKING:
    import torch

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
DEFAULT_THETA = 10_000.0
# longrope's first name; and that of models with pictures: a text's three positions are one.
_OTHER_NAMES = {"su": "longrope", "mrope": "default"}
_MAX = 1e12
_MAX_FACTORS = 4096


@dataclass(frozen=True)
class RopeConfig:
    """The base period, and how frequencies are scaled.

    The first `share` of a head's dimensions are rotated; proportional rotates that share of the
    pairs (i, i + size / 2) of a whole head. longrope divides frequencies by one of two
    lists of factors, and dynamic has a longer base period, where sequences are longer than
    `original_max_positions`. Cosines and sines are multiplied with `table_scale`; those of queries
    grow with the position by `query_growth`.
    """

    theta: float
    kind: Literal["default", "linear", "dynamic", "llama3", "longrope", "yarn", "proportional"] = (
        "default"
    )
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    share: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncates: bool = True
    table_scale: float = 1.0
    query_growth: float = 0.0

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many dimensions of a head have an angle, which may always be 0."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.share)

    def turning_pairs(self, head_dim: int) -> int:
        """Return how many pairs, the first ones, have another angle than 0."""
        if self.kind == "proportional":
            return int(self.share * head_dim // 2)
        return self.rotary_dim(head_dim) // 2

    @property
    def stretched(self) -> int:
        """The positions to which dynamic and yarn stretch the original context; 0 of others.

        Their models' max_position_embeddings may be the original context or the stretched one.
        """
        is_stretched = self.kind in ("dynamic", "yarn")
        return int(self.original_max_positions * self.factor) if is_stretched else 0

    @property
    def changes_after(self) -> int:
        """Longer sequences than this have other frequencies; 0: all have the same."""
        return self.original_max_positions if self.kind in ("longrope", "dynamic") else 0

    def length_that_counts(self, num_positions: int) -> int:
        """What frequencies depend on of a sequence's length: 0, unless it is above `changes_after`.

        Two lengths for which this is equal have the same frequencies, to the bit.
        """
        if not 0 < self.changes_after < num_positions:
            return 0
        return num_positions if self.kind == "dynamic" else self.changes_after + 1

    def scales(self, num_positions: int) -> np.ndarray:
        """Return what cosines and sines of each position are multiplied with.

        Shapes:  (num_positions,)
        Dtypes:  float32
        """
        return (self.table_scale * self.growths(num_positions)).astype(np.float32)

    def growths(self, num_positions: int) -> np.ndarray:
        """Return what a whole vector of each position is multiplied with.

        g[p] = 1 + query_growth * ln(1 + floor(p / original_max_positions))
        Shapes:  (num_positions,)
        Dtypes:  float64
        Source:  get_llama_4_attn_scale of transformers/models/ministral3
        """
        if not self.query_growth:
            return np.ones(num_positions)
        times = np.arange(num_positions) // self.original_max_positions
        return 1 + self.query_growth * np.log1p(times)

    def inv_freq(self, head_dim: int, num_positions: int = 0) -> np.ndarray:
        """Return the angle per position of each pair of dimensions, in radians.

        default: theta ** (-2i / d), d the dimensions that are rotated;  linear: that / factor
        llama3: long waves / factor, short waves kept, those between interpolated
        yarn: those that turn `beta_fast` times in the original context kept, those that turn
              `beta_slow` times / factor, those between interpolated
        For sequences of `num_positions`, n where they are longer than the original context o:
        longrope: 1 / (factors[i] * theta ** (2i / d)), with the long factors if they are longer
        dynamic: theta * (factor * n / o - factor + 1) ** (d / (d - 2)) in theta's place
        proportional: default's / factor for the first `share` of the pairs, 0 for the others
        Shapes:  (d / 2,)
        Dtypes:  float32, computed by torch operation for operation as transformers computes it
        Source:  transformers/modeling_rope_utils.py
        """
        import torch  # here, so that commands that read a config start fast

        size, length = self.rotary_dim(head_dim), self.length_that_counts(num_positions)
        exponents = torch.arange(0, size, 2, dtype=torch.int64).to(torch.float) / size
        if self.kind == "longrope":
            factors = torch.tensor(self.long_factors if length else self.short_factors)
            return (1.0 / (factors * self.theta**exponents)).numpy()
        if self.kind == "yarn":
            return self._yarn(self.theta**exponents, size).numpy()
        theta = self._dynamic_theta(torch.tensor(length), size) if length else self.theta
        inv_freq = 1.0 / (theta**exponents)
        if self.kind == "proportional":
            inv_freq[self.turning_pairs(head_dim) :] = 0
        if self.kind in ("linear", "proportional"):
            inv_freq = inv_freq / self.factor
        elif self.kind == "llama3":
            inv_freq = self._llama3(inv_freq)
        return inv_freq.numpy()

    def _dynamic_theta(self, length: torch.Tensor, size: int) -> torch.Tensor:
        growth = self.factor * length / self.original_max_positions - (self.factor - 1)
        return self.theta * growth ** (size / (size - 2))

    def _llama3(self, inv_freq: torch.Tensor) -> torch.Tensor:
        import torch

        wavelength = 2 * torch.pi / inv_freq
        long_wave = self.original_max_positions / self.low_freq_factor
        short_wave = self.original_max_positions / self.high_freq_factor
        scaled = torch.where(wavelength > long_wave, inv_freq / self.factor, inv_freq)
        smooth = (self.original_max_positions / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - smooth) * scaled / self.factor + smooth * scaled
        is_between = ~(wavelength < short_wave) * ~(wavelength > long_wave)
        return torch.where(is_between, between, scaled)

    def _yarn(self, periods: torch.Tensor, size: int) -> torch.Tensor:
        import torch

        def dimension(turns: float) -> float:
            log_ratio = math.log(self.original_max_positions / (turns * 2 * math.pi))
            return (size * log_ratio) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncates:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        high += 0.001 if low == high else 0.0
        ramp = (torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)
        kept = 1 - torch.clamp(ramp, 0, 1)
        return (1.0 / (self.factor * periods)) * (1 - kept) + (1.0 / periods) * kept


def read_rope(
    reader: ConfigReader,
    max_positions: int,
    *,
    theta: float = DEFAULT_THETA,
    share: float | None = None,
    kinds: tuple[str, ...] = KINDS,
) -> RopeConfig:
    """Read rope settings in both spellings, which must agree. Errors: ConfigError.

    `theta` and `share` are the family's defaults; without `share` all dimensions are rotated, and
    another partial_rotary_factor is refused.
    """
    found = [
        read_rope_object(reader, key, max_positions, theta, share, kinds)
        for key in ("rope_scaling", "rope_parameters")
        if reader.has(key)
    ]
    if not found:
        theta = reader.number("rope_theta", theta, low=1e-6, high=_MAX)
        return RopeConfig(theta=theta, share=_share(reader, None, share))
    if found[0] != found[-1]:
        raise reader.fail("rope_scaling", "and rope_parameters disagree; remove one of them")
    return found[0]


def read_rope_object(
    reader: ConfigReader,
    key: str,
    max_positions: int,
    default_theta: float = DEFAULT_THETA,
    share: float | None = None,
    kinds: tuple[str, ...] = KINDS,
) -> RopeConfig:
    """Read the object of rope settings under `key`. Errors: ConfigError."""
    values = reader.values[key]
    if not isinstance(values, dict):
        raise reader.fail(key, f"is {shown(values, 60)}; give an object")
    rope = ConfigReader(values, f"{reader.source}: {key}")
    nested = next((name for name, value in values.items() if isinstance(value, dict)), None)
    if nested is not None:
        raise rope.fail(shown(nested), "sets a rope of its own; use one rope for all layers")
    kind, theta = _kind(rope, kinds), _theta(reader, rope, default_theta)
    if kind == "proportional":
        share, factor = _share(reader, rope, 1.0), rope.number("factor", 1.0, low=1e-6, high=_MAX)
        return RopeConfig(theta, "proportional", factor, share=share)
    fields: dict[str, Any] = {"theta": theta, "kind": kind, "share": _share(reader, rope, share)}
    if kind == "longrope":
        return RopeConfig(**fields, **_longrope(reader, rope, max_positions))
    if kind != "default":
        least = 1.0 if kind == "dynamic" else 1e-6
        fields["factor"] = rope.number("factor", low=least, high=_MAX)
    if kind == "dynamic":
        fields["original_max_positions"] = max_positions
    elif kind == "yarn":
        fields |= _yarn(rope, theta, fields["factor"])
    elif kind == "llama3":
        low = rope.number("low_freq_factor", low=1e-6, high=_MAX)
        high = rope.number("high_freq_factor", low=1e-6, high=_MAX)
        if high <= low:
            raise rope.fail(
                "high_freq_factor", f"is {high:g}; give more than low_freq_factor {low:g}"
            )
        fields |= {"low_freq_factor": low, "high_freq_factor": high}
    if kind in ("yarn", "llama3"):
        fields["original_max_positions"] = _original_positions(reader, rope, max_positions)
    return RopeConfig(**fields)


def read_ropes_by_window(
    reader: ConfigReader,
    max_positions: int,
    *,
    theta: float,
    local_theta: float | None = None,
    full: RopeConfig | None = None,
    kinds: tuple[str, ...] = KINDS,
) -> tuple[RopeConfig, RopeConfig]:
    """Read the ropes of layers without and with a window, in both spellings. Errors: ConfigError.

    `theta` and `local_theta` are the defaults of their base periods; without the latter both are
    the same. `full` is the default of all of the first rope, of which `kinds` are supported. Only
    layers without a window are scaled where config.json has one object for all.
    """
    found = reader.values.get("rope_parameters")
    if isinstance(found, dict) and found.keys() & {"full_attention", "sliding_attention"}:
        inner = ConfigReader(found, f"{reader.source}: rope_parameters")
        defaults = {
            "full_attention": full or RopeConfig(theta=theta),
            "sliding_attention": RopeConfig(theta=local_theta or theta),
        }
        full, local = (
            read_rope_object(inner, kind, max_positions, default.theta, kinds=kinds)
            if inner.has(kind)
            else default
            for kind, default in defaults.items()
        )
        return full, local
    is_given = any(reader.has(key) for key in ("rope_theta", "rope_scaling", "rope_parameters"))
    if full is None or is_given:
        full = read_rope(reader, max_positions, theta=theta, kinds=kinds)
    return full, RopeConfig(theta=local_theta or full.theta)


def _longrope(reader: ConfigReader, rope: ConfigReader, max_positions: int) -> dict[str, Any]:
    """Read Phi-3's rope; table_scale follows from the factor by which its context was extended."""
    original = _original_positions(reader, rope, max_positions)
    factor = rope.number("factor", max_positions / original, low=1e-6, high=_MAX)
    scale = math.sqrt(1 + math.log(factor) / math.log(max(original, 2))) if factor > 1 else 1.0
    return {
        "original_max_positions": original,
        "short_factors": _factors(rope, "short_factor"),
        "long_factors": _factors(rope, "long_factor"),
        "table_scale": rope.number("attention_factor", scale, low=1e-6, high=_MAX),
    }


def _yarn(rope: ConfigReader, theta: float, factor: float) -> dict[str, Any]:
    """Read yarn; table_scale is 0.1 ln(factor) + 1, or follows mscale and mscale_all_dim."""
    if theta <= 1:
        raise rope.fail("rope_theta", f"is {theta:g}; yarn needs more than 1")
    scales = [rope.number(key, 0.0, low=0.0, high=_MAX) for key in ("mscale", "mscale_all_dim")]
    scale, below = scales if all(scales) else (1.0, 0.0)
    growth = 0.1 * math.log(factor) if factor > 1 else 0.0
    table_scale = (scale * growth + 1) / (below * growth + 1)
    return {
        "beta_fast": rope.number("beta_fast", 32.0, low=1e-6, high=_MAX),
        "beta_slow": rope.number("beta_slow", 1.0, low=1e-6, high=_MAX),
        "truncates": rope.boolean("truncate", True),
        "table_scale": rope.number("attention_factor", table_scale, low=1e-6, high=_MAX),
    }


def _factors(rope: ConfigReader, key: str) -> tuple[float, ...]:
    values: Any = rope.values.get(key)
    is_list = isinstance(values, list) and 0 < len(values) <= _MAX_FACTORS
    if not is_list or any(type(v) not in (int, float) or not 0 < v <= _MAX for v in values):
        raise rope.fail(key, f"is {shown(values, 60)}; give a list of numbers above 0")
    return tuple(float(value) for value in values)


def _share(reader: ConfigReader, rope: ConfigReader | None, share: float | None) -> float:
    """Return the share of a head's dimensions that is rotated; without `share` all are."""
    key = "partial_rotary_factor"
    found = [r for r in (rope, reader) if r is not None and r.has(key)]
    if share is None:
        for each in found:
            each.refuse(key, lambda value: value == 1, "partial rotation is not supported")
        return 1.0
    shares = [each.number(key, low=1e-6, high=1.0) for each in found] or [share]
    if shares[0] != shares[-1]:
        raise reader.fail(key, f"is {shares[-1]:g} and {shares[0]:g} elsewhere; keep one")
    return shares[0]


def _kind(rope: ConfigReader, known: tuple[str, ...]) -> Any:
    kinds = [rope.text(key) for key in ("rope_type", "type") if rope.has(key)] or ["default"]
    kinds = [_OTHER_NAMES.get(kind, kind) for kind in kinds]
    if kinds[0] != kinds[-1]:
        raise rope.fail(
            "rope_type", f"is {shown(kinds[0])} but type is {shown(kinds[-1])}; keep one"
        )
    if kinds[0] not in known:
        raise rope.fail(
            "rope_type",
            f"is {shown(kinds[0])}, which is not supported; supported: {', '.join(known)}",
        )
    return kinds[0]


def _theta(reader: ConfigReader, rope: ConfigReader, default: float) -> float:
    thetas = [
        r.number("rope_theta", low=1e-6, high=_MAX) for r in (rope, reader) if r.has("rope_theta")
    ]
    if thetas and thetas[0] != thetas[-1]:
        raise rope.fail(
            "rope_theta", f"is {thetas[0]:g} but outside it is {thetas[-1]:g}; keep one"
        )
    return thetas[0] if thetas else default


def _original_positions(reader: ConfigReader, rope: ConfigReader, max_positions: int) -> int:
    key = "original_max_position_embeddings"
    outer = reader if reader.has(key) else rope
    return outer.integer(key, max_positions, high=1 << 26)
