"""`hotcold bench kernels`: rows times a vector, and the sparse FFN, beside plain reads.

Dense rows also have their share of what the CPU's instructions make of registers and the
first-level cache, which limits batches. A plain read sums the same bytes as 64-bit words, in the
same order, row by row with the rows to come prefetched as the kernels do it. Several widths are
measured in turn, over the same memory. Lines at the end say which of them is slowest beside the
first.
"""

from dataclasses import asdict, replace
from typing import Any

import click

from hotcold.jobs.bench.kernel_timing import (
    DTYPES,
    Comparison,
    KernelBench,
    Memory,
    compare,
    has_width,
    is_summed,
)
from hotcold.jobs.support.console import json_option, stderr_console
from hotcold.jobs.support.settings import shared_option
from hotcold.placement.machine.survey import usable_cores


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
