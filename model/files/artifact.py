"""Artifacts: files made from one model and valid for it alone, as its profile, predictors, plans.

Each is a safetensors file whose metadata has its kind, its version, and the model it was made from.
`artifact_places` says where they lie.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.model.config.build import config_values
from hotcold.model.errors import ArtifactError, first_line, shown
from hotcold.model.files.artifact_places import ARTIFACTS
from hotcold.model.files.atomic_write import write_atomic
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.files.locate import resolved_model
from hotcold.model.files.weights_digest import ModelFiles, weights_digest

VERSION = 1
_KEY = "hotcold"
_SAMPLED_TENSORS, _SAMPLED_BYTES = 64, 1024
_HEAD_BYTES = 1 << 20
# The command that makes each kind of file.
COMMANDS = {
    "profile": "hotcold profile",
    "inputs": "hotcold profile",
    "predictors": "hotcold train-predictors",
    "thresholds": "hotcold profile",
    "plan": "hotcold plan",
}


def sampled_digest(path: str | Path) -> str:
    """Of a file's first MiB, with its header, and of its size; "" for no file. Errors: OSError."""
    if not path:
        return ""
    with Path(path).open("rb") as file:
        head, size = file.read(_HEAD_BYTES), os.fstat(file.fileno()).st_size
    return hashlib.sha256(head + str(size).encode()).hexdigest()


