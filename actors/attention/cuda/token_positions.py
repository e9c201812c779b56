"""Where the tokens of a step stand, on the device: positions, slots, and the slots' page tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from hotcold.actors.attention.cuda.device import Device
from hotcold.actors.attention.cuda.step import StepWork
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS
from hotcold.numba_kernels.serve.mailbox import SharedBuffers


class TokenPositions:
    """Copies places to the device; those of a step once: they are the same for all layers."""

    def __init__(self, device: Device, work: StepWork, max_tokens: int) -> None:
        """`max_tokens` of a prompt."""
        self._device, self._work = device, work
        self._placed = device.pinned(work.place.shape, np.int32)
        self._prompt = device.pinned((2, max_tokens), np.int32)

    def forget(self) -> None:
        """What comes next is of another arena."""
        self._placed[:] = -1

    def put(self, buffers: SharedBuffers, num_tokens: int) -> None:
        """Put a step's places on the stream; tokens that fill it up stand where its last one does.

        What was copied before has been waited for.
        """
        tokens = KERNEL_TOKENS
        place = np.empty_like(self._placed)
        for first, values in ((0, buffers.positions), (tokens, buffers.slots)):
            place[first : first + num_tokens] = values[:num_tokens]
            place[first + num_tokens : first + tokens] = values[num_tokens - 1]
        place[2 * tokens :] = buffers.page_tables.reshape(-1)
        if not np.array_equal(place, self._placed):
            self._placed[:] = place
            self._device.copy_in(self._work.place, self._placed)

    def put_prompt(self, buffers: SharedBuffers, num_tokens: int) -> tuple[Any, Any]:
        """Put a prompt's places on the stream, page tables too; returns positions, slots (T,).

        Errors:  ValueError for tokens that are not consecutive ones of one sequence
        """
        positions, slots = buffers.positions[:num_tokens], buffers.slots[:num_tokens]
        if np.ptp(slots) or (np.diff(positions) != 1).any():
            raise ValueError("prefill takes consecutive positions of one sequence")
        self.put(buffers, 1)
        self._prompt[0, :num_tokens], self._prompt[1, :num_tokens] = positions, slots
        on_device = self._device.empty(self._prompt.shape, np.int32)
        self._device.copy_in(on_device, self._prompt)
        return on_device[0, :num_tokens], on_device[1, :num_tokens]
