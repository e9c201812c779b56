"""AMX is used where a child process has tried it and the operating system permits it."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from hotcold.actors.cpu import matmul
from hotcold.numba_kernels import amx
from hotcold.numba_kernels.ir import target
from hotcold.numba_kernels.own_cache import read_checked
from hotcold.numba_kernels.prefill.shared_rows import AMX

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="an x86 CPU")
ROOT = Path(__file__).resolve().parents[2]
DIES = bytes.fromhex("0f0b")  # ud2


@pytest.fixture(autouse=True)
def asked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A home of its own, in which nothing was tried; what this process has found is found again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(amx, "_ask", lambda: True)
    amx.may_use_amx.cache_clear()
    yield
    amx.may_use_amx.cache_clear()


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of children that try it."""
    found: list[list[str]] = []
    run = subprocess.run

    def noted(command: list[str], **options: object) -> object:
        found.append(command)
        return run(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", noted)
    return found


def test_what_a_child_dies_of_is_not_used(
    children: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it tried again, by this process or another."""
    source = Path(amx.__file__).read_text()
    start = source.index("_CODE = bytes.fromhex(")
    end = source.index(")", start) + 1
    dies = tmp_path / "dies.py"
    dies.write_text(f"{source[:start]}_CODE = {DIES!r}{source[end:]}")
    monkeypatch.setattr(amx, "__file__", str(dies))
    for _ in range(2):
        assert not amx.may_use_amx()
        amx.may_use_amx.cache_clear()
    assert len(children) == 1
    (file,) = (tmp_path / "hotcold/cpu").iterdir()
    assert read_checked(file) == b"fails"
    file.write_bytes(b"")  # as a disk may leave it when the power fails
    assert not amx.may_use_amx()
    assert len(children) == 2 and read_checked(file) == b"fails"


@pytest.mark.parametrize("status", [1, -signal.SIGKILL])
def test_a_child_that_ends_of_something_else_is_tried_again(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said nothing of AMX: it was killed for want of memory, or Python did not start."""
    ended = mock.Mock(return_value=subprocess.CompletedProcess([], status))
    monkeypatch.setattr(subprocess, "run", ended)
    for _ in range(2):
        assert not amx.may_use_amx()
        amx.may_use_amx.cache_clear()
    assert ended.call_count == 2 and not list((tmp_path / "hotcold/cpu").iterdir())


def test_without_permission_nothing_is_tried(
    children: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amx, "_ask", lambda: False)
    assert not amx.may_use_amx() and not children


def test_it_can_be_forbidden() -> None:
    """As other features of the CPU, by NUMBA_CPU_FEATURES."""
    codegen = target.cpu_target.target_context.codegen()
    allowed = [name for name in codegen._tm_features.split(",") if "amx" not in name]
    code = "from hotcold.actors.cpu.matmul import *; import numpy as np\n"
    code += "print([kind.__name__ for kind in matmul_kinds(np.dtype('u2'), matmul_features())])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"NUMBA_CPU_FEATURES": ",".join(allowed)},
        capture_output=True,
        text=True,
        check=True,
    )
    features = matmul.matmul_features() - {"amx-bf16"}
    kinds = [kind.__name__ for kind in matmul.matmul_kinds(np.dtype(np.uint16), features)]
    assert done.stdout.strip() == str(kinds) and AMX.__name__ not in kinds
