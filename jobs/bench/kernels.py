"""`hotcold bench kernels`: rows times a vector, and the sparse FFN, beside plain reads.

Dense rows also have their share of what the CPU's instructions make of registers and the
first-level cache, which limits batches. A plain read sums the same bytes as 64-bit words, in the
same order, row by row with the rows to come prefetched as the kernels do it. Several widths are
measured in turn, over the same memory. Lines at the end say which of them is slowest beside the
first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    "--hidden",
    "widths",
    type=click.IntRange(min=32),
    multiple=True,
    default=(4096,),
    help="Width of a row. May be given several times: each is compared with the first.",
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
    widths: tuple[int, ...],
    ffn: int,
    layers: int,
    densities: tuple[float, ...],
    dtypes: tuple[str, ...],
    threads: int | None,
    batches: tuple[int, ...],
    repeat: int,
) -> dict[str, Any]:
    """Time kernels over fresh memory; each timing stands between two plain reads of the same.

    Matrices should be larger than the caches together: those of one kind hold layers * ffn rows of
    the first width, and of the others as many as take the same bytes. Left out are
    widths that a format's rows cannot have, and formats whose rows cannot have the first.
    """
    num_threads = threads or len(usable_cores())
    shape = f"{layers} x {ffn} x {widths[0]}, {num_threads} threads"
    click.echo(f"{shape}; GB/s, and the share of a plain read of the same bytes (least to most)")
    report: dict[str, Any] = {"shape": shape, "tokens": list(batches), "kernels": {}}
    slowest: dict[str, tuple[float, str, int]] = {}  # by kernels
    for dtype in _with_width(dtypes, widths[0]):
        own = [width for width in widths if has_width(DTYPES[dtype], width)]
        with stderr_console().status(f"measuring {dtype}"):
            memory = Memory(DTYPES[dtype], widths[0], layers, ffn)
            benches = [KernelBench(memory, width, num_threads, max(batches)) for width in own]
            some = densities if is_summed(DTYPES[dtype]) else ()
            found = _compare_all(benches, batches, some, repeat)
        report["kernels"][dtype] = {
            width: {name: _numbers(results[i]) for name, results in found.items()}
            for i, width in enumerate(own)
        }
        for name, results in found.items():
            for width, result in zip(own, results, strict=True):
                _print(dtype, name, width, result, len(own) > 1)
                if width != widths[0]:
                    here = result.of_first, dtype, width
                    slowest[name] = min(slowest.get(name, here), here)
    for name, (share, dtype, width) in slowest.items():
        click.echo(f"{name}: slowest beside the first width {dtype} {width}, {share:.2f} of it")
    first = next(iter(report["kernels"].values()))[widths[0]]
    dense = next(iter(first.values()))
    return {name: dense[name] for name in ("gb_per_s", "read_gb_per_s")} | report


def _numbers(result: Comparison) -> dict[str, float]:
    """What was measured."""
    return {name: number for name, number in asdict(result).items() if number is not None}


def _with_width(dtypes: tuple[str, ...], first: int) -> list[str]:
    """The formats whose rows can be as wide as the first. Errors: UsageError for none."""
    known = [dtype for dtype in dtypes if has_width(DTYPES[dtype], first)]
    if not known:
        raise click.UsageError(f"no rows of {', '.join(dtypes)} are {first} wide")
    return known


def _compare_all(
    benches: list[KernelBench],
    batches: tuple[int, ...],
    densities: tuple[float, ...],
    repeat: int,
) -> dict[str, list[Comparison]]:
    """For each kernel, what was found of each bench; the benches take turns."""
    found, peaks = {}, [bench.peak() for bench in benches]
    for tokens in batches:
        name = "rows x vector" if tokens == 1 else f"rows x {tokens} vectors"
        for bench in benches:
            bench.num_tokens = tokens
        works = [(bench.dense, bench.read_in_order) for bench in benches]
        found[name] = [
            replace(result, share_of_peak=result.gb_per_s * 1e9 * bench.products_a_byte() / peak)
            for bench, peak, result in zip(benches, peaks, compare(works, repeat), strict=True)
        ]
    for density in densities:
        for bench in benches:
            bench.density = density
        works = [(bench.sparse, bench.read_listed) for bench in benches]
        found[f"sparse FFN at {density:.0%}"] = compare(works, repeat)
    return found


def _print(dtype: str, name: str, width: int, result: Comparison, several: bool) -> None:
    share = f"{result.share_of_read:.2f} ({result.share_min:.2f} to {result.share_max:.2f})"
    line = f"{dtype:>5} {name:18} {width:6} {result.gb_per_s:6.1f}  {share} of"
    of_first = f"; {result.of_first:.2f} of the first width" if several else ""
    peak = f"; {result.share_of_peak:.2f} of the peak" if result.share_of_peak else ""
    click.echo(f"{line} {result.read_gb_per_s:.1f}{peak}{of_first}")


def has_width(dtype: np.dtype, width: int) -> bool:
    """Whether rows of a format can have so many weights."""
    return dtype not in ROW_FORMATS or width % ROW_FORMATS[dtype].block_weights == 0


def is_summed(dtype: np.dtype) -> bool:
    """Whether a neuron's down row can have a format, so that there is a sparse FFN of it alone."""
    return dtype not in ROW_FORMATS or ROW_FORMATS[dtype].is_summed


