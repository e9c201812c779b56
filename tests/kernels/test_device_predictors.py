"""A device's predictors, and lists of neurons by them: those of the CPU, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hotcold.cuda_kernels.neurons import (
    DeviceLowRank,
    DeviceSigns,
    PredictorScratch,
    SharedMemory,
)
from hotcold.numba_kernels.decode.predict import pack_weights, select_kernel
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.sign import SignLayer
from tests.kernels.arrays import random_floats
from tests.kernels.device_calls import DeviceCalls
from tests.predictor_layers import scores_of

_SERVICES, _CELL_WORDS, _LENGTH = 4, 32, 5


def shared_memory(put: Callable[[np.ndarray], Any], told: list[int], most: int) -> SharedMemory:
    """What lists are written to, and nothing else."""
    nothing = put(np.empty(0, np.float32))
    return SharedMemory(
        told=put(np.array(told, np.int32)),
        cells=put(np.zeros(_SERVICES * _CELL_WORDS, np.int32)),
        cell_words=_CELL_WORDS,
        given=0,
        stopped=0,
        output=0,
        length=_LENGTH,
        ffn_input=nothing,
        block_weights=nothing,
        partials=nothing,
        more_partials=nothing,
        active_ids=put(np.full((_SERVICES, most), -1, np.int32)),
        active_masks=put(np.zeros((_SERVICES, most), np.uint32)),
        limit_ns=0,
    )


def random_layer(kind: str, count: int, width: int) -> SignLayer | LowRankLayer:
    """A predictor of `count` neurons, of 1 or 2 bit planes, or of low rank."""
    thresholds = random_floats(5, count)
    if kind in ("1", "2"):
        bits = pack_weights(random_floats(1, count, width), int(kind))
        scale = np.abs(random_floats(3, width)) + 0.1
        return SignLayer(bits, thresholds, random_floats(2, width), scale)
    size = 5 + width // 3
    matrices = random_floats(1, size, width), random_floats(2, size, count)
    if kind == "i8":
        down, up = (np.clip(40 * one, -127, 127).astype(np.int8) for one in matrices)
    else:
        down, up = (one.astype(np.float16).view(np.uint16) for one in matrices)
    return LowRankLayer(down, random_floats(3, size), up, thresholds)


@pytest.mark.parametrize("kind", ["1", "2", "f16", "i8"])
@pytest.mark.parametrize(("width", "num_tokens"), [(64, 1), (96, 3), (301, 5), (1024, 32)])
def test_lists(device: DeviceCalls, kind: str, width: int, num_tokens: int) -> None:
    """Of three services, one without neurons; a token is not finite, one is the center itself."""
    put, bounds = device.to_device, np.array([0, 300, 300, 611], np.int32)
    count, services, own = int(bounds[-1]), [1, 3, 2], 70
    bounds += own
    count += own
    layer, x = random_layer(kind, count, width), random_floats(4, num_tokens, width)
    if num_tokens > 3:
        x[1, 7] = np.nan
        x[2] = layer.center if isinstance(layer, SignLayer) else 0
    scores = scores_of(layer, x)
    padded = 1 << (num_tokens - 1).bit_length()
    shared = shared_memory(put, [9, num_tokens, 3, *services], count)
    words = -(-width // 64) * 2
    scratch = PredictorScratch(
        planes=put(np.zeros(padded * 3 * words, np.uint32)),
        units=put(np.zeros(padded, np.float32)),
        masks=put(np.zeros(count, np.uint32)),
        hidden=put(np.zeros(padded * (5 + width), np.float32)),
    )
    predictor: DeviceSigns | DeviceLowRank
    if isinstance(layer, SignLayer):
        arrays = layer.bits.view(np.uint32), layer.thresholds, layer.center, layer.scale, bounds
        predictor = DeviceSigns(*map(put, arrays))
    else:
        arrays = layer.down, layer.scales, layer.up, layer.thresholds, bounds
        predictor = DeviceLowRank(*map(put, arrays))
    whole = np.concatenate([x, np.repeat(x[-1:], padded - num_tokens, axis=0)])
    num_listed = put(np.zeros(1, np.int32))
    device.kernels.predict(predictor, put(whole), own, scratch, num_listed)
    masks = (~(scores_of(layer, whole) <= 0)).T << np.arange(padded)
    np.testing.assert_array_equal(device.to_host(scratch.masks), masks.sum(axis=1))
    assert device.to_host(num_listed)[0] == np.count_nonzero(masks[:own].any(axis=1))
    device.kernels.list_neurons(predictor, scratch, shared)
    for service, begin, end in zip(services, bounds[:-1], bounds[1:], strict=True):
        ids, masks = np.empty(end - begin, np.int32), np.empty(end - begin, np.uint32)
        size = select_kernel(scores, begin, end, ids, masks)
        assert device.to_host(shared.cells)[service * _CELL_WORDS + _LENGTH] == size
        np.testing.assert_array_equal(device.to_host(shared.active_ids)[service, :size], ids[:size])
        if num_tokens > 1:
            found = device.to_host(shared.active_masks)[service, :size]
            np.testing.assert_array_equal(found, masks[:size])
    assert 0 < np.count_nonzero(~(scores <= 0)) < scores.size
