"""The kernel packages that the suite runs over, each as a namespace of the wrappers by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kernels import backends
from tests.kernels.device_calls import DeviceCalls


@pytest.fixture(scope="session")
def emulated_library() -> Path:
    """CUDA's kernels compiled for this CPU, once for all processes and runs."""
    try:
        return backends.emulated_library()
    except FileNotFoundError as problem:
        pytest.skip(str(problem))


@pytest.fixture(params=["numba", *backends.DEVICES])
def backend(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The wrappers of one kernel package."""
    if request.param == "numba":
        return backends.numba_backend()
    return backends.device_backend(backends.calls(request.param, request))


@pytest.fixture(params=backends.DEVICES)
def device(request: pytest.FixtureRequest) -> DeviceCalls:
    """A device's kernels, and copies to it and back."""
    return backends.calls(request.param, request)
