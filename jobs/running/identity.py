"""The identity of a system: its model, and all options that change tokens, memory or devices.

Computed without reading the model and without importing what runs it, so that it takes no time.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.options import PATHS, SystemOptions
from hotcold.model.files import hub
from hotcold.model.files.artifact_places import ARTIFACTS, artifact_folders
from hotcold.model.files.hub import REPOSITORY
from hotcold.model.files.known_models import repository_of
from hotcold.model.files.locate import DEMO_DIRECTORY, locate_model, resolved_model
from hotcold.model.gguf.file_names import are_parts
from hotcold.model.mapped_file import file_state

_CODE = Path(__file__).resolve().parents[2]
_PACKAGES = (
    "actors", "cuda_kernels", "demo", "jobs", "model", "numba_kernels", "placement", "predictors",
    "ui",
)  # fmt: skip
EMBEDDED = "the embedded model"
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HOTCOLD_NUMA_ROOT", ARTIFACTS)

Identity = dict[str, Any]


def model_text(model: str | None) -> str:
    """The model as any process of this machine finds it: an absolute path, or an org/repo id.

    Errors:  UsageError where there is no such model
    """
    model = model and repository_of(model)
    if model and not _exists(model) and REPOSITORY.fullmatch(model):
        return model
    return str(resolved_model(locate_model(model)))


def identity_of(model: str, options: SystemOptions) -> Identity:
    """What to compare: `model` of `model_text`, its files' state, the options as they are given."""
    return {
        "code": str(_CODE),
        "python": sys.prefix,
        "model": EMBEDDED if model == str(DEMO_DIRECTORY) else model,
        "files": _files(Path(model)),
        "cores": sorted(os.sched_getaffinity(0)),
        "environment": {name: os.environ.get(name) for name in _VARIABLES},
        "options": plain_options(options),
    }


def plain_options(options: SystemOptions) -> dict[str, Any]:
    """The options as an identity has them, by name."""
    return {name: _plain(value) for name, value in vars(options).items()}


def is_same(asked: Identity, running: Identity, resolved: dict[str, Any]) -> bool:
    """Whether a running system has the identity that a command asks for.

    An option that was left open there counts as given with its resolved value.
    """
    parts = asked.keys() - {"options", "code"}
    if asked["code"] != running["code"]:
        if _digest(asked["code"]) != _digest(running["code"]):
            return False
        if asked["model"] == EMBEDDED:  # the digest is of its content
            parts -= {"files"}
    if any(asked[part] != running.get(part) for part in parts):
        return False
    for name, value in asked["options"].items():
        given = running["options"].get(name)
        if value != given and (value is None or value != resolved.get(name, given)):
            return False
    return True


def resolved_options(system: SystemConfig) -> dict[str, Any]:
    """The model's path, and the values of a system's options, those left open included."""
    # --gpu-memory is 0 on a GPU where it was not given, and without a GPU where it was.
    unlike = {"gpu_memory_bytes"} | ({"mode"} if system.auto_mode else set())
    found = {
        name: _plain(getattr(system, name))
        for name in vars(SystemOptions())
        if hasattr(system, name) and name not in unlike
    }
    return {"model_path": system.model_path, **found}


def absolute(options: SystemOptions) -> SystemOptions:
    """The same options with absolute paths, for a process in another working directory."""
    given = {name: path for name in PATHS if (path := getattr(options, name)) is not None}
    return replace(options, **{name: path.absolute() for name, path in given.items()})


def _plain(value: Any) -> Any:
    """As JSON has it; a file with its state, so that a changed file is another option."""
    if isinstance(value, Path):
        return [str(value.absolute()), *_state(value)]
    return list(value) if isinstance(value, tuple) else value


@functools.cache
def _digest(checkout: str) -> str:
    """SHA-256 of the library's files and the embedded model's: a cluster's job runs in a copy."""
    found = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted(Path(checkout, package).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                found.update(f"{path.relative_to(checkout)} {path.stat().st_size}\n".encode())
                found.update(path.read_bytes())
    return found.hexdigest()


def _files(model: Path) -> list[list[Any]]:
    """Names and states of a model's files and of what lies beside it, in order."""
    if not model.is_absolute():
        return [file for folder in hub.snapshots(str(model)) for file in _files(folder)]
    beside = artifact_folders(model)
    folders, found = [model, *beside, *sorted(beside[-1].glob("*/"))], []
    if model.is_file():
        parts = {model, *(part for part in model.parent.glob("*") if are_parts(part, model))}
        folders = beside
        found = [[part.name, *_state(part)] for part in sorted(parts)]
    for folder in folders:
        try:
            with os.scandir(folder) as entries:
                names = sorted(entry.name for entry in entries if entry.is_file())
        except OSError:
            continue
        found += [[name, *_state(folder / name)] for name in names]
    return found


def _state(path: Path) -> list[int]:
    try:
        return list(file_state(path))
    except OSError:
        return []


def _exists(model: str) -> bool:
    try:
        return Path(model).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # a name that no file can have
        return False
