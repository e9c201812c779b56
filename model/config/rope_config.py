"""Rotary position embedding: what a model's heads are turned by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RopeConfig:
    """The base period and how frequencies are scaled.

    `share` of a head's dimensions are rotated, the first ones. longrope divides frequencies by one
    of two lists of factors. Cosines and sines are multiplied with `table_scale`.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "longrope", "yarn"] = "default"
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

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many dimensions of a head are rotated."""
        return int(head_dim * self.share)

    def is_long(self, num_positions: int) -> bool:
        """Whether sequences of up to so many positions take longrope's long factors."""
        return self.kind == "longrope" and num_positions > self.original_max_positions

    def inv_freq(self, head_dim: int, is_long: bool = False) -> np.ndarray:
        """Return the angle per position of each pair of dimensions, in radians.

        default: theta ** (-2i / d), d the dimensions that are rotated;  linear: that / factor
        llama3: long waves / factor, short waves kept, those between interpolated
        longrope: 1 / (factors[i] * theta ** (2i / d)), with the long factors if `is_long`
        yarn: those that turn `beta_fast` times in the original context kept, those that turn
              `beta_slow` times / factor, those between interpolated
        Shapes:  (d / 2,)
        Dtypes:  float32, computed by torch operation for operation as transformers computes it
        Source:  transformers/modeling_rope_utils.py
        """
        import torch  # here, as only services and tests compute it: reading a config stays fast

        size = self.rotary_dim(head_dim)
        exponents = torch.arange(0, size, 2, dtype=torch.int64).to(torch.float) / size
        if self.kind == "longrope":
            factors = torch.tensor(self.long_factors if is_long else self.short_factors)
            return (1.0 / (factors * self.theta**exponents)).numpy()
        if self.kind == "yarn":
            return self._yarn(self.theta**exponents, size).numpy()
        inv_freq = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            inv_freq = inv_freq / self.factor
        elif self.kind == "llama3":
            inv_freq = self._llama3(inv_freq)
        return inv_freq.numpy()

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
            transposed = math.log(self.original_max_positions / (turns * 2 * math.pi))
            return (size * transposed) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncates:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        high += 0.001 if low == high else 0.0
        ramp = (torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)
        kept = 1 - torch.clamp(ramp, 0, 1)
        return (1.0 / (self.factor * periods)) * (1 - kept) + (1.0 / periods) * kept
