"""A process knows that it compiles, and the progress line says so."""

from __future__ import annotations

import numba
from numba.extending import overload

from hotcold.actors.telemetry.vitals import CompileWatch


def test_a_process_knows_that_it_compiles() -> None:
    watch, seen = CompileWatch(), []

    def one(x: int) -> int:
        raise NotImplementedError

    @overload(one)
    def choose(x):
        seen.append(watch.is_compiling)
        return lambda x: 1

    @numba.njit
    def one_more(x: int) -> int:
        return x + one(x)

    assert one_more(3) == 4 and set(seen) == {True} and not watch.is_compiling
