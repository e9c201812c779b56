"""`hotcold bench kernels`: rows times a vector, and the sparse FFN, beside plain reads.

Dense rows also have their share of what the CPU's instructions make of registers and the
first-level cache, which limits batches. A plain read sums the same bytes as 64-bit words, in the
same order, row by row with the rows to come prefetched as the kernels do it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import click
import numpy as np

from hotcold.jobs.support.console import json_option, stderr_console
from hotcold.jobs.support.settings import shared_option
from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.checks import read_only
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.decode.vectors import activation_space
from hotcold.numba_kernels.ffn.in_memory import new_scratch
from hotcold.numba_kernels.ffn_arrays import FfnArrays, starts_of
from hotcold.numba_kernels.formats import FORMATS, ROW_FORMATS, row_items
from hotcold.numba_kernels.ir.peak_ir import PEAK_BYTES
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL
from hotcold.numba_kernels.loops.mailbox import CELLS_A_SERVICE
from hotcold.numba_kernels.measure import (
    dense_part,
    peak_part,
    read_listed,
    read_row,
    sparse_part,
)
from hotcold.placement.machine.survey import usable_cores

DTYPES: dict[str, np.dtype] = {kind.short: dtype for dtype, kind in FORMATS.items()}
_ONE = {"f32": np.float32(0.01), "f16": np.uint16(0x211F), "bf16": np.int16(0x3C24)}  # 0.01
_PEAK_ROUNDS, _PEAK_REPEATS = 1_000_000, 7
_ROW_BYTE = 0x11  # of quantized rows: all values and scales are small and positive

Work = Callable[[], tuple[float, int]]


@click.command()
@click.option(
    "--hidden", "width", type=click.IntRange(min=32), default=4096, help="Width of a row."
)
@click.option("--ffn", type=click.IntRange(min=8), default=11008)
@click.option("--layers", type=click.IntRange(min=1), default=8)
@click.option(
    "--density",
    "densities",
    type=click.FloatRange(0, 1),
    multiple=True,
    default=(0.1, 0.05),
    help="May be given several times.",
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(list(DTYPES)),
    multiple=True,
    default=tuple(DTYPES),
    help="Of rows; those that no down row is in have no sparse FFN. May be given several times.",
)
@shared_option("--threads", type=click.IntRange(min=1), help="Threads; one a core without it.")
@click.option(
    "--tokens",
    "batches",
    type=click.IntRange(1, 32),
    multiple=True,
    default=(1,),
    help="Tokens multiplied at once by the dense rows. May be given several times.",
)
@click.option("--repeat", type=click.IntRange(min=1), default=9)
@json_option
def kernels(
    width: int,
    ffn: int,
    layers: int,
    densities: tuple[float, ...],
    dtypes: tuple[str, ...],
    threads: int | None,
    batches: tuple[int, ...],
    repeat: int,
) -> dict[str, Any]:
    """Time kernels over fresh memory; each timing stands between two plain reads of the same.

    Matrices should be larger than the caches together: those of one kind hold layers * ffn rows.
    Left out are formats whose rows cannot have that width.
    """
    known = [dtype for dtype in dtypes if has_width(DTYPES[dtype], width)]
    if not known:
        raise click.UsageError(f"no rows of {', '.join(dtypes)} are {width} wide")
    num_threads = threads or len(usable_cores())
    shape = f"{layers} x {ffn} x {width}, {num_threads} threads"
    click.echo(f"{shape}; GB/s, and the share of a plain read of the same bytes (least to most)")
    found: dict[str, dict[str, Comparison]] = {}
    for dtype in known:
        with stderr_console().status(f"measuring {dtype}"):
            bench = KernelBench(dtype, width, layers, ffn, num_threads, max(batches))
            some = densities if is_summed(DTYPES[dtype]) else ()
            found[dtype] = _measure(bench, batches, some, repeat)
        for name, result in found[dtype].items():
            _print(dtype, name, result)
    dense = next(iter(found[known[0]].values()))
    return {
        "gb_per_s": dense.gb_per_s,
        "read_gb_per_s": dense.read_gb_per_s,
        "shape": shape,
        "tokens": list(batches),
        "kernels": {
            dtype: {name: _numbers(result) for name, result in results.items()}
            for dtype, results in found.items()
        },
    }


def _numbers(result: Comparison) -> dict[str, float]:
    """What was measured."""
    return {name: number for name, number in asdict(result).items() if number is not None}


def _measure(
    bench: KernelBench, batches: tuple[int, ...], densities: tuple[float, ...], repeat: int
) -> dict[str, Comparison]:
    """What is found of each kernel, by name."""
    found, peak = {}, bench.peak()
    for tokens in batches:
        name = "rows x vector" if tokens == 1 else f"rows x {tokens} vectors"
        bench.num_tokens = tokens
        result = compare(bench.dense, bench.read_in_order, repeat)
        products_per_s = result.gb_per_s * 1e9 * bench.products_a_byte()
        found[name] = replace(result, share_of_peak=products_per_s / peak)
    for density in densities:
        bench.density = density
        name = f"sparse FFN at {density:.0%}"
        found[name] = compare(bench.sparse, bench.read_listed, repeat)
    return found


def _print(dtype: str, name: str, result: Comparison) -> None:
    share = f"{result.share_of_read:.2f} ({result.share_min:.2f} to {result.share_max:.2f})"
    peak = f"; {result.share_of_peak:.2f} of the peak" if result.share_of_peak else ""
    line = f"{dtype:>5} {name:18} {result.gb_per_s:6.1f}  {share} of"
    click.echo(f"{line} {result.read_gb_per_s:.1f}{peak}")


def has_width(dtype: np.dtype, width: int) -> bool:
    """Whether rows of a format can have so many weights."""
    return dtype not in ROW_FORMATS or width % ROW_FORMATS[dtype].block_weights == 0


def is_summed(dtype: np.dtype) -> bool:
    """Whether a neuron's down row can have a format, so that there is a sparse FFN of it alone."""
    return dtype not in ROW_FORMATS or ROW_FORMATS[dtype].is_summed