@dataclass(frozen=True)
class ModelIdentity:
    """A model, and its files in the state in which they were read.

    Models of different digests differ; models of one digest have the same config, tensors' names
    and shapes, and probably weights. Equal `content` means the same weights, to the last bit.
    """

    name: str
    digest: str  # 64 hexadecimal digits
    files: ModelFiles | None = field(default=None, compare=False)

    @classmethod
    def of(cls, model_path: str | Path) -> ModelIdentity:
        """Identify a model: a directory or a GGUF file.

        The digest covers config.json or a GGUF file's metadata, all tensors' names, formats and
        shapes, and the first kilobyte of some of them, where two fine-tunings of a model differ.
        Errors:  ConfigError, CheckpointError
        """
        path = Path(model_path)
        config, _ = config_values(path)
        checkpoint = Checkpoint(path)
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
        names = checkpoint.names()
        for name in names:
            digest.update(
                f"{name} {checkpoint.format_name(name)} {checkpoint.shape(name)}".encode()
            )
        for name in names[:: max(1, len(names) // _SAMPLED_TENSORS)]:
            digest.update(checkpoint.first_bytes(name, _SAMPLED_BYTES))
        files = ModelFiles.of(checkpoint)
        return cls(resolved_model(path).name, digest.hexdigest(), files)

    @property
    def content(self) -> str:
        """A digest of all weights too: it reads the model, or is cached.

        Errors:  CheckpointError where the model's files have changed since
        """
        if self.files is None:
            return self.digest
        return hashlib.sha256(f"{self.digest} {weights_digest(self.files)}".encode()).hexdigest()

    @property
    def state(self) -> str:
        """Equal while the model's files are untouched; a copy has another."""
        return self.digest if self.files is None else self.files.digest

    def facts(self) -> dict[str, Any]:
        """What an artifact's metadata says of its model. Errors: those of `content`."""
        return {
            "model_name": self.name,
            "model_digest": self.digest,
            "model_content": self.content,
        }

    def require_own(self, path: Path, facts: Mapping[str, Any], remedy: str) -> None:
        """Raise unless the file at `path`, with metadata `facts`, was made from this model.

        `remedy` ends the error's text. Files of earlier versions have no model_content: they are
        accepted where all files of the model are older.
        Errors:  ArtifactError; CheckpointError as of `content`
        """
        content = facts.get("model_content")
        is_own = facts.get("model_digest") == self.digest
        if not is_own or content not in (None, self.content):
            text = belongs_elsewhere(facts.get("model_name"), self)
            raise ArtifactError(f"{path}: {text}; {remedy}")
        if content is None and self.files and path.stat().st_mtime_ns <= self.files.changed_ns:
            raise ArtifactError(
                f"{path}: may belong to other weights: it does not name them, and the model's "
                f"files have changed since it was made; {remedy}"
            )


def belongs_elsewhere(name: object, identity: ModelIdentity) -> str:
    """The error text for a file of the model `name` where `identity` is needed."""
    if name == identity.name:
        differs = "whose config.json or weights differ"
        return f"belongs to the model {shown(name)}, not to this {shown(name)}, {differs}"
    return f"belongs to the model {shown(name)}, not to {shown(identity.name)}"


@dataclass(frozen=True)
class Artifact:
    """An artifact's content: arrays by name, and facts in JSON."""

    path: Path
    tensors: dict[str, np.ndarray]
    facts: dict[str, Any]

    def tensor(self, name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Return the array `name`. Errors: ArtifactError unless it has this dtype and shape."""
        found = self.tensors.get(name)
        if found is None:
            raise ArtifactError(f"{self.path}: holds no {shown(name)}; make it again")
        if found.dtype != dtype or found.shape != shape:
            raise ArtifactError(
                f"{self.path}: {shown(name)} is {found.dtype} {found.shape}, not "
                f"{np.dtype(dtype)} {shape}; make it again"
            )
        return found

    def fact(self, name: str, kind: type) -> Any:
        """Return the fact `name`. Errors: ArtifactError unless it is an instance of `kind`."""
        found = self.facts.get(name)
        if not isinstance(found, kind):
            raise ArtifactError(
                f"{self.path}: its {shown(name)} is missing or wrong; make it again"
            )
        return found


def write_artifact(
    path: Path,
    kind: str,
    identity: ModelIdentity,
    tensors: Mapping[str, np.ndarray],
    facts: Mapping[str, Any],
) -> None:
    """Write an artifact of `kind` (a key of COMMANDS) atomically.

    Errors:  ArtifactError where it cannot be written
    """
    from safetensors.numpy import save

    about = {"kind": kind, "version": VERSION, **identity.facts(), "facts": dict(facts)}
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    content = save(contiguous, {_KEY: json.dumps(about, allow_nan=False)})
    try:
        write_atomic(path, content)
    except OSError as problem:
        raise ArtifactError(
            f"{path}: cannot be written ({problem.strerror}); give another place with --out, or "
            f"for all of a model's files in {ARTIFACTS}"
        ) from None


def read_artifact(path: Path, kind: str, identity: ModelIdentity, prefix: str = "") -> Artifact:
    """Read an artifact of `kind` of the model `identity`: facts, and arrays named `prefix`...

    Errors:  ArtifactError where it is missing, damaged, of another kind, version or model
    """
    facts, tensors = _open(path, kind, identity, prefix)
    return Artifact(path, tensors, facts)


def check_artifact(path: Path, kind: str, identity: ModelIdentity) -> dict[str, Any]:
    """Return an artifact's facts without reading arrays. Errors: those of `read_artifact`."""
    return _open(path, kind, identity, None)[0]


def _open(
    path: Path, kind: str, identity: ModelIdentity, prefix: str | None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    command = COMMANDS[kind]
    about, tensors = _read(path, kind, command, prefix)
    if about.get("kind") != kind:
        raise ArtifactError(
            f"{path}: is a {shown(about.get('kind'))} file, not a {kind} file; make one with "
            f"`{command}`"
        )
    if about.get("version") != VERSION:
        raise ArtifactError(
            f"{path}: is of version {shown(about.get('version'))}, this program reads version "
            f"{VERSION}; make it again with `{command}`"
        )
    identity.require_own(path, about, f"make one for it with `{command}`")
    facts = about.get("facts")
    if not isinstance(facts, dict):
        raise ArtifactError(f"{path}: holds no facts; make it again with `{command}`")
    return facts, tensors


def _read(
    path: Path, kind: str, command: str, prefix: str | None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ArtifactError(f"{path}: there is no {kind} file; make one with `{command}`")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            names = list(file.keys()) if prefix is not None else []
            names = [name for name in names if name.startswith(prefix or "")]
            tensors = {name: file.get_tensor(name) for name in names}
        about = json.loads(metadata.get(_KEY, ""))
    except (
        SafetensorError, OSError, ValueError, RecursionError,
        TypeError, AttributeError,  # formats that NumPy does not have
    ) as problem:  # fmt: skip
        reason = first_line(problem, 80)
        raise ArtifactError(
            f"{path}: is no {kind} file, or a damaged one ({reason}); make it again with "
            f"`{command}`"
        ) from None
    if not isinstance(about, dict):
        raise ArtifactError(f"{path}: is no {kind} file; make one with `{command}`")
    return about, tensors
