"""CuPy's device as far as it needs no GPU: copies, pinned memory, what is used, kernels on disk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hotcold.cuda_kernels.cupy_device import CupyDevice, _free_at_first


def stand_in_cupy_device(**parts: Any) -> CupyDevice:
    """The device without CuPy, over what a test gives it."""
    device = object.__new__(CupyDevice)
    vars(device).update(parts)
    return device


def test_rows_are_copied_to_longer_ones() -> None:
    """CUDA's copy of two dimensions: bytes of the host's rows, a pitch on either side."""
    copies: list[tuple[Any, ...]] = []
    device = stand_in_cupy_device(
        _runtime=SimpleNamespace(
            memcpyHostToDevice=1, memcpy2DAsync=lambda *parts: copies.append(parts)
        ),
        _stream=SimpleNamespace(ptr=7, synchronize=lambda: None),
    )
    whole = np.zeros((3, 224), np.uint8)

    class OnDevice:
        """The first columns of `whole`."""

        data = SimpleNamespace(ptr=whole.ctypes.data)
        strides, flags = whole.strides, whole[:, :210].flags

    rows = np.random.default_rng(1).integers(0, 256, (3, 210), dtype=np.uint8)
    device.upload(OnDevice(), rows)
    ((to, to_pitch, start, pitch, width, height, kind, stream),) = copies
    assert (to, start, kind, stream) == (whole.ctypes.data, rows.ctypes.data, 1, 7)
    for row in range(height):
        whole[row, :width] = rows.reshape(-1)[row * pitch :][:width]
    assert to_pitch == 224
    np.testing.assert_array_equal(whole[:, :210], rows)


def test_what_is_used_is_asked_beside_a_thread_that_captures_a_graph() -> None:
    """To wait for a stream that is being captured would spoil the graph."""
    device = stand_in_cupy_device(
        _runtime=SimpleNamespace(memGetInfo=lambda: (60, 100)), _free_at_first=90, _stream=None
    )
    assert device.used_bytes() == 30


@pytest.mark.parametrize(("told", "expected"), [(None, 9), (10, 10), (80, 9)])
def test_of_a_part_of_a_card_the_card_says_nothing(told: int | None, expected: int) -> None:
    assert _free_at_first(told, 9, 12) == expected
