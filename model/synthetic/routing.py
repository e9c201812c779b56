"""How much of a random router's logits is what, for experts to repeat as in a trained model.

An expert's logit is the sum of three: `popularity` times a number of its own, which makes some
experts busy; sqrt(by_topic) times a number of its own for each topic, which keeps experts while the
text keeps its topic; sqrt(1 - by_topic) times one that changes with each token. All numbers are
normal with deviation 1, so both weights are found on plain random numbers, once for all layers.
Of 128 experts, 8 of which are chosen and 0.45 kept, 0.81 then stand among those of the last eight
tokens, and 0.90 among the 40% used last. Others measured 0.80, and 0.90 to 0.95, of Qwen3-30B-A3B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hotcold.model.synthetic.random_source import normal_quantiles

STAYING = 0.95  # share of tokens whose topic is that of the token before
_TEXTS = 8
_BISECTIONS = 9
_MAX_POPULARITY = 4.0


@dataclass(frozen=True)
class Routing:
    """The two weights, and what they lead to."""

    popularity: float
    by_topic: float
    skew: float  # share of all choices that the busier half of the experts has
    kept: float  # share of a token's experts that the token before it had


def fit_routing(
    num_experts: int,
    num_chosen: int,
    num_topics: int,
    skew: float,
    kept: float,
    generator: np.random.Generator,
) -> Routing:
    """Return the weights with which experts are chosen with `skew`, and `kept`.

    Skew alone keeps some experts; where fewer are wanted, they are what is kept.
    """
    topics = np.arange(num_topics).repeat(round(1 / (1 - STAYING)))
    own = normal_quantiles(num_experts).numpy()
    topic = generator.standard_normal((_TEXTS, num_topics, num_experts))[:, topics]
    token = generator.standard_normal(topic.shape)

    def tried(popularity: float, by_topic: float) -> Routing:
        logits = popularity * own + by_topic**0.5 * topic + (1 - by_topic) ** 0.5 * token
        least = np.partition(logits, -num_chosen)[..., -num_chosen, None]
        is_chosen = logits >= least
        busier = np.sort(is_chosen.sum(axis=1))[:, num_experts // 2 :]
        is_kept = is_chosen[:, 1:] & is_chosen[:, :-1]
        return Routing(
            popularity,
            by_topic,
            skew=float(busier.sum() / is_chosen.sum()),
            kept=float(is_kept.sum() / is_chosen[:, 1:].sum()),
        )

    def with_skew(by_topic: float) -> Routing:
        return _bisect(lambda it: tried(it, by_topic), lambda it: it.skew < skew, _MAX_POPULARITY)

    return _bisect(with_skew, lambda it: it.kept < kept, 1.0)


def _bisect(
    tried: Callable[[float], Routing], is_low: Callable[[Routing], bool], high: float
) -> Routing:
    """Return what is tried where `is_low` ends in 0..high."""
    low = 0.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_low(tried(middle)) else (low, middle)
    return tried((low + high) / 2)
