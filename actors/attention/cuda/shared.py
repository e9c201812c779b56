"""Layers that the GPU shares with CPU services: one graph, in which they meet by flags.

Kernels write a layer's FFN input and its flag to the arena, and wait there for the CPU services'
flags before they add up. A request that others cannot end is stopped (`mailbox.stop_layers`): then
the graph runs through, and the service replies that it gave up.
"""

from __future__ import annotations

import numpy as np

from hotcold.actors.attention.cuda.device import Device
from hotcold.actors.attention.cuda.link import Link
from hotcold.cuda_kernels.neurons import SharedMemory
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL
from hotcold.numba_kernels.loops.mailbox import (
    CELLS_A_SERVICE,
    INPUT,
    LENGTH,
    NUM_ORDER,
    OUTPUT,
    STOPPED,
    SharedBuffers,
    cell_index,
    is_stopped,
    stop_layers,
)

# A CPU service's layer takes milliseconds. What is paused longer is awaited by the driver.
LIMIT_NS = 1_000_000_000
_TOKENS_AND_NUMBER = 2


class SharedLayers:
    """The flags and arrays of one service's shared layers."""

    def __init__(self, device: Device) -> None:
        """Errors: DeviceMemoryError."""
        self._device = device
        self._told = device.empty((_TOKENS_AND_NUMBER + NUM_ORDER,), np.int32)
        self._telling = device.pinned(self._told.shape, np.int32)
        self.memory: SharedMemory | None = None

    def attach(self, buffers: SharedBuffers, service: int, link: Link) -> None:
        """Use another arena, unless the device cannot: `memory` is None then."""
        self._buffers, self._service, self.memory = buffers, service, None
        if link.refusal:
            return
        mapped, given = self._device.mapped, cell_index(service, INPUT) * INTS_A_CELL
        output = cell_index(0, OUTPUT) * INTS_A_CELL
        self.memory = SharedMemory(
            told=self._told,
            cells=mapped(buffers.cells),
            cell_words=CELLS_A_SERVICE * INTS_A_CELL,
            given=given,
            stopped=given + STOPPED,
            output=output,
            length=output + LENGTH,
            ffn_input=mapped(buffers.ffn_input),
            block_weights=mapped(buffers.block_weights),
            partials=mapped(buffers.partials),
            more_partials=mapped(buffers.more_partials),
            active_ids=mapped(buffers.active_ids),
            active_masks=mapped(buffers.active_masks),
            limit_ns=LIMIT_NS,
        )

    def tell(self, number: int, num_tokens: int) -> None:
        """Put the request's number, tokens and order of sums on the stream.

        The copy before must have been waited for.
        """
        telling = self._telling
        telling[0], telling[1], telling[2:] = number, num_tokens, self._buffers.sum_order
        self._device.copy_in(self._told, telling)

    def stop(self, number: int) -> None:
        """End the others' parts of a request."""
        stop_layers(self._buffers.cells, np.array([self._service]), np.int32(number))

    def is_stopped(self, number: int) -> bool:
        """Whether somebody has."""
        return bool(is_stopped(self._buffers.cells, self._service, np.int32(number)))