def _matrix(dtype: str, num_rows: int, width: int) -> np.ndarray:
    """Rows of small positive numbers (num_rows, row items)."""
    own = DTYPES[dtype]
    matrix = aligned_empty((num_rows, row_items(own, width)), own)
    if dtype in _ONE:
        matrix[:] = _ONE[dtype]
    else:
        matrix.view(np.uint8)[:] = _ROW_BYTE
    return matrix


class KernelBench:
    """The kernels over rows of one format, and plain reads of what they read."""

    def __init__(
        self, dtype: str, width: int, layers: int, ffn: int, num_threads: int, most_tokens: int
    ) -> None:
        """Three matrices of layers * ffn rows of `width` weights."""
        self.num_tokens, self.density = 1, 0.01
        rows = layers * ffn
        self.gate, self.up, self.down = (_matrix(dtype, rows, width) for _ in range(3))
        self.words = [_words(matrix) for matrix in (self.gate, self.up, self.down)]
        self.all_words = _words(self.gate.reshape(1, -1))[0]
        self.layers, self.ffn, self.num_threads = layers, ffn, num_threads
        self.x = np.full((most_tokens, width), 0.01, np.float32)
        self.out = np.zeros((most_tokens, rows), np.float32)
        self.workspace = activation_space(num_threads, most_tokens, width)
        no_bias = np.empty(0, np.float32)
        self.arrays = FfnArrays(
            starts=starts_of(np.full((layers, 1), ffn)),
            gate=self.gate,
            up=self.up,
            down=self.down,
            gate_bias=no_bias,
            up_bias=no_bias,
            down_bias=np.empty((layers, 1, 0), np.float32),
        )
        self.scratch = new_scratch(num_threads, 1, ffn, width)
        self.cells = aligned_empty((CELLS_A_SERVICE * INTS_A_CELL,), np.int32)
        self.partial = np.zeros((1, width), np.float32)
        self.pool = ThreadPoolExecutor(num_threads)
        self.rng = np.random.default_rng(0)
        works = [self.read_in_order, self.dense]
        for work in [*works, self.read_listed, self.sparse] if is_summed(DTYPES[dtype]) else works:
            work()

    def _fresh_ids(self) -> np.ndarray:
        """New ids for each layer: rows of the last ones may be in a cache.

        Read-only, as in services: else another variant would be compiled.
        """
        count = max(1, round(self.ffn * self.density))
        chosen = [self.rng.choice(self.ffn, count, replace=False) for _ in range(self.layers)]
        return read_only(np.sort(np.stack(chosen), axis=1).astype(np.int32))

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
        x, out = self.x[: self.num_tokens], self.out[: self.num_tokens]
        seconds = self._parallel(
            lambda i: dense_part(self.gate, x, self.workspace, i, out, *parts[i])
        )
        return seconds, self.gate.nbytes

    def peak(self) -> float:
        """Products a second that the threads' cores make of such rows at most; the best of some."""
        data = np.full(PEAK_BYTES, 0x3F, np.uint8)  # 0.75 as floats: subnormal products are slow
        sums = np.zeros((self.num_threads, 1), np.float32)
        rates, count = [], 0

        def multiply(thread: int) -> None:
            nonlocal count
            count = peak_part(self.gate, data, _PEAK_ROUNDS, sums[thread])

        for _ in range(_PEAK_REPEATS):
            seconds = self._parallel(multiply)
            rates.append(count * self.num_threads / seconds)
        return max(rates)

    def products_a_byte(self) -> float:
        """Products that a byte of the dense rows takes."""
        return self.gate.shape[0] * self.x.shape[1] * self.num_tokens / self.gate.nbytes

    def read_listed(self) -> tuple[float, int]:
        """Sum the rows that `sparse` reads, in its order."""
        ids = self._fresh_ids()
        parts = [split_range(ids.shape[1], i, self.num_threads, 4) for i in range(self.num_threads)]
        seconds = self._parallel(lambda i: read_listed(*self.words, ids, *parts[i]))
        return seconds, 3 * ids.size * self.gate.strides[0]

    def sparse(self) -> tuple[float, int]:
        """Every layer's FFN over its ids, all of which fire; threads share each layer's ids."""
        ids = self._fresh_ids()

        def run(thread: int) -> None:
            sparse_part(
                thread, self.num_threads, self.cells, self.arrays, ids, self.x[:1],
                self.scratch, self.partial,
            )  # fmt: skip

        return self._parallel(run), 3 * ids.size * self.gate.strides[0]


