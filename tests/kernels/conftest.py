"""The kernel packages that the suite runs over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.kernels import backends
from tests.kernels.cpu_calls import gemv
from tests.kernels.device_calls import DeviceCalls


@pytest.fixture(scope="session")
def emulated_library() -> Path:
    """CUDA's kernels compiled for this CPU, once for all processes and runs."""
    try:
        return backends.emulated_library()
    except FileNotFoundError as problem:
        pytest.skip(str(problem))


@pytest.fixture(params=["numba", *backends.DEVICES])
def products(request: pytest.FixtureRequest) -> Callable[..., np.ndarray]:
    """Rows times vectors, and a bias, by one kernel package."""
    return gemv if request.param == "numba" else backends.calls(request.param, request).gemv


@pytest.fixture(params=backends.DEVICES)
def device(request: pytest.FixtureRequest) -> DeviceCalls:
    """A device's kernels, and copies to it and back."""
    return backends.calls(request.param, request)
