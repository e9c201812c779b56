"""Compiled code that processes share is named by what it is, whatever each has met before."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hotcold.numba_kernels import content_names
from hotcold.numba_kernels.own_cache import read_checked

ROOT = Path(content_names.__file__).resolve().parents[1]


# Digests of what a kernel answers for formats, in the order given.
FORMATS_IN_ORDER = """
import hashlib, sys
import numpy as np
from tests.kernels.arrays import random_floats
from tests.kernels.cpu_calls import gemv
from tests.kernels.quantized_rows import random_rows
for kind in sys.argv[1:]:
    found = gemv(random_rows(1, kind, 24, 256).rows, random_floats(0, 3, 256))
    print(kind, hashlib.sha256(found.tobytes()).hexdigest(), flush=True)
"""


def started(home: Path, kinds: Sequence[str], seed: int = 0) -> subprocess.Popen[str]:
    """A process that meets these formats in this order."""
    environment = os.environ | {
        "XDG_CACHE_HOME": str(home), "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(seed)
    }  # fmt: skip
    command = [sys.executable, "-c", FORMATS_IN_ORDER, *kinds]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def answers(process: subprocess.Popen[str]) -> dict[str, str]:
    """What it printed, by format."""
    printed, problems = process.communicate()
    assert process.returncode == 0, problems
    return dict(line.split(" ", 1) for line in printed.splitlines())


def bodies(home: Path) -> dict[str, set[bytes]]:
    """Code by the name of the function, of all that is kept for callers."""
    found: dict[str, set[bytes]] = {}
    for file in home.glob("hotcold/numba/*/*.nbc"):
        (_, kind, code), *_ = pickle.loads(read_checked(file))
        if kind == "called functions":
            for name, body in code.items():
                found.setdefault(name, set()).add(body)
    return found


@pytest.mark.thorough
def test_formats_met_in_another_order_are_told_apart(tmp_path: Path) -> None:
    """Also by code that a process links with what another one has kept."""
    shared, fresh = tmp_path / "shared", tmp_path / "fresh"
    answers(started(shared, ["q8"], seed=1))
    assert answers(started(shared, ["mxfp4", "q8"], seed=2)) == answers(
        started(fresh, ["q8", "mxfp4"], seed=3)
    )
    found, of_fresh = bodies(shared), bodies(fresh)
    assert found == of_fresh and all(len(each) == 1 for each in found.values())
