"""Lines by room: the library by package, tests, benchmarks and examples, docs."""

import subprocess
from collections import Counter

import click

_CODE = (".py", ".sh", ".cu", ".cuh", ".js", ".css", ".html", ".jinja")


@click.command()
def main() -> None:
    """Print a line a room, the library's sum and all, of what git tracks."""
    counts: Counter[str] = Counter()
    for path in subprocess.check_output(["git", "ls-files"], text=True).splitlines():
        room = path.split("/")[0] if "/" in path else "top"
        if path.endswith(_CODE) or (path.endswith(".md") and room in ("top", "docs")):
            with open(path, encoding="utf-8") as file:
                counts[room] += sum(1 for _ in file)
    outside = ("tests", "benchmarks", "examples", "docs", "top", ".ci")
    library = sum(count for room, count in counts.items() if room not in outside)
    for room, count in [*counts.items(), ("library", library), ("all", counts.total())]:
        print(f"{count:7} {room}")


if __name__ == "__main__":
    main()
