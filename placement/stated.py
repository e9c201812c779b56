"""Profile and predictors of a model that is not here, made of the little that is known of it."""

from __future__ import annotations

import numpy as np

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import UsageError
from hotcold.model.sparsity import MAX_DENSITY, MIN_DENSITY, power_law_rates
from hotcold.placement.profile import ActivationProfile
from hotcold.placement.solver.cost import PredictorCost

_TOKENS = 1_000_000  # of the profile, so that the rarest neurons have whole counts too
# Of random weights at a density of 0.10 and recall 0.96 (docs/lab_log.md, "Predictors"): sign
# predictors of 2 bits a weight choose 0.165 of the gates, low-rank ones of 80 int8 units for 4096
# inputs 0.185.
_SIGN_BITS, _SIGN_FACTOR = 2, 1.6
_UNITS_OF_WIDTH, _LOWRANK_FACTOR = 80 / 4096, 1.8


def stated_profile(config: ModelConfig, density: float, why: str) -> ActivationProfile:
    """A profile in which the share `density` of each layer's neurons fires, by a power law.

    `why` says who states it.
    Errors:  UsageError for a share out of range
    """
    if not MIN_DENSITY <= density <= MAX_DENSITY and density != 1:
        raise UsageError(
            f"--density is {density}; give a share from {MIN_DENSITY} to {MAX_DENSITY}, or 1"
        )
    rates = np.ones(config.ffn_size) if density == 1 else power_law_rates(config.ffn_size, density)
    counts = np.rint(rates * _TOKENS).astype(np.int64)
    return ActivationProfile(
        np.repeat(counts[None], config.num_layers, axis=0),
        _TOKENS,
        f"{density:.3g} of the neurons fire at a token, at rates of a power law ({why})",
        "",
    )


def assumed_predictors(config: ModelConfig, kind: str) -> PredictorCost:
    """Predictors of usual size. `kind` is sign or lowrank."""
    gates = config.hidden_size * config.ffn_size
    if kind == "sign":
        num_bytes, factor = gates * _SIGN_BITS // 8, _SIGN_FACTOR
        size = f"of {_SIGN_BITS} bits a gate weight"
    else:
        units = max(16, round(_UNITS_OF_WIDTH * config.hidden_size))
        num_bytes, factor = units * (config.hidden_size + config.ffn_size), _LOWRANK_FACTOR
        size = f"of {units} units in 8 bits"
    return PredictorCost(
        kind,
        np.full(config.num_layers, num_bytes, np.int64),
        np.full(config.num_layers, factor),
        f"predictors {size} choose {factor:g} neurons for each that fires, as on random weights",
    )
