"""Finds the directory of the model that a user names."""

from __future__ import annotations

import re
from pathlib import Path

from model.errors import UsageError, shown

DEMO_DIRECTORY = Path(__file__).resolve().parents[2] / "demo"
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.json", "*.safetensors", "*.jinja"]
_IGNORED = ["*/*", "consolidated*"]  # other forms of the same weights


def locate_model(text: str | None) -> Path:
    """Return the directory of a model: a path, an `org/repo` id, or None for the embedded model.

    A repository is downloaded once into huggingface_hub's cache: config, tokenizer and safetensors,
    or .bin files where it has no safetensors.
    Errors:  UsageError where there is no such model or no network
    """
    if text is None:
        if not (DEMO_DIRECTORY / "config.json").exists():
            raise UsageError(f"{DEMO_DIRECTORY} holds no embedded model; name a model directory")
        return DEMO_DIRECTORY
    path = Path(text).expanduser()
    try:
        if text and path.is_dir():
            return path
        exists = bool(text) and path.exists()
    except (OSError, ValueError):  # a name that no file can have
        exists = False
    if exists:
        raise UsageError(f"{shown(text)} is a file; give the directory that holds config.json")
    if _REPO_ID.fullmatch(text):
        return _download(text)
    raise UsageError(f"{shown(text)} is neither a directory nor an org/repo id of Hugging Face")


def _download(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and needed only here

    try:
        found = Path(snapshot_download(repo_id, allow_patterns=_WANTED, ignore_patterns=_IGNORED))
        if not any(found.glob("*.safetensors")):
            found = Path(snapshot_download(repo_id, allow_patterns=["pytorch_model*.bin"]))
    except Exception as problem:  # of any of the libraries below it
        lines = str(problem).strip().splitlines()
        reason = shown(lines[0], 120) if lines else type(problem).__name__
        raise UsageError(
            f"{repo_id} is no directory here and cannot be fetched from Hugging Face: {reason}; "
            "check the name and the network, or give a directory"
        ) from None
    return found
