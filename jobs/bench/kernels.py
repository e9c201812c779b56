"""`hotcold bench kernels`: rows times a vector, and the sparse FFN, beside plain reads.

A plain read sums the same bytes as 64-bit words, in the same order, row by row with the rows to
come prefetched as the kernels do it.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import click
import numpy as np

from jobs.support.console import json_option, print_json, stderr_console
from model.weights.memory import aligned_empty
from numba_kernels.decode.rows import split_range
from numba_kernels.decode.vectors import QuantizedVectors, empty_vectors
from numba_kernels.formats import Q4, Q4_1, Q8, row_items
from numba_kernels.measure.parts import dense_part, sparse_part
from numba_kernels.measure.plain_reads import read_listed, read_row
from numba_kernels.serve.doorbell import INTS_A_CELL
from numba_kernels.serve.layer_ffn import FfnArrays, new_scratch
from numba_kernels.serve.mailbox import CELLS_A_SERVICE
from placement.machine.survey import usable_cores

_DTYPES: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.uint16),
    "bf16": np.dtype(np.int16),
    "q8": Q8,
    "q4_1": Q4_1,
    "q4": Q4,
}
_ONE = {"f32": np.float32(0.01), "f16": np.uint16(0x211F), "bf16": np.int16(0x3C24)}  # 0.01
_ROW_BYTE = 0x11  # of quantized rows: all values and scales are small and positive


@click.command()
@click.option("--hidden", type=click.IntRange(min=32), default=4096, show_default=True)
@click.option("--ffn", type=click.IntRange(min=8), default=11008, show_default=True)
@click.option("--layers", type=click.IntRange(min=1), default=8, show_default=True)
@click.option(
    "--density",
    "densities",
    type=click.FloatRange(0, 1),
    multiple=True,
    default=(0.1, 0.05),
    show_default=True,
    help="May be given several times.",
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(list(_DTYPES)),
    multiple=True,
    default=tuple(_DTYPES),
    show_default=True,
    help="May be given several times.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Cores to use; all without it.")
@click.option(
    "--tokens",
    type=click.IntRange(1, 32),
    default=1,
    show_default=True,
    help="Tokens multiplied at once by the dense rows.",
)
@click.option("--repeat", type=click.IntRange(min=1), default=9, show_default=True)
@json_option
def kernels(
    hidden: int,
    ffn: int,
    layers: int,
    densities: tuple[float, ...],
    dtypes: tuple[str, ...],
    threads: int | None,
    tokens: int,
    repeat: int,
    as_json: bool,
) -> None:
    """Time kernels over fresh memory; each timing stands between two plain reads of the same.

    Matrices should be larger than the caches together: those of one kind hold layers * ffn rows.
    """
    num_threads = threads or len(usable_cores())
    shape = f"{layers} x {ffn} x {hidden}, {num_threads} threads"
    click.echo(f"{shape}; GB/s, and the share of a plain read of the same bytes (least to most)")
    report: dict[str, Any] = {"shape": shape, "tokens": tokens, "kernels": {}}
    for dtype in dtypes:
        with stderr_console().status(f"measuring {dtype}"):
            bench = _Bench(hidden, ffn, layers, _DTYPES[dtype], num_threads, tokens)
            found = {"rows x vector": bench.compare(bench.dense, bench.read_in_order, repeat)}
            for density in densities:
                bench.choose(density)
                name = f"sparse FFN at {density:.0%}"
                found[name] = bench.compare(bench.sparse, bench.read_listed, repeat)
        report["kernels"][dtype] = found
        for name, result in found.items():
            click.echo(
                f"{dtype:>4} {name:18} {result['gb_per_s']:6.1f}  {result['share_of_read']:.2f} "
                f"({result['share_min']:.2f} to {result['share_max']:.2f}) of "
                f"{result['read_gb_per_s']:.1f}"
            )
    if as_json:
        first = report["kernels"][dtypes[0]]["rows x vector"]
        print_json({name: first[name] for name in ("gb_per_s", "read_gb_per_s")} | report)


class _Bench:
    def __init__(
        self, hidden: int, ffn: int, layers: int, dtype: np.dtype, num_threads: int, tokens: int
    ) -> None:
        def matrix() -> np.ndarray:
            array = aligned_empty((layers * ffn, row_items(dtype, hidden)), dtype)
            name = next(name for name, known in _DTYPES.items() if known == dtype)
            if name in _ONE:
                array[:] = _ONE[name]
            else:
                array.view(np.uint8)[:] = _ROW_BYTE
            return array

        self.gate, self.up, self.down = matrix(), matrix(), matrix()
        self.words = [self._words(matrix) for matrix in (self.gate, self.up, self.down)]
        self.all_words = self._words(self.gate.reshape(1, -1))[0]
        self.layers, self.ffn, self.num_threads = layers, ffn, num_threads
        self.x = np.full((tokens, hidden), 0.01, np.float32)
        self.out = np.zeros((tokens, layers * ffn), np.float32)
        self.room: QuantizedVectors = empty_vectors(num_threads, tokens, hidden)
        no_bias = np.empty(0, np.float32)
        self.arrays = FfnArrays(
            offsets=np.arange(layers + 1) * ffn,
            gate=self.gate,
            up=self.up,
            down=self.down,
            gate_bias=no_bias,
            up_bias=no_bias,
            down_bias=np.empty((layers, 0), np.float32),
        )
        self.scratch = new_scratch(num_threads, 1, ffn, hidden)
        self.cells = aligned_empty((CELLS_A_SERVICE * INTS_A_CELL,), np.int32)
        self.partial = np.zeros((1, hidden), np.float32)
        self.pool = ThreadPoolExecutor(num_threads)
        self.rng = np.random.default_rng(0)
        self.choose(0.01)
        for work in (self.read_in_order, self.dense, self.read_listed, self.sparse):
            work()

    def choose(self, density: float) -> None:
        """Fresh ids for each layer, from now on for each timing."""
        self.count = max(1, round(self.ffn * density))
        self.ids = np.stack(
            [
                np.sort(self.rng.choice(self.ffn, self.count, replace=False)).astype(np.int32)
                for _ in range(self.layers)
            ]
        )

    def _parallel(self, work: Callable[[int], Any]) -> float:
        started = perf_counter()
        list(self.pool.map(work, range(self.num_threads)))
        return perf_counter() - started

    def read_in_order(self) -> tuple[float, int]:
        """Sum one matrix as 64-bit words; returns seconds and bytes."""
        words = self.all_words
        parts = [
            slice(*split_range(len(words), i, self.num_threads, 4)) for i in range(self.num_threads)
        ]
        seconds = self._parallel(lambda i: read_row(words[parts[i]]))
        return seconds, self.gate.nbytes

    def dense(self) -> tuple[float, int]:
        """All rows of one matrix times the vectors."""
        rows = self.gate.shape[0]
        parts = [split_range(rows, i, self.num_threads, 4) for i in range(self.num_threads)]
        seconds = self._parallel(
            lambda i: dense_part(self.gate, self.x, self.room, i, self.out, *parts[i])
        )
        return seconds, self.gate.nbytes

    def read_listed(self) -> tuple[float, int]:
        """Sum the rows that `sparse` reads, in its order."""
        seconds = self._parallel(lambda i: read_listed(*self.words, self.ids, *self._part(i)))
        return seconds, self._listed_bytes()

    def sparse(self) -> tuple[float, int]:
        """Every layer's FFN over its ids, all of which fire; threads share each layer's ids."""

        def run(thread: int) -> None:
            sparse_part(
                thread, self.num_threads, self.cells, self.arrays, self.ids, self.x[:1],
                self.scratch, self.partial,
            )  # fmt: skip

        return self._parallel(run), self._listed_bytes()

    def _part(self, thread: int) -> tuple[int, int]:
        first, last = split_range(self.count, thread, self.num_threads, 4)
        return int(first), int(last)

    def _listed_bytes(self) -> int:
        return 3 * self.layers * self.count * self.gate.strides[0]

    @staticmethod
    def _words(matrix: np.ndarray) -> np.ndarray:
        """Whole rows as 64-bit words; what does not fill one is left out."""
        row_bytes = matrix.view(np.uint8).reshape(matrix.shape[0], -1)
        return row_bytes[:, : row_bytes.shape[1] // 8 * 8].view(np.uint64)

    def compare(
        self,
        kernel: Callable[[], tuple[float, int]],
        read: Callable[[], tuple[float, int]],
        repeat: int,
    ) -> dict[str, float]:
        """The kernel's rate as a share of plain reads before and after; medians over `repeat`.

        Listed rows are fresh ones each time, for kernel and read alike: a cache that holds them
        from the last time would be measured otherwise.
        """
        rates, shares, reads = [], [], []
        density = self.count / self.ffn
        for _ in range(repeat):
            around = []
            for work in (read, kernel, read):
                self.choose(density)
                around.append(_rate(work()))
            rates.append(around[1])
            reads.append((around[0] + around[2]) / 2)
            shares.append(rates[-1] / reads[-1])
        return {
            "gb_per_s": float(np.median(rates)),
            "read_gb_per_s": float(np.median(reads)),
            "share_of_read": float(np.median(shares)),
            "share_min": min(shares),
            "share_max": max(shares),
        }


def _rate(timing: tuple[float, int]) -> float:
    seconds, num_bytes = timing
    return num_bytes / seconds / 1e9
