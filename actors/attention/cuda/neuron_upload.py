"""A GPU's part of `Engine._upload_ffn`: cold neurons uploaded for a long prompt.

The neurons of one round are copied while those of the round before are multiplied.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hotcold.actors.attention.cuda.device import Device
from hotcold.actors.attention.cuda.link import Link
from hotcold.actors.attention.cuda.model import CudaModel, format_of
from hotcold.actors.attention.cuda.prompt import PromptWork
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.neuron_bundles import BundleLayout, read_count
from hotcold.cuda_kernels.matrix import DeviceMatrix
from hotcold.cuda_kernels.neurons import DeviceNeurons
from hotcold.numba_kernels.formats import row_width


class NeuronUpload:
    """Adds up one layer's FFN on the device, round by round."""

    def __init__(
        self, device: Device, model: CudaModel, prompts: PromptWork, layout: ArenaLayout
    ) -> None:
        """Allocate two rounds of `layout`. Errors: DeviceMemoryError."""
        self._device, self._model, self._prompts = device, model, prompts
        self._buffers = device.empty((2, _round_bytes(layout)), np.uint8)
        self._used: list[Any] = [None, None]  # events after which a buffer may be overwritten
        self._next = 0  # round
        self._x: Any = None
        self._out: Any = None

    def attach(self, layout: ArenaLayout, arena: np.ndarray, link: Link) -> None:
        """Read neurons from this arena."""
        ffn = self._model.ffn_like
        has_up = ffn.up.dtype == ffn.gate.dtype and self._model.config.has_gate
        biased, size = self._model.config.ffn_bias, layout.bundle_bytes
        self._bundle = BundleLayout.of(ffn.gate, ffn.up, ffn.down, biased, size, has_up)
        self._places, self._link = layout.bundles(arena), link
        if self._buffers.shape[1] < _round_bytes(layout):  # other services: a few pages more
            self._buffers = self._device.empty((2, _round_bytes(layout)), np.uint8)
        self._next = 0

    @property
    def result(self) -> Any:
        """The layer's output (T, d) on the device, complete after the last round."""
        return self._out

    def begin(self, layer: int, x: Any) -> None:
        """Round 0, with x (T, d) on the device: multiply the hot neurons, which are there."""
        part, bias = self._model.ffn[layer], self._model.down_bias[layer]
        with self._device.stream():
            self._x, self._out = x, self._device.empty(x.shape, np.float32)
            if part is None:
                self._out[...] = 0
            else:
                self._prompts.hot(part, x, self._out, add=False)
            if bias.size:
                self._out += bias[0]
        self._next = 1

    def is_done(self, number: int) -> bool:
        """Whether a round has been added. Errors: ValueError for a later round than the next."""
        if number > self._next:
            raise ValueError(f"round {number} of neurons came before round {self._next}")
        return number < self._next

    def add(self, number: int) -> None:
        """Add what services wrote in the round before; returns when it has been copied."""
        device, side = self._device, (number - 1) % 2
        if self._used[side] is not None:
            device.hold_copies(self._used[side])
        arrived: list[tuple[Any, int]] = []
        size = self._bundle_bytes
        for service, places in enumerate(self._places):
            num_rows = read_count(places[side])
            if num_rows:
                first = len(arrived) * size
                target = self._buffers[side, first : first + size]
                source = places[side, : self._bundle.end(num_rows)]
                name = f"bundle {service} {side}"
                device.copy_ahead(target[: source.size], self._link.readable(name, source))
                arrived.append((target, num_rows))
        device.follow_copies()
        copied = device.record_copies()
        with device.stream():
            for place, num_rows in arrived:
                self._prompts.hot(self._part(place, num_rows), self._x, self._out, add=True)
        self._used[side] = device.record(spin=False)
        device.wait(copied)
        self._next = number + 1

    @property
    def _bundle_bytes(self) -> int:
        return int(self._places.shape[2])

    def _part(self, place: Any, num_rows: int) -> DeviceNeurons:
        """The neurons of a bundle on the device."""
        ffn = self._model.ffn_like

        def matrix(index: int, like: np.ndarray) -> DeviceMatrix | None:
            rows = self._bundle.rows(place, index, num_rows)
            width = row_width(like.dtype, like.shape[1])
            return None if rows is None else DeviceMatrix(rows, format_of(like.dtype), width)

        def bias(index: int) -> Any:
            rows = self._bundle.rows(place, index, num_rows)
            return place[:0].view(np.float32) if rows is None else rows.reshape(-1)

        gate, down = matrix(0, ffn.gate), matrix(2, ffn.down)
        assert gate is not None and down is not None
        no_norms = place[:0].view(np.float32)  # without thresholds
        one_block = place[:0].view(np.int32)
        return DeviceNeurons(gate, bias(3), matrix(1, ffn.up), bias(4), down, no_norms, one_block)


def _round_bytes(layout: ArenaLayout) -> int:
    """Of the bundles of all other services."""
    return (layout.num_services - 1) * layout.bundle_bytes
