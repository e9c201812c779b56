"""Compiled code that processes share is named by what it is, whatever each has met before."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from numba import typeof, types
from numba.core.serialize import dumps

from hotcold.numba_kernels import content_names
from hotcold.numba_kernels.content_names import NotLastingError, digest_of
from hotcold.numba_kernels.decode.rows import block_products, rows_kernel
from hotcold.numba_kernels.formats import MXFP4, Q4, Q8
from hotcold.numba_kernels.own_cache import read_checked, write_checked
from tests.kernels.quantized_rows import KINDS

ROOT = Path(content_names.__file__).resolve().parents[1]


def started(home: Path, kinds: Sequence[str], seed: int = 0) -> subprocess.Popen[str]:
    """A process that meets these formats in this order."""
    environment = os.environ | {
        "XDG_CACHE_HOME": str(home), "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(seed)
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.kernels.formats_in_order", *kinds]
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


def test_a_home_with_two_bodies_of_one_name_is_mended(tmp_path: Path) -> None:
    """As a fault of the compiler, or of names, would leave it: what links both compiles anew."""
    expected = answers(started(tmp_path, ["q8"]))
    (file,) = tmp_path.glob("hotcold/numba/*/rows.rows_at_once-*.nbc")
    (library, kind, code), *others = pickle.loads(read_checked(file))
    name, body = next(iter(code.items()))
    text = str(llvm.parse_bitcode(body))
    code[name] = llvm.parse_assembly(text.replace(" sdiv ", " udiv ")).as_bitcode()
    write_checked(file, dumps(((library, kind, code), *others)))
    for whole in tmp_path.glob("hotcold/numba/quantized_matmul-*/*.nbc"):
        whole.unlink()  # what links that file's code, and others that have it
    assert [name for name, found in bodies(tmp_path).items() if len(found) > 1] == [name]
    assert answers(started(tmp_path, ["q8"])) == expected
    assert all(len(each) == 1 for each in bodies(tmp_path).values())


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What all formats answer in a home of one process."""
    return answers(started(tmp_path_factory.mktemp("fresh"), list(KINDS)))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_processes_of_one_home_meet_all_formats_in_any_order(
    fresh: dict[str, str], seed: int, tmp_path: Path
) -> None:
    """Two at once, as services of several models start."""
    order = random.Random(seed)
    for _ in range(3):
        meets = [order.sample(list(KINDS), order.randint(1, len(KINDS))) for _ in range(2)]
        for process in [started(tmp_path, kinds, order.randint(0, 99)) for kinds in meets]:
            found = answers(process)
            assert found == {kind: fresh[kind] for kind in found}
    assert all(len(each) == 1 for each in bodies(tmp_path).values())


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


def test_named_tuples_are_told_apart_by_their_fields() -> None:
    """Their class may be in a source that the kernel's does not import."""
    classes: list[Any] = [namedtuple("Two", names) for names in ("a b", "b a")]
    assert len({digest_of(typeof((each(1, 2), 3))) for each in classes}) == 2


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


def test_what_holds_itself_is_not_named() -> None:
    knot: list[Any] = []
    knot.append(knot)
    with pytest.raises(NotLastingError):
        digest_of(knot)
    assert digest_of(np.float32(1)) == digest_of(np.float32(1)) != digest_of(1.0)
    assert digest_of(rows_kernel) != digest_of(block_products)
