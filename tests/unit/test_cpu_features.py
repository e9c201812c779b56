"""CPUs that kernels cannot be compiled for, and what doctor says of those that they can."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hotcold.actors.setup import choose
from hotcold.actors.setup.choose import choose_system
from hotcold.actors.setup.preflight import SystemOptions, read_model
from hotcold.jobs.cli import main
from hotcold.jobs.support.doctor_checks import Finding, check_machine, kernel_instructions
from hotcold.model.errors import UsageError
from hotcold.numba_kernels.ir import target
from hotcold.placement.machine.survey import survey
from hotcold.placement.machine.sysfs import read_cpu
from tests.tiny_models import make_tiny

FakeCpu = Callable[..., Path]


@pytest.fixture
def fake_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCpu:
    """fake_cpu(flags): a root with such a cpuinfo, for commands too, on a machine of x86-64."""

    def write(flags: str, architecture: str = "x86_64") -> Path:
        text = f"processor\t: 0\nmodel name\t: Xeon E5-2670\nflags\t\t: {flags}\n\n"
        (tmp_path / "proc").mkdir(exist_ok=True)
        (tmp_path / "proc/cpuinfo").write_text(text)
        monkeypatch.setattr(platform, "machine", lambda: architecture)
        monkeypatch.setattr(choose, "read_cpu", lambda root=None: read_cpu(tmp_path))
        return tmp_path

    return write


def test_old_cpus_are_refused_in_one_line(
    fake_cpu: FakeCpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_tiny("llama-relu", tmp_path / "model")
    config = read_model(path)
    root = fake_cpu("fpu avx f16c")
    found = processor(root)
    assert found.level == "problem" and "no avx2, fma: kernels cannot run" in found.text
    with pytest.raises(UsageError, match="no avx2, fma,"):
        choose_system(path, config, SystemOptions())
    capsys.readouterr()
    assert main(["generate", str(path), "--prompt-ids", "1"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("hotcold: error: this CPU has no avx2, fma, which")
    fake_cpu("avx2 fma f16c")
    choose_system(path, config, SystemOptions())
    fake_cpu("fp asimd", "aarch64")
    choose_system(path, config, SystemOptions())


def processor(fake_root: Path) -> Finding:
    machine = replace(survey(), cpu_features=read_cpu(fake_root).features)
    return next(found for found in check_machine(machine) if found.subject == "processor")


@pytest.mark.parametrize(
    ("features", "architecture", "level", "text"),
    [
        ({"avx512f", "avx512vnni", "avx2"}, "x86_64", "ok", "kernels use AVX-512 with VNNI"),
        ({"avx512f", "avx2"}, "x86_64", "ok", "kernels use AVX-512"),
        ({"avx2", "avxvnni"}, "x86_64", "note", "kernels use AVX2 with AVX-VNNI"),
        ({"avx2"}, "x86_64", "note", "kernels use AVX2"),
        ({"neon"}, "aarch64", "ok", "kernels use plain vectors (aarch64)"),
    ],
)
def test_doctor_names_the_kernels(
    features: set[str],
    architecture: str,
    level: str,
    text: str,
    fake_cpu: FakeCpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = fake_cpu("avx2 fma f16c", architecture)
    monkeypatch.setattr(target, "has_feature", features.__contains__)
    found = processor(root)
    assert (found.level, found.text) == (level, text)


def test_doctor_measures_nothing_where_that_would_end_it(
    fake_cpu: FakeCpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measure(**options: object) -> None:
        raise UsageError("measured")

    fake_cpu("fpu avx")
    monkeypatch.setattr(
        "hotcold.placement.machine.sysfs.read_cpu", lambda root=None: read_cpu(tmp_path)
    )
    monkeypatch.setattr("hotcold.placement.machine.this_machine.this_machine", measure)
    assert main(["doctor"]) == 0
    capsys.readouterr()
    fake_cpu("avx2 fma f16c")
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "hotcold: error: measured\n"


def test_this_cpu() -> None:
    known = {"AVX-512 with VNNI": "avx512_vnni", "AVX-512": "avx512f", "AVX2": "avx2"}
    known["AVX2 with AVX-VNNI"] = "avx_vnni"
    kernels = kernel_instructions()
    if platform.machine() == "x86_64":
        assert known[kernels] in read_cpu().features
    else:
        assert platform.machine() in kernels
