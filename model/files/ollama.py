"""Ollama's models: GGUF files named by their digest, found by Ollama's own names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hotcold.model.config.json_reader import read_json_object
from hotcold.model.errors import CheckpointError, UsageError, shown

PREFIX = "ollama:"
_HOST, _SPACE, _TAG = "registry.ollama.ai", "library", "latest"
_NAME = re.compile(
    r"(?:(?:(?P<host>[^/:]+)/)?(?P<space>[^/:]+)/)?(?P<model>[^/:]+)(?::(?P<tag>[^/:]+))?"
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MEDIA = "application/vnd.ollama.image."
_MAX_NAMED = 20
# Of Ollama's system service on Linux.
_SERVICE = Path("/usr/share/ollama/.ollama/models")


def ollama_file(name: str) -> Path:
    """The GGUF file of a model, as `ollama run` names it: NAME[:TAG], perhaps HOST/SPACE/NAME.

    Errors:  UsageError where there is none, CheckpointError where it is damaged
    """
    found = _NAME.fullmatch(name)
    if found is not None and not {".", ".."} & set(found.groupdict().values()):
        host, space = found["host"] or _HOST, found["space"] or _SPACE
        for folder in _folders():
            manifest = folder / "manifests" / host / space / found["model"] / (found["tag"] or _TAG)
            if manifest.is_file():
                return file_of_manifest(manifest)
    raise UsageError(f"Ollama has no model {shown(name)}; {_there()}")


def is_manifest(path: Path) -> bool:
    """Whether a file lies in Ollama's folder of manifests."""
    parents = path.absolute().parents
    return len(parents) > 3 and parents[3].name == "manifests"


def file_of_manifest(manifest: Path) -> Path:
    """The GGUF file that a manifest names. Errors: UsageError, CheckpointError."""
    layers: Any = read_json_object(manifest, CheckpointError).get("layers")
    kinds = {
        layer.get("mediaType"): layer.get("digest")
        for layer in (layers if isinstance(layers, list) else [])
        if isinstance(layer, dict) and isinstance(layer.get("mediaType"), str)
    }
    if f"{_MEDIA}adapter" in kinds:
        raise UsageError(f"{manifest}: has an adapter beside its model, which is not supported")
    digest = kinds.get(f"{_MEDIA}model")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise CheckpointError(f"{manifest}: names no model; pull it again")
    file = manifest.absolute().parents[4] / "blobs" / digest.replace(":", "-")
    if not file.is_file():
        raise CheckpointError(f"{manifest}: its file {file} is not there; pull it again")
    return file


def _folders() -> list[Path]:
    """The folders in which Ollama may store models."""
    chosen = os.environ.get("OLLAMA_MODELS")
    return [Path(chosen)] if chosen else [Path.home() / ".ollama" / "models", _SERVICE]


def _there() -> str:
    """The names of Ollama's models, for an error text."""
    names = []
    for folder in _folders():
        for path in sorted((folder / "manifests").glob("*/*/*/*")):
            host, space, model, tag = path.parts[-4:]
            before = [] if (host, space) == (_HOST, _SPACE) else [host, space]
            names.append(f"{PREFIX}{'/'.join([*before, model])}:{tag}")
    if not names:
        return f"there is none in {' or '.join(map(str, _folders()))} (OLLAMA_MODELS)"
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"there are: {', '.join(names[:_MAX_NAMED])}{more}"