class Memory:
    """Three matrices' bytes, which rows of any width share."""

    def __init__(self, dtype: np.dtype, width: int, layers: int, ffn: int) -> None:
        """As much as layers * ffn rows of `width` weights take in each matrix."""
        self.dtype = dtype
        self.layers = layers
        size = layers * ffn * row_items(dtype, width)
        self.items = [aligned_empty((size,), dtype) for _ in range(3)]
        name = next(name for name, known in DTYPES.items() if known == dtype)
        for items in self.items:
            if name in _ONE:
                items[:] = _ONE[name]
            else:
                items.view(np.uint8)[:] = _ROW_BYTE

    def matrices(self, width: int) -> list[np.ndarray]:
        """gate, up and down (layers * N, row items), with the most whole layers of such rows."""
        row = row_items(self.dtype, width)
        rows = self.items[0].size // row // self.layers * self.layers
        return [items[: rows * row].reshape(rows, row) for items in self.items]


class KernelBench:
    """The kernels over rows of one width, and plain reads of what they read."""

    def __init__(self, memory: Memory, width: int, num_threads: int, most_tokens: int) -> None:
        self.num_tokens, self.density = 1, 0.01
        self.gate, self.up, self.down = memory.matrices(width)
        self.words = [_words(matrix) for matrix in (self.gate, self.up, self.down)]
        self.all_words = _words(self.gate.reshape(1, -1))[0]
        self.layers, rows = memory.layers, self.gate.shape[0]
        self.ffn, self.num_threads = rows // memory.layers, num_threads
        self.x = np.full((most_tokens, width), 0.01, np.float32)
        self.out = np.zeros((most_tokens, rows), np.float32)
        self.workspace = activation_space(num_threads, most_tokens, width)
        no_bias = np.empty(0, np.float32)
        self.arrays = FfnArrays(
            starts=starts_of(np.full((memory.layers, 1), self.ffn)),
            gate=self.gate,
            up=self.up,
            down=self.down,
            gate_bias=no_bias,
            up_bias=no_bias,
            down_bias=np.empty((memory.layers, 1, 0), np.float32),
        )
        self.scratch = new_scratch(num_threads, 1, self.ffn, width)
        self.cells = aligned_empty((CELLS_A_SERVICE * INTS_A_CELL,), np.int32)
        self.partial = np.zeros((1, width), np.float32)
        self.pool = ThreadPoolExecutor(num_threads)
        self.rng = np.random.default_rng(0)
        works = [self.read_in_order, self.dense]
        for work in [*works, self.read_listed, self.sparse] if is_summed(memory.dtype) else works:
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

    of_first: its rate as a share of the first kernel's in the same round; share_of_peak: of the
    products that the CPU makes at most, of dense rows
    """

    gb_per_s: float
    read_gb_per_s: float
    share_of_read: float
    share_min: float
    share_max: float
    of_first: float
    share_of_peak: float | None = None


def compare(works: Sequence[tuple[Work, Work]], repeat: int) -> list[Comparison]:
    """Time each kernel between two of its plain reads, all of them in turn, `repeat` times."""
    rates = np.empty((repeat, len(works)))
    reads = np.empty_like(rates)
    for i in range(repeat):
        for k, (kernel, read) in enumerate(works):
            before, rates[i, k], after = _rate(read()), _rate(kernel()), _rate(read())
            reads[i, k] = (before + after) / 2
    shares, of_first = rates / reads, rates / rates[:, :1]
    return [
        Comparison(
            gb_per_s=float(np.median(rates[:, k])),
            read_gb_per_s=float(np.median(reads[:, k])),
            share_of_read=float(np.median(shares[:, k])),
            share_min=float(shares[:, k].min()),
            share_max=float(shares[:, k].max()),
            of_first=float(np.median(of_first[:, k])),
        )
        for k in range(len(works))
    ]


def _rate(timing: tuple[float, int]) -> float:
    seconds, num_bytes = timing
    return num_bytes / seconds / 1e9
