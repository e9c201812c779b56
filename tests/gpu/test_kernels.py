"""The kernels' suite on a real GPU, and what only a GPU can show: graphs and great sizes.

`tests/kernels/test_ffn.py` and others run on the first GPU by themselves.

python -m pytest -n 0 tests/gpu/test_kernels.py
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hotcold.cuda_kernels.device import list_gpus
from hotcold.cuda_kernels.matrix import DeviceMatrix
from hotcold.numba_kernels.decode.activations import activation, not_zero
from tests.kernels import (
    backends,
    test_device_kernels,
    test_device_predictors,
    test_rows,
)
from tests.kernels.arrays import random_bits, random_floats
from tests.kernels.device_calls import DeviceCalls
from tests.kernels.quantized_rows import SUMMED, random_rows
from tests.kernels.reference import narrowed, widened

_GPUS, _REASON = list_gpus()
pytestmark = pytest.mark.gpu
if not _GPUS:
    pytest.skip(f"no GPU: {_REASON}", allow_module_level=True)


_SUITE = (
    test_device_kernels,
    test_device_predictors,
    test_rows,
)


def _tests_of(module: Any) -> dict[str, Callable[..., None]]:
    """The module's tests of what devices compute."""
    own = module.__name__.removeprefix("tests.kernels.")
    return {
        f"{own}_{name.removeprefix('test_')}": function
        for name, function in vars(module).items()
        if name.startswith("test_")
        and inspect.signature(function).parameters.keys() & {"products", "device"}
    }


for _module in _SUITE:
    globals().update(_tests_of(_module))


@pytest.fixture
def device() -> DeviceCalls:
    return backends.cuda_calls()


@pytest.fixture
def products(device: DeviceCalls) -> Callable[..., np.ndarray]:
    return device.gemv


def test_a_matrix_of_more_than_2_to_31_numbers(device: DeviceCalls) -> None:
    """4.4 GB: the last rows lie beyond every 32-bit offset."""
    import cupy

    if cupy.cuda.runtime.memGetInfo()[0] < 5 << 30:
        pytest.skip("less than 5 GiB of the GPU are free")
    height, width = 270_000, 8192
    rows, x = random_bits(1, np.uint16, 16, width), random_floats(2, 2, width)
    data = cupy.zeros((height, width), np.uint16)
    data[-16:] = cupy.asarray(rows)
    matrix, out = DeviceMatrix(data, "f16", width), cupy.empty((2, height), np.float32)
    device.kernels.gemv(matrix, None, cupy.asarray(x), out)
    assert not out[:, :-16].any()
    np.testing.assert_allclose(out[:, -16:].get(), x @ widened(rows).T, atol=2e-3)
    halves = cupy.empty((16, width), np.uint16)
    device.kernels.widen(matrix, height - 16, height, halves)
    assert (halves.get() == rows).all()


@pytest.mark.parametrize("kind", ["f16", *SUMMED])
def test_a_graph_gives_the_same_bits(device: DeviceCalls, kind: str) -> None:
    """The hot FFN of a llama-7b layer, captured, then run over other inputs."""
    import cupy

    height, width = 11008, 4096
    if kind == "f16":
        values = [narrowed(random_floats(s, height, width) / 64, np.uint16) for s in (1, 2, 3)]
    else:
        values = [
            np.concatenate([random_rows(s, kind, 64, width).rows] * (height // 64))
            for s in (1, 2, 3)
        ]
    neurons = device.neurons(*values)
    x, out = cupy.asarray(random_floats(4, 4, width)), cupy.empty((4, width), np.float32)
    scratch = cupy.empty(device.kernels.ffn_scratch_items(4, height, width), np.float32)
    relu, fires, count = activation("relu"), not_zero("relu"), cupy.empty(2, np.int32)

    def run() -> None:
        device.kernels.hot_ffn(neurons, x, relu, fires, scratch, out, count)

    run()
    expected = [out.get()]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        run()
        graph = stream.end_capture()
    for seed in (4, 5):
        x[...] = cupy.asarray(random_floats(seed, 4, width))
        cupy.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        found: Any = out.get()
        if seed == 5:
            run()
            expected.append(out.get())
        assert (found == expected[-1]).all()
    assert 0 < int(count[0]) < height and not (expected[0] == expected[1]).all()
