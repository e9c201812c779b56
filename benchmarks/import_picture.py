"""Who imports whom in the library: files a folder, floors, arrows and circles of checkouts.

    git worktree add ../before COMMIT
    python -m benchmarks.import_picture --checkout ../before --checkout . --out docs/imports

A room is a folder, or a file at a package's top. A floor is above all that it imports: files have
as many as the longest chain of imports, and in the picture rooms stand on floors of their own.
Imports count wherever they stand in a file.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

PACKAGES = (
    "numba_kernels", "cuda_kernels", "model", "predictors", "placement", "actors", "ui", "jobs",
)  # fmt: skip
_Graph = dict[str, set[str]]


@dataclass(frozen=True)
class Picture:
    """What imports of a checkout look like; names are modules with dots."""

    files: _Graph
    fullest: tuple[str, int]  # the folder with most files, and how many
    num_folders: int

    @classmethod
    def of(cls, checkout: Path) -> Picture:
        """Read all sources of the library."""
        paths = [
            path for package in PACKAGES for path in sorted((checkout / package).rglob("*.py"))
        ]
        modules = {_module(path.relative_to(checkout)): path for path in paths}
        graph = {name: _imported(path, modules) - {name} for name, path in modules.items()}
        named = [path for path in paths if path.name != "__init__.py"]
        counts: dict[str, int] = {}
        for path in named:
            folder = path.parent.relative_to(checkout).as_posix()
            counts[folder] = counts.get(folder, 0) + 1
        return cls(graph, max(counts.items(), key=lambda item: item[1]), len(counts))

    @property
    def rooms(self) -> _Graph:
        """The same between rooms."""
        found: _Graph = {}
        for name, imported in self.files.items():
            here = self._room(name)
            found.setdefault(here, set()).update({self._room(other) for other in imported} - {here})
        return found

    def _room(self, name: str) -> str:
        """A folder's name, but of a file at a package's top its own."""
        folder = name.rpartition(".")[0]
        return folder if folder.count(".") else name

    @property
    def row(self) -> list[str]:
        """What a table says of it, as `_HEAD` has it."""
        folder, most = self.fullest
        floors = max(floors_of(self.files).values()) + 1
        arrows = sum(map(len, self.rooms.values()))
        numbers = (self.num_folders, len(self.files), floors, len(self.rooms), arrows)
        return [f"{most} (`{folder}/`)", *map(str, numbers), str(len(circles(self.files)))]


_HEAD = ["files in the fullest folder of the library", "folders with code", "files"]
_HEAD += ["longest chain of imports, files", "rooms", "arrows between rooms", "circles of files"]


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _imported(path: Path, modules: Mapping[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return {name for name in found if name in modules}


def circles(graph: _Graph) -> list[set[str]]:
    """Groups of names that can all be reached from each other, of two or more."""
    reached = {name: _reached(graph, name) for name in graph}
    groups = {
        frozenset({name} | {other for other in reached[name] if name in reached[other]})
        for name in graph
    }
    return [set(group) for group in groups if len(group) > 1]


def _reached(graph: _Graph, name: str) -> set[str]:
    found: set[str] = set()
    ahead = [name]
    while ahead:
        more = graph[ahead.pop()] - found
        found |= more
        ahead += more
    return found


def floors_of(graph: _Graph) -> dict[str, int]:
    """Of each name, on how many others' shoulders it stands; those of a circle stand as one."""
    together = {name: group for group in circles(graph) for name in group}
    floors: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in floors:
            group = together.get(name, {name})
            below = {other for each in group for other in graph[each]} - group
            height = max((floor(other) + 1 for other in below), default=0) + len(group) - 1
            floors.update(dict.fromkeys(group, height))
        return floors[name]

    return {name: floor(name) for name in sorted(graph)}


def draw(pictures: Mapping[str, Picture], file: Path) -> None:
    """Rooms as points on their floors, coloured by package; an import is a line down."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * len(pictures), 7), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (name, picture) in enumerate(pictures.items()):
        axes = figure.add_subplot(1, len(pictures), number + 1)
        floors, places = floors_of(picture.rooms), {}
        for height in set(floors.values()):
            row = sorted(
                (room for room in floors if floors[room] == height),
                key=lambda room: (PACKAGES.index(room.partition(".")[0]), room),
            )
            for at, room in enumerate(row):
                places[room] = ((at + 0.5) / len(row), height)
        for room, others in picture.rooms.items():
            for other in others:
                ends = zip(places[room], places[other], strict=True)
                axes.plot(*ends, color="0.5", linewidth=0.4, alpha=0.5, zorder=1)
        for index, package in enumerate(PACKAGES):
            own = [place for room, place in places.items() if room.partition(".")[0] == package]
            axes.scatter(*zip(*own, strict=True), s=28, color=f"C{index}", label=package, zorder=2)
        arrows = sum(map(len, picture.rooms.values()))
        axes.set_title(f"{name}: {len(places)} rooms, {arrows} arrows")
        axes.set_ylabel("floor")
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    handles = figure.axes[-1].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(PACKAGES), frameon=False)
    figure.savefig(file, dpi=60)


@click.command()
@click.option("--checkout", "checkouts", multiple=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="OUT.png, the picture")
def main(checkouts: tuple[Path, ...], out: Path | None) -> None:
    """Print a table of checkouts' imports, the present one where none is named."""
    folders = checkouts or (Path(__file__).resolve().parents[1],)
    names = ["before", "today"] if len(folders) == 2 else [str(folder) for folder in folders]
    pictures = {n: Picture.of(folder) for n, folder in zip(names, folders, strict=True)}
    click.echo(f"| | {' | '.join(names)} |\n|{' --- |' * (len(names) + 1)}")
    rows = [picture.row for picture in pictures.values()]
    for head, *cells in zip(_HEAD, *rows, strict=True):
        click.echo(f"| {head} | {' | '.join(cells)} |")
    if out is not None:
        draw(pictures, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
