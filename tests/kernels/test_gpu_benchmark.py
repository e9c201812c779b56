"""The benchmark of a GPU's kernels, on emulated ones: every figure is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu_kernels import Bench
from hotcold.cuda_kernels.matrix import FORMATS, row_bytes
from tests.kernels.backends import emulated_calls
from tests.kernels.quantized_rows import SUMMED

_WIDTH, _HEIGHT = 1024, 96


def a_microsecond(work: Callable[[], None]) -> float:
    """As if that was how long it takes."""
    work()
    return 1e-6


def test_every_format_is_measured(emulated_library: Path) -> None:
    calls = emulated_calls(emulated_library)
    bench = Bench(calls.kernels, calls.to_device, calls.to_host, 1.0, a_microsecond, 1)
    found = list(bench.figures([*FORMATS], [1, 4], 0.3, ["70"], ((_WIDTH, _HEIGHT),)))
    assert len(found) == len(FORMATS) * 2 * 2 + 2 * 2
    assert all(math.isfinite(each.gb_per_s) and each.gb_per_s > 0 for each in found)
    for kind in FORMATS:
        rows, ffn = (
            next(f for f in found if (f.kernel, f.format, f.num_tokens) == (kernel, kind, 1))
            for kernel in ("rows", "hot_ffn")
        )
        matrices = rows.gb_per_s * 1e3 / (_HEIGHT * row_bytes(kind, _WIDTH))
        expected = 3 if kind in ("f32", "f16", "bf16", *SUMMED) else 2  # others' down rows differ
        assert math.isclose(matrices, expected, rel_tol=1e-2), kind
        assert ffn.fired_share is not None and 0 < ffn.fired_share < 1, kind
