"""How GGUF files are named: what can be said of one without opening it, or importing much."""

from __future__ import annotations

import re
from pathlib import Path

SUFFIX = ".gguf"
MAGICS = (b"GGUF", b"PWRI")  # what a file begins with, the second of PowerInfer's
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")


def is_gguf(path: str | Path) -> bool:
    """Whether a model's path is that of a GGUF file, and not of a directory."""
    return Path(path).is_file()


def are_parts(path: Path, other: Path) -> bool:
    """Whether the names are those of one model's parts, or the same."""
    own, others = PART.fullmatch(path.stem), PART.fullmatch(other.stem)
    if own is None or others is None:
        return path.name == other.name
    is_same = (own["stem"], own["count"]) == (others["stem"], others["count"])
    return is_same and path.suffix == other.suffix


def is_later_part(path: Path) -> bool:
    """Whether the name is that of a part other than the first."""
    name = PART.fullmatch(path.stem)
    return name is not None and int(name["number"]) != 1
