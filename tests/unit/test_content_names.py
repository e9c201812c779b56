"""Compiled code that processes share is named by what it is, whatever each has met before."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from numba import types

from hotcold.numba_kernels import content_names
from hotcold.numba_kernels.content_names import NotLastingError, digest_of
from hotcold.numba_kernels.decode.rows import block_products
from hotcold.numba_kernels.formats import MXFP4, Q4, Q8
from hotcold.numba_kernels.own_cache import read_checked

ROOT = Path(content_names.__file__).resolve().parents[1]


# Digests of what kernels answer for formats, few vectors' and a prompt's, in the order given.
FORMATS_IN_ORDER = """
import hashlib, sys
import numpy as np
from hotcold.numba_kernels.decode import rows
from hotcold.numba_kernels.prefill.shared_rows import QUANTIZED
from tests.kernels.arrays import random_floats
from tests.kernels.products import Products, linear
from tests.kernels.quantized_rows import random_rows
for kind in sys.argv[1:]:
    x, weights = random_floats(0, 40, 256), random_rows(1, kind, 24, 256).rows
    many = np.zeros((40, 24), np.float32)
    linear(Products(QUANTIZED, 1), x, weights, many)
    few = rows.gemv(weights, x[:3].copy())
    print(kind, *(hashlib.sha256(each.tobytes()).hexdigest() for each in (few, many)), flush=True)
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


def test_formats_met_in_another_order_are_told_apart(tmp_path: Path) -> None:
    """Also by code that a process links with what another one has kept."""
    shared, fresh = tmp_path / "shared", tmp_path / "fresh"
    answers(started(shared, ["q8"], seed=1))
    assert answers(started(shared, ["mxfp4", "q8"], seed=2)) == answers(
        started(fresh, ["q8", "mxfp4"], seed=3)
    )
    found, of_fresh = bodies(shared), bodies(fresh)
    assert found == of_fresh and all(len(each) == 1 for each in found.values())


TYPES = """
import sys
from numba import types, typeof
import numpy as np
from hotcold.numba_kernels.content_names import digest_of
from hotcold.numba_kernels.decode.rows import block_products, rows_kernel
from hotcold.numba_kernels.decode.vectors import QuantizedVectors
from hotcold.numba_kernels.formats import DTYPES, ROW_FORMATS
from hotcold.numba_kernels.layer_record import LAYER_NUMBERS
dtypes = [*ROW_FORMATS, LAYER_NUMBERS]
order = list(map(int, sys.argv[1:]))
for i in order:
    typeof(np.zeros(1, dtypes[i]))
kinds = [typeof(np.zeros((1, 1), each)) for each in dtypes]
vectors = [typeof(QuantizedVectors(*[np.zeros(1, each)] * 3)) for each in dtypes]
others = [typeof(block_products), typeof(rows_kernel), types.literal(2), types.Omitted(2.0)]
others += [types.Optional(kinds[0]), types.UniTuple(kinds[0], 3), types.none]
print(*map(digest_of, [*kinds, *vectors, *others]))
"""


def test_types_are_what_they_are_in_every_process() -> None:
    """Whatever they were numbered there."""
    found = []
    for order in ("012345678", "876543210"):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": order[0]}
        command = [sys.executable, "-c", TYPES, *order]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.append(done.stdout.split())
    assert found[0] == found[1] and len(set(found[0])) == len(found[0]) == 25


def closure(value: Any) -> Any:
    def inner() -> Any:
        return value

    inner.__module__, inner_globals = block_products.__module__, block_products.py_func.__globals__
    return FunctionType(inner.__code__, inner_globals, "inner", None, inner.__closure__)


@pytest.mark.parametrize("value", [1, "a", Q8, (Q4, 2.0), block_products, None])
def test_functions_are_told_apart_by_what_they_close_over(value: Any) -> None:
    assert digest_of(closure(value)) == digest_of(closure(value))
    assert digest_of(closure(value)) != digest_of(closure((value, MXFP4)))


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 0, closure(object()), types.DeferredType()],
    ids=["object", "another's function", "closure", "type with an address"],
)
def test_what_may_be_another_elsewhere_is_not_named(value: Any) -> None:
    with pytest.raises(NotLastingError):
        digest_of(value)
