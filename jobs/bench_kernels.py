"""`hotcold bench kernels`: rows times a vector, and the sparse FFN, beside a plain read."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import click
import numpy as np
from numba import njit

from jobs.console import json_option, print_json, stderr_console
from model.memory import aligned_empty
from numba_kernels.ffn import NO_TOKENS, gate_kernel, up_down_kernel
from numba_kernels.rows import rows_kernel, share
from placement.survey import usable_cores

_DTYPES = {"f32": np.float32, "f16": np.uint16, "bf16": np.int16}
_ONE = {"f32": np.float32(0.01), "f16": np.uint16(0x211F), "bf16": np.int16(0x3C24)}  # 0.01
_NO_BIAS = np.empty(0, np.float32)


@njit(nogil=True, cache=True)
def _plain_read(words):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for i in range(words.shape[0]):
        total += words[i]
    return total


@click.command()
@click.option("--hidden", type=click.IntRange(min=8), default=4096, show_default=True)
@click.option("--ffn", type=click.IntRange(min=8), default=11008, show_default=True)
@click.option("--layers", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--density", type=click.FloatRange(0, 1), default=0.1, show_default=True)
@click.option("--dtype", type=click.Choice(list(_DTYPES)), default="f16", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="Cores to use; all without it.")
@click.option("--repeat", type=click.IntRange(min=1), default=9, show_default=True)
@json_option
def kernels(
    hidden: int,
    ffn: int,
    layers: int,
    density: float,
    dtype: str,
    threads: int | None,
    repeat: int,
    as_json: bool,
) -> None:
    """Time kernels over fresh memory; each timing stands between two plain reads of as much."""
    num_threads = threads or len(usable_cores())
    with stderr_console().status("filling memory"):
        bench = _Bench(hidden, ffn, layers, dtype, num_threads)
    rng = np.random.default_rng(0)
    with stderr_console().status("measuring"):
        dense = bench.compare(bench.dense, repeat)
        sparse = bench.compare(lambda: bench.sparse(rng, density), repeat)
    shape = f"{layers} x {ffn} x {hidden} {dtype}, {num_threads} threads"
    for name, result in (("rows x vector", dense), (f"sparse FFN at {density:.0%}", sparse)):
        click.echo(
            f"{name}: {result['gb_per_s']:.1f} GB/s, {result['share_of_read']:.2f} of a plain read "
            f"({result['read_gb_per_s']:.1f}); {shape}"
        )
    if as_json:
        top = {name: dense[name] for name in ("gb_per_s", "read_gb_per_s")}
        print_json(top | {"dense": dense, "sparse_ffn": sparse, "shape": shape})


class _Bench:
    def __init__(self, hidden: int, ffn: int, layers: int, dtype: str, num_threads: int) -> None:
        def matrix() -> np.ndarray:
            array = aligned_empty((layers * ffn, hidden), _DTYPES[dtype])
            array[:] = _ONE[dtype]
            return array

        self.gate, self.up, self.down = matrix(), matrix(), matrix()
        self.layers, self.ffn, self.num_threads = layers, ffn, num_threads
        self.x = np.full((1, hidden), 0.01, np.float32)
        self.out = np.zeros((1, layers * ffn), np.float32)
        self.sums = np.zeros((num_threads, 1, hidden), np.float32)
        self.fired_ids = np.zeros((num_threads, ffn), np.int32)
        self.gates = np.zeros((num_threads, 1, ffn + 4), np.float32)
        self.pool = ThreadPoolExecutor(num_threads)
        self.plain_read()
        self.dense()
        self.sparse(np.random.default_rng(1), 0.01)

    def _parallel(self, work: Callable[[int], Any]) -> float:
        started = perf_counter()
        list(self.pool.map(work, range(self.num_threads)))
        return perf_counter() - started

    def plain_read(self) -> tuple[float, int]:
        """Sum one matrix as 64-bit words; returns seconds and bytes."""
        words = self.gate.reshape(-1).view(np.uint64)
        parts = [share(words.size, i, self.num_threads, 512) for i in range(self.num_threads)]
        seconds = self._parallel(lambda i: _plain_read(words[parts[i][0] : parts[i][1]]))
        return seconds, self.gate.nbytes

    def dense(self) -> tuple[float, int]:
        """All rows of one matrix times one vector."""
        rows = self.gate.shape[0]
        parts = [share(rows, i, self.num_threads, 4) for i in range(self.num_threads)]
        seconds = self._parallel(
            lambda i: rows_kernel(self.gate, _NO_BIAS, self.x, self.out, *parts[i])
        )
        return seconds, self.gate.nbytes

    def sparse(self, rng: np.random.Generator, density: float) -> tuple[float, int]:
        """Every layer's FFN over fresh ids, all of which fire; threads share each layer's ids."""
        count = max(1, round(self.ffn * density))
        ids = [
            np.sort(rng.choice(self.ffn, count, replace=False)).astype(np.int32)
            for _ in range(self.layers)
        ]
        seconds = self._parallel(lambda i: self._sparse_part(i, ids))
        return seconds, 3 * self.layers * count * self.gate.strides[0]

    def _sparse_part(self, thread: int, ids: list[np.ndarray]) -> None:
        for layer, layer_ids in enumerate(ids):
            rows = slice(layer * self.ffn, (layer + 1) * self.ffn)
            first, last = share(layer_ids.size, thread, self.num_threads, 4)
            fired, gates = self.fired_ids[thread], self.gates[thread]
            count = gate_kernel(
                self.gate[rows],
                _NO_BIAS,
                layer_ids,
                NO_TOKENS,
                self.x,
                0,
                False,
                first,
                last,
                fired,
                gates,
            )
            down = self.down[rows]
            up_down_kernel(
                self.up[rows], _NO_BIAS, down, fired, count, gates, self.x, self.sums[thread]
            )

    def compare(self, measure: Callable[[], tuple[float, int]], repeat: int) -> dict[str, float]:
        """The kernel's rate as a share of plain reads before and after; medians over `repeat`."""
        rates, shares, reads = [], [], []
        before = _rate(self.plain_read())
        for _ in range(repeat):
            rate = _rate(measure())
            after = _rate(self.plain_read())
            rates.append(rate)
            reads.append((before + after) / 2)
            shares.append(rate / reads[-1])
            before = after
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
