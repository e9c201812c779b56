"""Files and folders that look like a model: what each is, and what to give instead."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hotcold.model.config.gguf_config import architecture_of
from hotcold.model.config.json_reader import read_json_object
from hotcold.model.errors import (
    CheckpointError,
    ConfigError,
    UsageError,
    refuse_pointer_file,
    shown,
)
from hotcold.model.files import hub
from hotcold.model.gguf.file import GgufModel, open_gguf
from hotcold.model.gguf.file_names import SUFFIX, is_later_part, models_among, quantization_of
from hotcold.model.gguf.tensor_types import READ_NAMES, is_read_of_name

_BEFORE_GGUF = (b"lmgg", b"fmgg", b"tjgg", b"algg")
_ADAPTER = "adapter_config.json"
_PROPER = "give the folder in Hugging Face's form, with config.json and model.safetensors"
# By a file in it, the first that matches: what such a folder is, and what to do.
_FOLDERS = (
    ("model_index.json", "is a pipeline of diffusers, which makes pictures; give a language model"),
    ("consolidated.*", f"holds weights in their makers' own form; {_PROPER}"),
    ("*.onnx", f"holds a model for ONNX; {_PROPER}"),
    ("onnx/*.onnx", f"holds a model for ONNX; {_PROPER}"),
    ("weights*.npz", f"holds a model for MLX; {_PROPER}"),
    ("checkpoint-*/config.json", "holds checkpoints of a training; give one of these folders"),
    ("trainer_state.json", f"holds a training's state without its model; {_PROPER}"),
    ("optimizer.pt", f"holds a training's state without its model; {_PROPER}"),
    ("snapshots/*", "is a folder of Hugging Face's cache; give ORG/REPO, or one of the folders in "
     "its snapshots"),
    ("manifests/*", "is a folder of Ollama's; give ollama:NAME"),
)  # fmt: skip
_WITHOUT_CONFIG = (
    ("params.json", f"holds weights in their makers' own form; {_PROPER}"),
    ("*.safetensors", "holds weights without config.json; download that, too"),
    ("*.bin", "holds weights without config.json; download that, too"),
    ("tokenizer*.json", "holds a tokenizer alone; give the folder of its model"),
)


def refuse_file(path: Path, text: str) -> UsageError:
    """Return the error of a file that is no model. Errors: CheckpointError for a pointer."""
    refuse_pointer_file(path, CheckpointError)
    with path.open("rb") as file:
        magic = file.read(4)
    if magic in _BEFORE_GGUF:
        return UsageError(f"{shown(text)} is in llama.cpp's format before GGUF; give a GGUF file")
    folder = "the directory that holds config.json"
    if (path.parent / "config.json").exists():
        folder = f"its directory, {path.parent}"
    return UsageError(f"{shown(text)} is a file, and no GGUF file; give one, or {folder}")


def refuse_folder(directory: Path) -> None:
    """Raise UsageError where a directory without a model's weights is of a known kind."""
    if (directory / _ADAPTER).exists():
        try:
            base = read_json_object(directory / _ADAPTER).get("base_model_name_or_path")
        except ConfigError:
            base = None
        of = f" of {shown(base)[1:-1]}" if isinstance(base, str) and base else ""
        raise UsageError(
            f"{directory}: is an adapter{of}, and no model; merge it into its model (peft's "
            "merge_and_unload), and give that folder"
        )
    lacks_config = not (directory / "config.json").exists()
    for pattern, what in (*_FOLDERS, *(_WITHOUT_CONFIG if lacks_config else ())):
        if next(directory.glob(pattern), None) is not None:
            raise UsageError(f"{directory}: {what}")


def refuse_types(path: Path) -> CheckpointError:
    """Return the error of a GGUF file with tensors in types that are not read."""
    model = open_gguf(path)
    unread = _unread(model)
    types = ", ".join(f"{name} ({count})" for name, count in unread.most_common())
    found = _others_that_load(path)
    if found:
        instead = f"take one that loads: {hub.listed(found)}"
    else:
        instead = f"take a file in these: {', '.join(READ_NAMES)}"
    return CheckpointError(
        f"{path}: {unread.total()} of {len(model.names)} tensors are of types that are not read: "
        f"{types}; {instead}"
    )


def _unread(model: GgufModel) -> Counter[str]:
    """How many tensors have each type that is not read."""
    kinds = (model.file_of(name).tensors[name].type for name in model.names)
    return Counter(kind.name for kind in kinds if kind.dtype is None)


def _others_that_load(path: Path) -> list[str]:
    """GGUF models of the same folder, by their headers, else of its repository, by their names."""
    files = sorted(each.name for each in path.parent.glob(f"*{SUFFIX}") if not is_later_part(each))
    beside = [path.with_name(name) for name in models_among(files) if name != path.name]
    found = [str(each) for each in beside if _loads(each)]
    repository = () if found else hub.ggufs_beside(path)
    return found or [name for name in repository if is_read_of_name(quantization_of(name))]


def _loads(path: Path) -> bool:
    try:
        model = open_gguf(path)
        architecture_of(model)
    except (CheckpointError, ConfigError):
        return False
    return not _unread(model)
