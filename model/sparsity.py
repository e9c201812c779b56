"""How often neurons fire: published shares of model families, a power law, the hot share."""

from __future__ import annotations

import numpy as np

from hotcold.model.config.model_config import ModelConfig

# By (family, activation_fn): the share of neurons that fires at a token. Source:
#   ReLU Llamas 7B, 13B and 70B: 0.30, 0.22, 0.18       PowerInfer, section 8
#   ProSparse-Llama-2 7B and 13B: 0.107, 0.112          arXiv 2402.13516
#   MiniCPM-S-1B: 0.121                                 arXiv 2402.13516
#   Bamboo-7B: same perplexity with the largest 12%     its README
#   OPT, 6.7B and larger: 0.03                          PowerInfer, section 8
#   ReLU Falcon 40B: 0.05                               PowerInfer, section 8
#   TurboSparse-Mixtral: 0.15 of a chosen expert        arXiv 2406.05955, section 6.2
#   SmallThinker: under 0.4 of a chosen expert          arXiv 2507.20984
_PUBLISHED_SHARES = {
    ("llama", "relu"): 0.30,
    ("llama", "fatrelu"): 0.11,
    ("minicpm", "fatrelu"): 0.12,
    ("bamboo", "drelu"): 0.12,
    ("opt", "relu"): 0.03,
    ("falcon", "relu"): 0.05,
    ("turbosparsemixtral", "drelu"): 0.15,
    ("smallthinker", "relu"): 0.40,
}
ACTIVATION_SHARE = 0.8  # as in PowerInfer's figure 5
MIN_RATE, MAX_RATE = 1e-4, 0.999
# With it 24%, 33% and 43% of the neurons make 80% of the activations at densities of 0.04, 0.10 and
# 0.22; PowerInfer found 26% in OPT-30B and 43% in a ReGLU Llama-70B.
RATE_EXPONENT = 1.1
MIN_DENSITY, MAX_DENSITY = 0.002, 0.95  # of a layer
_BISECTIONS = 40


def known_firing_share(config: ModelConfig) -> tuple[float, str] | None:
    """The share of neurons that fires at a token, and who says so; None where nobody does.

    It is of a layer's neurons, in a mixture of those of the chosen experts. A config.json may say
    its model's own (`hotcold make-model` writes it), else the share published of its kind counts.
    """
    if config.firing_share:
        return config.firing_share, "as its config.json says"
    published = _published_firing_share(config)
    return None if published is None else (published, "as was published of such models")


def _published_firing_share(config: ModelConfig) -> float | None:
    return _PUBLISHED_SHARES.get((config.family, config.activation_fn))


def hot_share(counts: np.ndarray) -> float:
    """Return the least share of the neurons that makes ACTIVATION_SHARE of the activations.

    0 where nothing fires.
    Shapes:  counts (N,), how often each neuron fires, or its rate
    """
    cumulative = np.sort(counts)[::-1].cumsum()
    if cumulative[-1] == 0:
        return 0.0
    needed = int((cumulative < ACTIVATION_SHARE * cumulative[-1]).sum()) + 1
    return needed / counts.size


def power_law_rates(num_neurons: int, density: float) -> np.ndarray:
    """Return falling firing rates with the mean `density`.

    rate[n] = clip(scale * (n + 0.5) ** -RATE_EXPONENT, MIN_RATE, MAX_RATE)
    Shapes:  (N,), float64
    """
    if not num_neurons:
        return np.zeros(0)
    law = (np.arange(num_neurons, dtype=np.float64) + 0.5) ** -RATE_EXPONENT
    low, high = 0.0, MAX_RATE / float(law[-1])
    for _ in range(_BISECTIONS):
        scale = (low + high) / 2
        is_low = (scale * law).clip(MIN_RATE, MAX_RATE).mean() < density
        low, high = (scale, high) if is_low else (low, scale)
    return (high * law).clip(MIN_RATE, MAX_RATE)