def _words(matrix: np.ndarray) -> np.ndarray:
    """Whole rows as 64-bit words; what does not fill one is left out."""
    row_bytes = matrix.view(np.uint8).reshape(matrix.shape[0], -1)
    num_words = row_bytes.shape[1] // 8
    return np.ndarray(
        (len(row_bytes), num_words), np.uint64, row_bytes.data, 0, (row_bytes.shape[1], 8)
    )


@dataclass(frozen=True)
class Comparison:
    """A kernel's rate, and as a share of plain reads before and after; medians of all rounds.

    share_of_peak: of the products that the CPU makes at most, of dense rows
    """

    gb_per_s: float
    read_gb_per_s: float
    share_of_read: float
    share_min: float
    share_max: float
    share_of_peak: float | None = None


def compare(kernel: Work, read: Work, repeat: int) -> Comparison:
    """Time a kernel between two of its plain reads, `repeat` times."""
    rates, reads = np.empty(repeat), np.empty(repeat)
    for i in range(repeat):
        before, rates[i], after = _rate(read()), _rate(kernel()), _rate(read())
        reads[i] = (before + after) / 2
    shares = rates / reads
    return Comparison(
        gb_per_s=float(np.median(rates)),
        read_gb_per_s=float(np.median(reads)),
        share_of_read=float(np.median(shares)),
        share_min=float(shares.min()),
        share_max=float(shares.max()),
    )


def _rate(timing: tuple[float, int]) -> float:
    seconds, num_bytes = timing
    return num_bytes / seconds / 1e9
