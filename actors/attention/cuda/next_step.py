"""The step behind the one that was asked for, begun before anybody asks: by the likeliest token.

Where a GPU has the whole model it then computes while the driver draws the token, hands it on and
asks for the next step. What was begun counts only where the same is asked for, to the last bit: the
token's row, its position, its pages. Else it was in vain: what it wrote to the KV cache stands
behind the sequence's end, within a page of its own, and the right step writes there again.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from hotcold.actors.attention.cuda.device import Device
from hotcold.model.weights.embedding import EmbeddingWeights
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS
from hotcold.numba_kernels.loops.mailbox import SharedBuffers

_FEWEST_WAITED, _MOST_WAITED = 8, 512  # steps after one in vain
_WORTH = 8  # steps that were of use make up for one in vain, which takes a step's time


class NextStep:
    """Of one token at a time."""

    def __init__(self, device: Device, embedding: EmbeddingWeights, width: int) -> None:
        """`embedding` is the driver's, whose rows are `width` long."""
        self._device, self._embedding = device, embedding
        self._hidden = device.pinned((1, width), np.float32)
        # Of which layers, what it found, and its sequence's pages.
        self._begun: tuple[Hashable, SharedBuffers, np.ndarray] | None = None
        self._waits, self._waited, self._num_of_use = 0, _FEWEST_WAITED, 0

    def forget(self) -> None:
        """Something else is asked for: wait, as arrays that copies read may change then."""
        if self._begun is not None:
            self._begun = None
            self._device.wait(self._device.record(spin=True))

    def takes(self, step: Hashable, buffers: SharedBuffers, num_tokens: int) -> bool:
        """Whether the step in the mailbox, of such layers, is the one that was begun."""
        if self._begun is None:
            return False
        of, begun, pages = self._begun
        asked = buffers.positions[:1], buffers.slots[:1], buffers.hidden[:1], _pages(buffers)
        own = begun.positions, begun.slots, begun.hidden, pages
        is_it = num_tokens == 1 and of == step and all(map(_has_same_bits, asked, own))
        if is_it:
            self._begun, self._num_of_use = None, self._num_of_use + 1
            return True
        self.forget()
        paid = self._num_of_use >= _WORTH
        self._waits = self._waited = _FEWEST_WAITED if paid else min(2 * self._waited, _MOST_WAITED)
        self._num_of_use = 0
        return False

    def begin(self, step: Hashable, buffers: SharedBuffers) -> SharedBuffers | None:
        """What the step behind a step of one token finds, if it is to be begun."""
        position = int(buffers.positions[0]) + 1
        if self._waits or position % PAGE_POSITIONS == 0:  # the next page may be another's
            self._waits = max(0, self._waits - 1)
            return None
        token = np.array([buffers.logits[0].argmax()])
        try:
            self._hidden[:] = self._embedding.lookup(token, np.array([position]))
        except ValueError:  # behind the last position
            return None
        following = buffers._replace(
            positions=np.array([position], np.int32),
            slots=buffers.slots[:1].copy(),
            hidden=self._hidden,
        )
        self._begun = step, following, _pages(buffers)
        return following


def _pages(buffers: SharedBuffers) -> np.ndarray:
    """A copy of the page tables of the first token's sequence."""
    found: np.ndarray = buffers.page_tables[:, buffers.slots[0]].copy()
    return found


def _has_same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether they are equal, NaN or not."""
    return a.tobytes() == b.tobytes()
