"""Kernels as they are compiled for other CPUs than this one: older x86 here, ARM up to assembly.

They are kept beside this CPU's own, told apart as on a home folder that several machines share.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from llvmlite import binding
from safetensors.numpy import load_file

from tests.kernels.other_cpu import (
    KINDS,
    results,
)

ROOT = Path(__file__).parents[2]
HASWELL = (
    "+avx,+avx2,+bmi,+bmi2,+cx16,+f16c,+fma,+lzcnt,+movbe,+popcnt,"
    "+sse,+sse2,+sse3,+sse4.1,+sse4.2,+ssse3,+xsave"
)

pytestmark = pytest.mark.thorough


# That multiply in ways of their own with VNNI.
BYTES = ("q8", "q4", "q6", "mxfp4", "iq4_xs", "iq2", "nvfp4")
# Without AVX2 all formats' last chunks go one way.
OLDER = {
    "avx2": (HASWELL, ["avx2", "f16c", "fma"], KINDS),
    # The numbers of AVX-VNNI: the same instruction as AVX-512 encodes it.
    "vnni": (f"{HASWELL},+avx512vl,+avx512vnni", ["avx2", "avx512vnni", "f16c", "fma"], BYTES),
    "avxvnni": (f"{HASWELL},+avxvnni", ["avx2", "avxvnni", "f16c", "fma"], BYTES),
    "plain": ("", [], ("f16", "q8", "q4_1", "mxfp4", "iq2")),
}

# "avx2" is what a CPU without AVX-512 has of its own.
NEEDED = {"vnni": ("avx512vl", "avx512vnni"), "avx2": ("avx512f",), "avxvnni": ("avxvnni",)}


@dataclass(frozen=True)
class Run:
    """What `tests.kernels.other_cpu` has written and printed for a CPU."""

    folder: Path
    printed: list[str]


@pytest.fixture(scope="module")
def run_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """run_for(cpu, features, what, *kinds): once, in a process of its own, for all kinds."""

    @functools.cache
    def run(cpu: str, features: str, what: str, *kinds: str) -> Run:
        folder = tmp_path_factory.mktemp(what)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")}
        environment |= {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
        environment["PYTHONPATH"] = str(ROOT)
        done = subprocess.run(
            [sys.executable, "-m", "tests.kernels.other_cpu", what, str(folder), *kinds],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return Run(folder, done.stdout.split())

    return run


@pytest.mark.skipif(platform.machine() != "x86_64", reason="runs x86 code")
@pytest.mark.parametrize(
    ("cpu", "kind"), [(cpu, kind) for cpu, (_, _, kinds) in OLDER.items() for kind in kinds]
)
def test_older_x86(run_for: Callable[..., Run], cpu: str, kind: str) -> None:
    features, expected, kinds = OLDER[cpu]
    lacking = [f for f in NEEDED.get(cpu, ()) if not binding.get_host_cpu_features().get(f)]
    if lacking:
        pytest.skip(f"runs on a CPU with {lacking}")
    run = run_for("haswell", features, "results", *kinds)
    assert run.printed == expected
    # The order of additions is the same everywhere; this CPU's are compared with float64 elsewhere.
    found = load_file(run.folder / kind)
    own = results(kind)
    assert found.keys() == own.keys()
    for name in own:
        assert found[name].tobytes() == own[name].tobytes(), name


@pytest.mark.parametrize("kind", BYTES)
def test_avx_vnni_without_avx512(run_for: Callable[..., Run], kind: str) -> None:
    run = run_for("haswell", f"{HASWELL},+avxvnni", "x86_64", *BYTES)
    assembly = (run.folder / kind).read_text()
    assert re.search(r"\t\{vex\}\s+vpdpbusd\t.*%ymm", assembly)
    assert not re.search(r"vpmaddubsw|%zmm|%[xy]mm(1[6-9]|2\d|3[01])|%k[1-7]", assembly)


ARM_KINDS = ("f16", "q8", "q4_1", "mxfp4", "iq4_xs")


@pytest.mark.parametrize("kind", ARM_KINDS)
def test_arm(run_for: Callable[..., Run], kind: str) -> None:
    assembly = (run_for("generic", "+neon", "aarch64", *ARM_KINDS).folder / kind).read_text()
    instructions = {line.split()[0] for line in assembly.splitlines() if line.startswith("\t")}
    assert re.search(r"\tfmla\tv\d+\.4s, v\d+\.4s, v\d+\.4s", assembly)
    widens = re.search(r"\tfcvtl2?\tv\d+\.4s, v\d+\.[48]h", assembly)
    assert (widens is None) == (kind == "mxfp4")  # whose scales are powers of two
    assert "prfm" in instructions  # of floats, tiles of many tokens ask for the next block
    assert ("tbl" in instructions) == (kind in ("mxfp4", "iq4_xs"))  # tables are looked up
    if kind != "f16":
        assert re.search(r"\ts?ml[a-z0-9]*\tv\d+\.4s", assembly)
    called = re.findall(r"\tbl?\t([A-Za-z_]\S*)", assembly)
    # But for what Numba compiled and what every C library has: nothing that only x86 machines know.
    assert all(name.startswith("_ZN") and "numba" in name for name in called if name != "memset")
    assert "llvm.x86" not in assembly
