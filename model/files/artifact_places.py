"""Where artifacts lie: beside their model, or in the folder HOTCOLD_ARTIFACTS.

Beside it means in the folder `hotcold` of the model's directory, those of a GGUF file in a folder
of its name there. In HOTCOLD_ARTIFACTS, for models whose folder is shared or read-only, each model
has a folder of its own, named after it and its path. What is made is written there alone, and what
lies beside the model is read where that folder lacks it. The embedded model, a part of the program,
has such a folder in this user's cache.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from hotcold.model.errors import UsageError, shown
from hotcold.model.files.locate import DEMO_DIRECTORY, resolved_model
from hotcold.model.gguf.file_names import is_gguf
from hotcold.numba_kernels.own_cache import cache_home

ARTIFACTS = "HOTCOLD_ARTIFACTS"
_BESIDE = "hotcold"


def artifact_folders(model_path: str | Path) -> list[Path]:
    """The folders of a model's artifacts: where they are written, and where else they are read.

    Errors:  UsageError where HOTCOLD_ARTIFACTS is no absolute path
    """
    path = Path(model_path)
    beside = path.parent / _BESIDE / path.stem if is_gguf(path) else path / _BESIDE
    folder = _folder_elsewhere(path)
    if folder is None:
        return [beside]
    if not folder.is_absolute():
        raise UsageError(f"{ARTIFACTS} is {shown(str(folder))}; give an absolute path")
    return [folder / _own_name(resolved_model(path)), beside]


def artifact_base(model_path: str | Path) -> Path:
    """The folder, made by somebody else, below which a model's artifacts are written."""
    path = Path(model_path)
    return _folder_elsewhere(path) or (path.parent if is_gguf(path) else path)


def _folder_elsewhere(model_path: Path) -> Path | None:
    """The folder of many models' artifacts; None: they are beside the model."""
    if given := os.environ.get(ARTIFACTS):
        return Path(os.path.expanduser(given))
    is_embedded = resolved_model(model_path) == DEMO_DIRECTORY
    return cache_home() / "hotcold" / "artifacts" if is_embedded else None


def artifact_path(model_path: str | Path, file_name: str) -> Path:
    """The path where a model's artifact is read; where there is none, where it would be written.

    Errors:  UsageError as of `artifact_folders`
    """
    paths = [folder / file_name for folder in artifact_folders(model_path)]
    return next((path for path in paths if path.exists()), paths[0])


def place_to_write(model_path: str | Path, path: Path) -> Path:
    """The path where the artifact that is read at `path` is written. Errors: UsageError."""
    return artifact_folders(model_path)[0] / path.name


def artifacts_like(model_path: str | Path, pattern: str) -> list[Path]:
    """The model's artifacts whose names match a pattern, each name once. Errors: UsageError."""
    found: dict[str, Path] = {}
    for folder in artifact_folders(model_path):
        for path in folder.glob(pattern):
            found.setdefault(path.name, path)
    return [path for _, path in sorted(found.items())]


def _own_name(model: Path) -> str:
    """The name of a model's own folder: models of one name differ in their paths."""
    digest = hashlib.sha256(os.fsencode(model)).hexdigest()[:12]
    if model.parent.name == "snapshots":  # a revision in Hugging Face's cache
        name = model.parents[1].name.removeprefix("models--")
    else:
        name = model.stem if is_gguf(model) else model.name
    return f"{name}-{digest}"
