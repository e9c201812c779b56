"""Finds the model that a user names: its directory, or its GGUF file."""

from __future__ import annotations

from pathlib import Path

from model.errors import UsageError, shown
from model.files import hub
from model.gguf.names import SUFFIX, is_gguf, is_later_part

DEMO_DIRECTORY = Path(__file__).resolve().parents[2] / "demo"


def locate_model(text: str | None) -> Path:
    """Return a model's directory or GGUF file: a path, `org/repo[:NAME]`, or None for the demo.

    A directory that holds no config.json but one GGUF model stands for that model; NAME is a part
    of a file's name. A repository is downloaded once (`model/files/hub.py`).
    Errors:  UsageError where there is no such model, several that it could be, or no network
    """
    if text is None:
        if not (DEMO_DIRECTORY / "config.json").exists():
            raise UsageError(f"{DEMO_DIRECTORY} holds no embedded model; name a model directory")
        return DEMO_DIRECTORY
    path = Path(text).expanduser()
    try:
        if text and path.is_dir():
            return _model_in(path)
        exists = bool(text) and path.exists()
    except (OSError, ValueError):  # a name that no file can have
        exists = False
    if exists:
        return _gguf_file(path, text)
    named = hub.REPOSITORY.fullmatch(text)
    if path.suffix == SUFFIX and not (named and named["name"]):  # no repository is called so
        raise UsageError(f"{shown(text)}: there is no such file")
    if named:
        return hub.fetch(hub.find(named["repo"], named["name"]))
    raise UsageError(
        f"{shown(text)} is neither a directory nor a .gguf file nor an org/repo id of Hugging Face"
    )


def model_name(text: str | None, path: Path) -> str:
    """Return what a model is called that `locate_model` found: its id, or its folder's or file's.

    An `org/repo` id stays as it was given.
    """
    if text and not Path(text).expanduser().exists():
        return text
    return path.stem if path.is_file() else path.resolve().name


def resolved_model(path: str | Path) -> Path:
    """Return the model's absolute path: a file keeps its name, which says what parts it has."""
    path = Path(path)
    return path.parent.resolve() / path.name if is_gguf(path) else path.resolve()


def _gguf_file(path: Path, text: str) -> Path:
    if path.suffix != SUFFIX:
        raise UsageError(
            f"{shown(text)} is a file; give a .gguf file, or the directory that holds config.json"
        )
    return path


def _model_in(directory: Path) -> Path:
    """The directory itself, or the one GGUF model that it holds."""
    if (directory / "config.json").exists():
        return directory
    found = [path for path in sorted(directory.glob(f"*{SUFFIX}")) if not is_later_part(path)]
    if len(found) > 1:
        raise UsageError(
            f"{directory} holds {len(found)} GGUF models; name one: "
            + hub.listed([str(path) for path in found])
        )
    return found[0] if found else directory
