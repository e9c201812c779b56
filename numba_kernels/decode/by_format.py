"""Kernels of a block's matrix, whichever of the model's formats it has: chosen while they run.

Matrices of one role have few formats, which are the types of `BlockRows.arrays`. A kernel is
compiled for each of them, as it would be for one alone; only what calls it is compiled for the set.
"""

from typing import Any

from hotcold.numba_kernels.block_rows import FORMAT, block_matrix
from hotcold.numba_kernels.compiler import by_types, njit

matrix_at = njit(nogil=True, cache=True)(block_matrix)


@by_types
def with_matrix(arrays, place, kernel, *others):  # type: ignore[no-untyped-def]
    """kernel(matrix, *others) with the matrix at a place of `BlockRows`; for compiled code."""
    source = "def choose(arrays, place, kernel, *others):\n"
    for number in range(1, len(arrays)):  # compiled code indexes such tuples by literals alone
        source += f" if place[{FORMAT}] == {number}:\n  {_call(number)}"
    functions: dict[str, Any] = {}
    exec(source + f" {_call(0)}", globals(), functions)
    return functions["choose"]


def _call(number: int) -> str:
    return f"return kernel(matrix_at(arrays[{number}], place), *others)\n"
