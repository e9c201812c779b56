"""Why a GPU cannot be used, in one line."""

from __future__ import annotations

import builtins
import sys
from types import ModuleType, SimpleNamespace

import pytest

from hotcold.cuda_kernels import device
from hotcold.cuda_kernels.device import first_gpu


def fake_cupy(monkeypatch: pytest.MonkeyPatch, **runtime: object) -> None:
    """A CuPy of which only the runtime's functions are there."""
    cuda = ModuleType("cupy.cuda")
    cuda.runtime = SimpleNamespace(**runtime)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)


def test_the_gpu_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {"name": b"a GPU", "major": 8, "minor": 6, "totalGlobalMem": 8 << 30}
    fake_cupy(monkeypatch, getDeviceCount=lambda: 1, getDeviceProperties=lambda number: properties)
    assert first_gpu() == ("a GPU", 8 << 30)
    properties.update(major=7, minor=0)
    assert first_gpu() == "a GPU has compute capability 7.0, and kernels need 7.5"


def test_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def old_driver() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver: driver version is insufficient\nmore")

    fake_cupy(monkeypatch, getDeviceCount=old_driver)
    assert first_gpu() == (
        "CUDA finds no usable GPU: cudaErrorInsufficientDriver: driver version is insufficient"
    )
    plain = builtins.__import__

    def without_cupy(name: str, *arguments: object, **options: object) -> object:
        if name.startswith("cupy"):
            raise ModuleNotFoundError(name)
        return plain(name, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_cupy)
    for there, says in ((True, "CuPy is not: pip install"), (False, "no NVIDIA driver")):
        monkeypatch.setattr(
            device, "_DRIVER_FILE", SimpleNamespace(exists=lambda there=there: there)
        )
        found = first_gpu()
        assert isinstance(found, str) and says in found
