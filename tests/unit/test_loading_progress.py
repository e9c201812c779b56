"""What the progress line shows: bytes where they are counted, kernels that had to be compiled."""

from __future__ import annotations

import numba
from rich.progress import Progress

from actors.telemetry.compiling import CompileCounter
from jobs.support.loading import _BytesColumn


def test_compiled_kernels_are_counted() -> None:
    counter = CompileCounter()

    @numba.njit
    def twice(x: int) -> int:
        return 2 * x

    assert twice(3) == 6 and twice(4) == 8
    assert counter.num_begun == 1 and not counter.is_compiling
    assert twice(1.5) == 3.0
    assert counter.num_begun == 2 and not counter.is_compiling


def test_bytes_are_shown_where_they_are_counted() -> None:
    bar = Progress()
    shown = {}
    for counts_bytes in (False, True):
        bar.add_task("", total=2_000_000, completed=1_000_000, counts_bytes=counts_bytes)
        shown[counts_bytes] = _BytesColumn().render(bar.tasks[-1]).plain
    assert shown == {False: "", True: "1.0/2.0 MB"}
