"""Names of GGUF files and their parts. (Tensor names: model/config/families/tensor_names.py.)"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

SUFFIX = ".gguf"
MAGICS = (b"GGUF", b"PWRI")  # first bytes; the second is PowerInfer's
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
# What a name ends in: a kind of quantization, of Unsloth's mixtures of types "UD-" and a kind.
_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w{0,12}|TQ\d\w{0,12}|BF16|F16|F32|MXFP4\w{0,12}|NVFP4))$", re.I
)
# Words in the names of files beside a model. A draft may be a model of its own, too.
_NO_MODEL = re.compile(r"(?:^|[-._])(?:mmproj|imatrix)(?:[-._]|$)", re.I)
_DRAFT = re.compile(r"(?:^|[-._])(?:draft|mtp|eagle\d?)(?:[-._]|$)", re.I)


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


def stem_of(name: str) -> str:
    """The name of a file, perhaps in folders, without its ending and the number of a part."""
    stem = PurePosixPath(name).name.removesuffix(SUFFIX)
    part = PART.fullmatch(stem)
    return stem if part is None else part["stem"]


def quantization_of(name: str) -> str:
    """The quantization that a file's name ends in, in capitals, as Q4_K_M or UD-Q4_K_XL; or ""."""
    found = _QUANTIZATION.search(stem_of(name))
    return "" if found is None else found[1].upper()


def models_among(names: Sequence[str]) -> list[str]:
    """Those that are models by their names: no projectors, no imatrix; drafts if all are drafts."""
    models = [name for name in names if not _NO_MODEL.search(stem_of(name))]
    return [name for name in models if not _DRAFT.search(stem_of(name))] or models
