"""How unevenly neurons fire: the share of them that does most of the work."""

from __future__ import annotations

import numpy as np

ACTIVATION_SHARE = 0.8  # as in PowerInfer's figure 5


def hot_share(counts: np.ndarray) -> float:
    """The least share of the neurons that makes ACTIVATION_SHARE of the activations; 0 of none.

    Shapes:  counts (N,), how often each neuron fires, or its rate
    """
    cumulative = np.sort(counts)[::-1].cumsum()
    if cumulative[-1] == 0:
        return 0.0
    needed = int((cumulative < ACTIVATION_SHARE * cumulative[-1]).sum()) + 1
    return needed / counts.size
