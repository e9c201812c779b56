"""Tokens a second against memory, measured and planned, out of a report of `benchmarks.storage`.

python -m benchmarks.storage_plot benchmarks/results/storage-32-layers.md speed.svg
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

_GIB, _PROGRAM, _SPEED, _PLANNED, _PEAK, _LIMIT = 0, 1, 2, 3, 9, 15  # columns of the table


class Point(NamedTuple):
    """One size of memory; speeds in tokens a second, 0 where one is not known."""

    gib: float
    measured: float
    planned: float
    allowed: float  # by the disk


def points_of(report: Path, program: str) -> list[Point]:
    """Ascending by size; with everything in memory that is what the program took."""
    found = []
    for line in report.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) <= _LIMIT or cells[_PROGRAM] != program or cells[_GIB].endswith("%"):
            continue
        size = cells[_PEAK] if cells[_GIB] == "all" else cells[_GIB]
        texts = size, cells[_SPEED], cells[_PLANNED], cells[_LIMIT]
        found.append(Point(*(float(text or 0) for text in texts)))
    return sorted(found)


def draw(points: Sequence[Point], llama: Sequence[Point], out: Path) -> None:
    """Both programs into a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    stored = [point for point in points if point.planned]
    sizes = [point.gib for point in stored]
    axes.plot(
        [point.gib for point in points],
        [point.measured for point in points],
        "o-",
        color="black",
        label="hotcold",
    )
    axes.plot(sizes, [point.planned for point in stored], "x--", color="0.4", label="planned")
    axes.plot(sizes, [point.allowed for point in stored], ":", color="0.5", label="disk allows")
    if llama:
        speeds = [point.measured for point in llama]
        axes.plot([point.gib for point in llama], speeds, "s-", color="tab:red", label="llama.cpp")
    axes.set(xlabel="memory, GiB", ylabel="tokens/s", yscale="log")
    axes.legend(frameon=False)
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=160)
    pyplot.close(figure)


@click.command()
@click.argument("report", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--program", default="hotcold sign", show_default=True)
def main(report: Path, out: Path, program: str) -> None:
    """Draw REPORT into OUT (.svg, .png or .pdf)."""
    draw(points_of(report, program), points_of(report, "llama.cpp"), out)


if __name__ == "__main__":
    main()
