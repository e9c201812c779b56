"""Names of GGUF files and their parts. (Tensor names: model/config/gguf_architectures.py.)"""

from __future__ import annotations

import re
from pathlib import Path

SUFFIX = ".gguf"
MAGICS = (b"GGUF", b"PWRI")  # first bytes; the second is PowerInfer's
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")


def is_gguf(path: str | Path) -> bool:
    """Whether a model's path is a GGUF file, not a directory."""
    return Path(path).is_file()


def are_parts(path: Path, other: Path) -> bool:
    """Whether two file names are parts of one model, or the same."""
    own, others = PART.fullmatch(path.stem), PART.fullmatch(other.stem)
    if own is None or others is None:
        return path.name == other.name
    is_same = (own["stem"], own["count"]) == (others["stem"], others["count"])
    return is_same and path.suffix == other.suffix


def is_later_part(path: Path) -> bool:
    """Whether a file name is a part other than the first."""
    name = PART.fullmatch(path.stem)
    return name is not None and int(name["number"]) != 1
