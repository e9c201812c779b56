"""How soon experts are chosen again, for the cache that keeps those used most of late."""

from __future__ import annotations

import numpy as np

from hotcold.numba_kernels.storage.slots import EXPERT_DECAY

_SETTLED = round(4 / EXPERT_DECAY)  # tokens after which the means no longer show how they began


class StackDistances:
    """The histogram of stack distances of a mixture's experts, from one token to the next.

    All experts of all layers are ordered by their mean frequencies of use, as `expert_slots` has
    them. The distance of a choice is the number of experts that were used more at that time. As
    the order does not depend on how many are kept, a cache of S experts misses those choices
    whose distance is S or more.
    counts (E,) int64, of all layers: how many choices had each distance
    Source:  Mattson et al., "Evaluation techniques for storage hierarchies", 1970
    """

    def __init__(self, num_experts: int) -> None:
        """Of so many experts of all layers. Nothing is counted until means settle."""
        self.counts = np.zeros(num_experts, np.int64)
        self._means = np.zeros(self.counts.size)
        self._num_tokens = 0

    def add(self, chosen: np.ndarray, counts: bool = True) -> None:
        """Count tokens that follow those before: chosen (T, ...) bool, in the text's order.

        Without `counts` their use is noted, but how far they are is not counted. A layer finds the
        others' means half a token older than its own, on average.
        """
        means = self._means
        for token in chosen:
            means *= 1 - EXPERT_DECAY
            used = np.flatnonzero(token)
            if counts and self._num_tokens >= _SETTLED:
                ordered, own = np.sort(means), means[used] * np.sqrt(1 - EXPERT_DECAY)
                below = np.searchsorted(ordered, own, "left") + np.searchsorted(
                    ordered, own, "right"
                )  # twice; equal ones, as all that were never used, count half
                np.add.at(self.counts, means.size - 1 - below // 2, 1)
            means[used] += EXPERT_DECAY
            self._num_tokens += 1


def missed_share(counts: np.ndarray, num_slots: float) -> float:
    """The share of choices that miss a cache of so many experts; counts: of `StackDistances`."""
    return float(counts[int(num_slots) :].sum() / counts.sum())
