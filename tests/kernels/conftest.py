"""The kernel packages that the suite runs over, each as a namespace of the wrappers by name."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kernels import backends


@pytest.fixture(scope="session")
def emulated_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CUDA's kernels compiled for this CPU, once for all processes of a run."""
    base = tmp_path_factory.getbasetemp()
    try:
        return backends.emulated_library(
            base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
        )
    except FileNotFoundError as problem:
        pytest.skip(str(problem))


@pytest.fixture(params=backends.BACKENDS)
def backend(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The wrappers of one kernel package."""
    if request.param == "emulated":
        return backends.emulated_backend(request.getfixturevalue("emulated_library"))
    return backends.cuda_backend() if request.param == "cuda" else backends.numba_backend()


@pytest.fixture
def cpu_backend() -> SimpleNamespace:
    """Those of numba_kernels, for what no device computes."""
    return backends.numba_backend()
