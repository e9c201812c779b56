"""What a host with a GPU leaves behind, in one report; why a GPU cannot be used, in one line."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from hotcold.cuda_kernels import device
from hotcold.cuda_kernels.device import first_gpu
from tests.benchmark_programs import output_of, run_benchmark

XML = """<testsuites><testsuite>
<testcase classname="tests.gpu" name="good"/>
<testcase classname="tests.gpu" name="bad"><failure>no</failure></testcase>
<testcase classname="tests.gpu" name="none"><skipped/></testcase>
</testsuite></testsuites>"""


def test_the_report_says_what_ran_and_what_failed(tmp_path: Path) -> None:
    (tmp_path / "device.json").write_text('[{"name": "a GPU"}]')
    (tmp_path / "kernels.xml").write_text(XML)
    (tmp_path / "kernels.log").write_text("\n".join(map(str, range(20))))
    for name, status in (("kernels", 1), ("hybrid", 124), ("falcon", 0)):
        (tmp_path / f"{name}.status").write_text(f"{status}\n")
    for name in ("kernels", "falcon"):
        (tmp_path / f"{name}.done").touch()
    (tmp_path / "falcon.json").write_text('{"runs": {"hotcold 8 GiB": {"tokens_per_s": 30.0}}}')
    report = json.loads(output_of(run_benchmark("gpu_report", tmp_path)))
    assert report["device"] == [{"name": "a GPU"}]
    stages = report["stages"]
    assert stages["kernels"]["tests"] == {
        "passed": 1,
        "skipped": 1,
        "failed": ["tests.gpu::bad"],
    }
    assert stages["kernels"]["state"] == "exit status 1"
    assert stages["kernels"]["said"] == ["15", "16", "17", "18", "19"]
    assert stages["hybrid"]["state"] == "out of time" and stages["llama"]["state"] == "not run"
    assert stages["falcon"]["figures"]["runs"]["hotcold 8 GiB"]["tokens_per_s"] == 30.0


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
