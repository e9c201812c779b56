"""How often the neurons of a layer fire, where only their mean is known: a power law."""

from __future__ import annotations

import numpy as np

MIN_RATE, MAX_RATE = 1e-4, 0.999
# So that 24%, 33% and 43% of the neurons make 80% of the activations at densities of 0.04, 0.10 and
# 0.22; PowerInfer found 26% in OPT-30B and 43% in a ReGLU Llama-70B.
RATE_EXPONENT = 1.1
MIN_DENSITY, MAX_DENSITY = 0.002, 0.95  # of a layer
_BISECTIONS = 40


def power_law_rates(num_neurons: int, density: float) -> np.ndarray:
    """Return falling firing rates with the mean `density`.

    rate[n] = clip(scale * (n + 0.5) ** -RATE_EXPONENT, MIN_RATE, MAX_RATE)
    Shapes:  (N,), float64
    """
    law = (np.arange(num_neurons, dtype=np.float64) + 0.5) ** -RATE_EXPONENT
    low, high = 0.0, MAX_RATE / float(law[-1])
    for _ in range(_BISECTIONS):
        scale = (low + high) / 2
        is_low = (scale * law).clip(MIN_RATE, MAX_RATE).mean() < density
        low, high = (scale, high) if is_low else (low, scale)
    return (high * law).clip(MIN_RATE, MAX_RATE)
