"""What the experts that tokens choose have in common: repetition, skew, hits of a cache.

Routes are int16 arrays (tokens, layers, k), the tokens in the order of one text.
"""

from collections import OrderedDict

import numpy as np

SHARES = (0.125, 0.25, 0.4, 0.5, 0.75)  # of the experts that are resident
WINDOW = 8


def kept(routes: np.ndarray, window: int = 1) -> np.ndarray:
    """For each layer the share of choices that one of the last `window` tokens made, too."""
    now = routes[window:]
    seen = np.zeros(now.shape, bool)
    for back in range(1, window + 1):
        before = routes[window - back : len(routes) - back]
        seen |= (now[..., :, None] == before[..., None, :]).any(-1)
    return seen.mean(axis=(0, 2))


def counts(routes: np.ndarray, num_experts: int) -> np.ndarray:
    """How often each expert was chosen, (layers, experts)."""
    return np.stack(
        [np.bincount(of.ravel(), minlength=num_experts) for of in routes.swapaxes(0, 1)]
    )


def busier_half(of: np.ndarray) -> np.ndarray:
    """For each layer the share of choices that the busier half of the experts has."""
    falling = np.sort(of, axis=1)[:, ::-1]
    return falling[:, : of.shape[1] // 2].sum(1) / falling.sum(1)


def lru_hits(routes: np.ndarray, num_experts: int, share: float) -> float:
    """The share of choices found in caches of the experts used last, one for each layer.

    What the first tokens miss counts, too.
    """
    size, hits = max(1, round(share * num_experts)), 0
    for layer in routes.swapaxes(0, 1):
        cache = OrderedDict[int, None]()
        for chosen in layer.tolist():
            for expert in chosen:
                hits += expert in cache
                cache[expert] = None
                cache.move_to_end(expert)
            while len(cache) > max(size, len(chosen)):
                cache.popitem(last=False)
    return hits / routes.size


def fixed_hits(learned: np.ndarray, routes: np.ndarray, num_experts: int, share: float) -> float:
    """The share of choices among the experts that `learned` routes chose most, in each layer."""
    size = max(1, round(share * num_experts))
    best = np.argsort(-counts(learned, num_experts), axis=1, kind="stable")[:, :size]
    return float((routes[..., :, None] == best[:, None, :]).any(-1).mean())
