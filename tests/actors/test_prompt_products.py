"""A token's product has the same bits in any company and place, in every way that there is.

Ways are columns of `matmul_kinds`, whose instructions this CPU must have. The last column's are
those of the CPU that kernels are compiled for: `tests/kernels/test_other_cpus.py` has AVX2's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hotcold.actors.cpu.kernel_matmul import AmxMatmul
from hotcold.actors.cpu.matmul import matmul_kinds
from hotcold.numba_kernels.ir.target import has_feature
from tests.kernels.amx import EmulatedAmxMatmul
from tests.kernels.arrays import BITS, random_bits, random_floats
from tests.kernels.products import combine, in_turn, linear
from tests.kernels.quantized_rows import KINDS, SUMMED, random_rows

pytestmark = pytest.mark.sweep
WAYS = {
    "amx": ({"amx-bf16", "avx512bf16", "avx512vnni"}, "amx-bf16"),
    "amx emulated": ({"amx-bf16", "avx512bf16", "avx512vnni"}, ""),
    "bf16": ({"avx512bf16", "avx512vnni"}, "avx512bf16"),
    "vnni": ({"avx512vnni"}, "avx512vnni"),
    "plain": (set[str](), ""),
}
COMPANIES = (1, 33, 64, 65, 200, 512)
HEIGHT, WIDTH, THREADS = 101, 1280, 2


def product(matmul: Any, name: str, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """x @ weights.T ("linear") or x @ weights ("combine")."""
    width = HEIGHT if name == "linear" else WIDTH
    out = np.full((len(x), width), np.nan, np.float32)
    if name == "linear":
        linear(matmul, x, weights, out)
    else:
        combine(matmul, x, weights, out)
    return out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "kind"),
    [("linear", kind) for kind in [*BITS, *KINDS]]
    + [("combine", kind) for kind in [*BITS, *SUMMED]],
)
def test_bits_do_not_depend_on_company_or_place(way: str, name: str, kind: str) -> None:
    features, needed = WAYS[way]
    if needed and not has_feature(needed):
        pytest.skip(f"this CPU has no {needed}")
    if kind in KINDS:
        weights = random_rows(1, kind, HEIGHT, WIDTH).rows
    else:
        weights = random_bits(1, BITS[kind], HEIGHT, WIDTH)
    x = random_floats(2, max(COMPANIES), WIDTH if name == "linear" else HEIGHT)
    chosen = matmul_kinds(weights.dtype, features)[name == "combine"]
    if way == "amx emulated":
        if chosen is not AmxMatmul or kind not in ("f16", "q4"):
            pytest.skip("the same without AMX, or slow and nothing else")
        chosen = EmulatedAmxMatmul
    matmul = in_turn(chosen, THREADS)
    expected = product(matmul, name, x, weights)
    assert np.isfinite(expected).all()
    draw = np.random.default_rng(3)
    for count in COMPANIES:
        ids = draw.choice(len(x), count, replace=False)
        company = x[ids] * 1
        found = product(matmul, name, company, weights)
        assert found.tobytes() == expected[ids].tobytes(), count
        company[1:] *= 100  # others with other numbers
        assert product(matmul, name, company, weights)[0].tobytes() == expected[ids[0]].tobytes()
