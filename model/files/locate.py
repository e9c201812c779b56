"""Finds the model that a user names: its directory, or its GGUF file."""

from __future__ import annotations

import re
from pathlib import Path

from hotcold.model.errors import CheckpointError, UsageError, shown
from hotcold.model.files import hub, ollama
from hotcold.model.files.known_models import did_you_mean, repository_of
from hotcold.model.gguf.file_names import (
    MAGICS,
    PART,
    SUFFIX,
    is_gguf,
    is_later_part,
    models_among,
)

_PATH = re.compile(r"[/.~]|[^:\s]+/[^:\s]*/")  # what can be no name of a repository
_DEMO = "demo"  # the embedded model's name
DEMO_DIRECTORY = Path(__file__).resolve().parents[2] / "demo"


def locate_model(text: str | None, may_fetch: bool = True) -> Path:
    """Return a model's directory or GGUF file: a path, `org/repo[:NAME]`, None or "demo" for the
    embedded one.

    A directory without config.json but with one GGUF model stands for that model, a safetensors
    file for its directory, a later part of a GGUF model for the first. NAME is a part of a file's
    name. A repository is downloaded once (`model/files/hub.py`); `ollama:NAME[:TAG]` is one of
    Ollama's models (`model/files/ollama.py`), and a well-known name such as qwen3:8b stands for a
    repository (`model/files/known_models.py`). Unless it `may_fetch`, one that is not there is an
    error.
    Errors:  UsageError for no such model, several that match, or no network;
             CheckpointError for a damaged file; OSError for an unreadable one
    """
    if text is None:
        if not (DEMO_DIRECTORY / "config.json").exists():
            raise UsageError(f"{DEMO_DIRECTORY} holds no embedded model; name a model directory")
        return DEMO_DIRECTORY
    if text.startswith(ollama.PREFIX):
        return ollama.ollama_file(text.removeprefix(ollama.PREFIX))
    text = repository_of(text)
    path = Path(text).expanduser()
    try:
        if text and path.is_dir():
            return _model_in(path)
        exists = bool(text) and path.exists()
    except (OSError, ValueError):  # a name that no file can have
        exists = False
    if exists:
        return _model_of(path, text)
    named = hub.REPOSITORY.fullmatch(text)
    is_part = bool(named and named["name"])
    if _PATH.match(text) or (path.suffix.lower() == SUFFIX and not is_part):
        raise UsageError(f"{shown(text)}: there is no such file or folder")
    if named:
        find = hub.find if may_fetch else hub.find_here
        return hub.fetch(find(named["repo"], named["name"]))
    if text == _DEMO:
        return locate_model(None)
    if len(text.split()) > 2:
        raise UsageError(
            f"{shown(text)} is no model; a prompt stands behind MODEL, as in `hotcold run demo "
            '"Hello"`, or in --prompt'
        )
    raise UsageError(
        f"{shown(text)} is neither a directory nor a .gguf file nor an org/repo id of Hugging Face"
        f"{did_you_mean(text)}"
    )


def model_name(text: str | None, path: Path) -> str:
    """Return a located model's name: its org/repo id, or the name of its file or folder."""
    if text and not Path(text).expanduser().exists():
        return text
    return path.stem if path.is_file() else path.resolve().name


def resolved_model(path: str | Path) -> Path:
    """Return the model's absolute path: a file keeps its name, which says what parts it has."""
    path = Path(path)
    return path.parent.resolve() / path.name if is_gguf(path) else path.resolve()


def _model_of(path: Path, text: str) -> Path:
    """The model that a file stands for, by its content, whatever its name."""
    if not path.is_file():
        raise UsageError(f"{shown(text)} is neither a directory nor a file with content")
    with path.open("rb") as file:
        has_magic = file.read(4) in MAGICS
    if has_magic or path.suffix.lower() == SUFFIX:  # opening it says what is wrong
        return _first_part(path)
    if ollama.is_manifest(path):
        return ollama.file_of_manifest(path)
    if path.suffix == ".safetensors" and (path.parent / "config.json").exists():
        return path.parent
    from hotcold.model.files.unsupported_formats import refuse_file  # imports NumPy

    raise refuse_file(path, text)


def _first_part(path: Path) -> Path:
    """The first part of the GGUF model that `path` is a part of."""
    name = PART.fullmatch(path.stem)
    if name is None or not is_later_part(path):
        return path
    first = path.with_name(f"{name['stem']}-00001-of-{name['count']}{path.suffix}")
    return first if first.is_file() else path


def _model_in(directory: Path) -> Path:
    """The directory itself, or the one GGUF model that it holds."""
    if (directory / "config.json").exists():
        return directory
    files = [path for path in sorted(directory.iterdir()) if path.suffix.lower() == SUFFIX]
    names = [path.name for path in files if not is_later_part(path)]
    found = [directory / name for name in models_among(names) or names]
    if len(found) > 1:
        found = [path for path in found if not _holds_no_model(path)] or found
    if len(found) > 1:
        raise UsageError(
            f"{directory} holds {len(found)} GGUF models; name one: "
            + hub.listed([str(path) for path in found])
        )
    if not found:
        from hotcold.model.files.unsupported_formats import refuse_folder  # imports NumPy

        refuse_folder(directory)
    return found[0] if found else directory


def _holds_no_model(path: Path) -> bool:
    """Whether a GGUF file says that it is an adapter, a projector, or an imatrix."""
    from hotcold.model.config.gguf_config import no_model  # which takes long to import
    from hotcold.model.gguf.file import open_gguf  # imports NumPy

    try:
        return bool(no_model(open_gguf(path)))
    except CheckpointError:  # whoever opens the model will say so
        return False
