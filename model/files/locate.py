"""Finds the model that a user names: its directory, or its GGUF file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from model.errors import UsageError, shown
from model.gguf.file import SUFFIX, is_gguf, is_later_part

DEMO_DIRECTORY = Path(__file__).resolve().parents[2] / "demo"
_REPO_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<name>[\w.-]+))?")
_WANTED = ["*.json", "*.safetensors", "*.jinja"]
_IGNORED = ["*/*", "consolidated*"]  # other forms of the same weights
_MOST_LISTED = 12


def locate_model(text: str | None) -> Path:
    """Return a model's directory or GGUF file: a path, `org/repo[:NAME]`, or None for the demo.

    A directory that holds no config.json but one GGUF model stands for that model; NAME is a part
    of a file's name. A repository is downloaded once into huggingface_hub's cache: config,
    tokenizer and safetensors, or .bin files where it has no safetensors, or a GGUF file.
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
    named = _REPO_ID.fullmatch(text)
    if named:
        return _download(named["repo"], named["name"])
    raise UsageError(
        f"{shown(text)} is neither a directory nor a .gguf file nor an org/repo id of Hugging Face"
    )


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
            + _listed(str(path) for path in found)
        )
    return found[0] if found else directory


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    rest = f" and {len(every) - _MOST_LISTED} more" if len(every) > _MOST_LISTED else ""
    return ", ".join(every[:_MOST_LISTED]) + rest


def _download(repo_id: str, name: str | None) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and needed only here

    try:
        if name is None:
            found = Path(
                snapshot_download(repo_id, allow_patterns=_WANTED, ignore_patterns=_IGNORED)
            )
            if any(found.glob("*.safetensors")):
                return found
            if not (wanted := _gguf_names(repo_id, None)) or (found / "config.json").exists():
                return Path(snapshot_download(repo_id, allow_patterns=["pytorch_model*.bin"]))
        else:
            wanted = _gguf_names(repo_id, name)
        return Path(snapshot_download(repo_id, allow_patterns=wanted)) / wanted[0]
    except UsageError:
        raise
    except Exception as problem:  # of any of the libraries below it
        lines = str(problem).strip().splitlines()
        reason = shown(lines[0], 120) if lines else type(problem).__name__
        raise UsageError(
            f"{repo_id} is no directory here and cannot be fetched from Hugging Face: {reason}; "
            "check the name and the network, or give a directory"
        ) from None


def _gguf_names(repo_id: str, name: str | None) -> list[str]:
    """The files of the repository's GGUF model, its first part first; none where it has none.

    Errors:  UsageError where several are, or none with `name`
    """
    from huggingface_hub import list_repo_files

    every = sorted(file for file in list_repo_files(repo_id) if file.endswith(SUFFIX))
    firsts = [file for file in every if not is_later_part(Path(file))]
    fitting = [file for file in firsts if (name or "").lower() in Path(file).name.lower()]
    exact = [file for file in fitting if name in (Path(file).stem, Path(file).name)]
    if len(exact) == 1:
        fitting = exact
    if not firsts and name is None:
        return []
    if len(fitting) != 1:
        raise UsageError(
            f"{repo_id} holds {len(fitting) or 'no'} GGUF models"
            + (f" of the name {name!r}" if name else "")
            + f"; choose one by {repo_id}:NAME: {_listed(firsts)}"
        )
    stem = re.sub(r"-00001-of-\d{5}$", "", Path(fitting[0]).stem)
    folder = Path(fitting[0]).parent
    parts = [
        file
        for file in every
        if Path(file).parent == folder
        and re.fullmatch(re.escape(stem) + r"(-\d{5}-of-\d{5})?", Path(file).stem)
    ]
    return [fitting[0], *(part for part in parts if part != fitting[0])]
