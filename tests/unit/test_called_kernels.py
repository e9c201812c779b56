"""Kernels that kernels call are LLVM code for their callers, and whole programs for Python."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import types
from numba.core.types import Literal

from hotcold.numba_kernels import kernel_cache
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode import rows
from hotcold.numba_kernels.own_cache import read_checked
from tests.kernels.cpu_calls import gemv

PACKAGE = Path(kernel_cache.__file__).resolve().parent
DOORBELLS = ("doorbell.", "mailbox.")  # whose numbers have 32 bits between processes


@njit
def half(x):
    if x < 0:
        raise ValueError("less than nothing", x)
    return x / 2


@njit
def quarter(x):
    return half(half(x))


def test_python_may_call_what_kernels_called_before() -> None:
    for number in (8.0, 8):
        assert quarter(number) == 2.0
        assert half(number) == 4.0
        assert quarter(number) == 2.0


@pytest.mark.parametrize("function", [quarter, half])
def test_errors_of_called_kernels_are_raised(function) -> None:
    with pytest.raises(ValueError, match="less than nothing"):
        function(-1.0)


def called_with(folder: Path) -> dict[str, set[tuple[types.Type, ...]]]:
    """Each kernel of a cache that kernels call, and the types with which they do."""
    found: dict[str, set[tuple[types.Type, ...]]] = {}
    for file in folder.glob("*.nbc"):
        (_, kind, _), _, _, signature, *_ = pickle.loads(read_checked(file))
        if kind == "called functions":
            found.setdefault(file.name.partition("-")[0], set()).add(signature.args)
    return found


def without_width(argument: types.Type) -> types.Type:
    """All whole numbers as one type, also those that are written in a call."""
    plain = types.unliteral(argument)
    return types.int64 if isinstance(plain, types.Integer) else plain


@pytest.mark.thorough
def test_no_kernel_is_compiled_again_for_another_kind_of_number() -> None:
    """Of all that this cache has from other tests, and of rows' products."""
    gemv(np.ones((8, 96), np.float32), np.ones((3, 96), np.float32))
    assert "rows.rows_kernel" in called_with(kernel_cache.kernel_folder(Path(rows.__file__)))
    for folder in map(kernel_cache.kernel_folder, PACKAGE.rglob("*.py")):
        for name, found in called_with(folder).items():
            written = [types for types in found if any(isinstance(t, Literal) for t in types)]
            assert not written, name
            kinds = {tuple(map(without_width, types)) for types in found}
            assert len(kinds) == len(found) or name.startswith(DOORBELLS), (name, found)


OF_OTHERS = """
import numpy as np
from numba import njit, vectorize
import hotcold.numba_kernels.compiler

@njit(cache=True)
def twice(x):
    return x + x

assert twice(2.0) == 4.0

@vectorize
def twice_and_one(x):
    return twice(x) + 1

assert twice_and_one(np.arange(3.0)).tolist() == [1, 3, 5]
"""


def test_cached_functions_of_others_can_be_linked(tmp_path: Path) -> None:
    """Also by what Numba's own ways compile, in a process that has read them from disk."""
    (tmp_path / "others.py").write_text(OF_OTHERS)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path)}
    for _ in range(2):
        command = [sys.executable, str(tmp_path / "others.py")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
