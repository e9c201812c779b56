"""Writes a copy of a model directory with quantized matrices.

Every projection becomes a tensor U8 [rows, row bytes] of the same name, in the layout of
`numba_kernels/formats.py`; down projections are transposed, so that their rows are neurons, and
stacked ones of experts are U8 [experts, rows, row bytes]. Other tensors and small files are copied.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotcold.model.config.build import read_config
from hotcold.model.config.families import tensor_names
from hotcold.model.config.json_reader import read_json_object
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.quantization import KEY, quantization_config
from hotcold.model.config.weight_formats import requested_dtype
from hotcold.model.errors import HotcoldError, UsageError
from hotcold.model.files.atomic_write import part_of, sync_folder
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.files.safetensors_writer import (
    SafetensorsWriter,
    TensorSpec,
    require_disk_space,
)
from hotcold.model.files.side_files import require_own
from hotcold.model.gguf.file_names import is_gguf
from hotcold.model.weights.attention import projections
from hotcold.model.weights.check import check_tensors, stored_config
from hotcold.model.weights.embedding import head_name
from hotcold.model.weights.ffn_tensors import ffn_tensors
from hotcold.model.weights.tensor_reader import TensorReader
from hotcold.numba_kernels.formats import WeightDtype, is_blocks, row_items

_MAX_FILE_BYTES = 256 << 20
_WEIGHT_FILES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".onnx",
    ".h5",
    ".msgpack",
    ".part",
)


@dataclass(frozen=True)
class QuantizedReport:
    """Bytes of all tensors before and after, and numbers of tensors."""

    stored_bytes: int
    num_bytes: int
    num_quantized: int  # tensors
    num_copied: int


def write_quantized(
    path: Path,
    out: Path,
    dtype: WeightDtype,
    on_bytes: Callable[[int, int], None] = lambda written, total: None,
) -> QuantizedReport:
    """Write the model `path` with matrices in `dtype`, a quantized one, to the new directory `out`.

    `on_bytes` gets the bytes written and their total. All is written to a directory beside `out`
    that ends in .part, and renamed at the end, so `out` is complete or does not exist.
    Units:   needs the memory of the largest quantized matrix
    Errors:  ConfigError, CheckpointError; UsageError where `out` exists, or the model cannot be in
             this dtype; HotcoldError where the disk has too little space
    """
    if is_gguf(path):
        raise UsageError(
            f"{path} is a GGUF file, whose formats are read as they are; give it to a command, "
            f"with --dtype {dtype} if it is stored in more bits"
        )
    checkpoint, config = Checkpoint(path), read_config(path)
    check_tensors(checkpoint, config)
    stored = stored_config(checkpoint, config, dtype)
    if checkpoint.quantized_dtype is not None:
        raise UsageError(f"{path} is quantized to {stored.dtype} already; name the original model")
    if kinds := _formats_of_blocks(checkpoint):
        raise UsageError(
            f"{path} has weights in {', '.join(kinds)}, which are read as they are; give "
            f"it to a command, with --dtype {dtype} if all weights are to be in it"
        )
    plan = _plan(checkpoint, config, dtype)
    part = _new_directory(out)
    try:
        _copy_small_files(path, part)
        report = _write_tensors(checkpoint, plan, dtype, part, on_bytes)
        values = read_json_object(path / "config.json") | {KEY: quantization_config(dtype)}
        (part / "config.json").write_text(json.dumps(values, indent=2) + "\n")
        _finish(part, out)
    except OSError as problem:
        raise HotcoldError(
            f"{out}: cannot be written ({problem.strerror}); name a directory on another disk"
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return report


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the copy. A matrix has a width, in weights; others are copied."""

    spec: TensorSpec
    width: int = 0
    stack: int = 0  # matrices in it; 0: it is one
    by_columns: bool = False
    rows_of: str = ""  # whose last rows it has, as they are; "": its own


def _formats_of_blocks(checkpoint: Checkpoint) -> list[str]:
    readable = filter(checkpoint.is_readable, checkpoint.names())
    names = [name for name in readable if is_blocks(checkpoint.dtype(name))]
    return sorted(set(map(checkpoint.format_name, names)))


def _plan(checkpoint: Checkpoint, config: ModelConfig, dtype: WeightDtype) -> list[_Tensor]:
    """Return the copy's tensors, by name, without those of unsupported formats."""
    names, target = tensor_names(config), requested_dtype(dtype)
    assert target is not None
    matrices: dict[str, tuple[int, bool]] = {}  # their stacks, and whether columns become rows
    for layer in range(config.num_layers):
        own, ffn = names.of_layer(layer), ffn_tensors(checkpoint, config, layer)
        inputs, out = projections(own, config.layers[layer])
        for name in filter(None, (*inputs, out)):
            matrices[checkpoint.full_name(f"{name}.weight")] = 0, False
        for tensor in (*ffn.gate, *ffn.up, *ffn.down):
            matrices[checkpoint.full_name(tensor.name)] = tensor.stack, tensor.by_columns
    head = head_name(checkpoint, config)
    if head != f"{names.tokens}.weight":
        matrices[checkpoint.full_name(head)] = 0, False
    plan = [*_gates(checkpoint, config)]
    for name in checkpoint.names():
        shape = checkpoint.shape(name)
        if name in matrices:
            stack, by_columns = matrices[name]
            num_rows, width = shape[-2:][::-1] if by_columns else shape[-2:]
            rows = *shape[:-2], num_rows, row_items(target, width)
            plan.append(_Tensor(TensorSpec(name, rows, "U8"), width, stack, by_columns))
        elif checkpoint.is_readable(name):
            plan.append(_Tensor(TensorSpec(name, shape, checkpoint.format_name(name))))
    return plan


def _gates(checkpoint: Checkpoint, config: ModelConfig) -> Iterator[_Tensor]:
    """Gates that are rows of a matrix, in tensors of their own: they are not quantized."""
    for layer in config.recurrent_layers:
        names, spec = tensor_names(config).of_layer(layer).recurrent, config.recurrent
        if names is not None and spec is not None and spec.num_others:
            name = checkpoint.full_name(f"{names.inputs[0]}.weight")
            shape = spec.num_others, config.hidden_size
            yield _Tensor(TensorSpec(f"{name}.gates", shape, "F32"), rows_of=name)


def _write_tensors(
    checkpoint: Checkpoint,
    plan: list[_Tensor],
    dtype: WeightDtype,
    part: Path,
    on_bytes: Callable[[int, int], None],
) -> QuantizedReport:
    written = 0

    def count(num_bytes: int) -> None:
        nonlocal written
        written += num_bytes
        on_bytes(written, writer.num_bytes)

    specs = [tensor.spec for tensor in plan]
    with (
        SafetensorsWriter(part, specs, "float32", on_bytes=count) as writer,
        TensorReader(checkpoint, dtype=requested_dtype(dtype)) as reader,
    ):
        remedy = "name a directory on another disk"
        require_disk_space(part.parent, writer.num_bytes, remedy)
        for tensor in plan:
            writer.write_bits(tensor.spec.name, _bits(reader, tensor))
    num_quantized = sum(tensor.width > 0 for tensor in plan)
    return QuantizedReport(
        stored_bytes=sum(checkpoint.num_bytes(one.spec.name) for one in plan if not one.rows_of),
        num_bytes=writer.num_bytes,
        num_quantized=num_quantized,
        num_copied=len(plan) - num_quantized,
    )


def _bits(reader: TensorReader, tensor: _Tensor) -> np.ndarray:
    """Return the tensor's content in the copy, its values checked."""
    name, stack, shape = tensor.spec.name, tensor.stack, tensor.spec.shape
    if source := tensor.rows_of:
        total, gates = reader.checkpoint.shape(source)[0], np.empty(shape, np.float32)
        reader.rows(source, total, gates, np.arange(total - len(gates), total, dtype=np.int32))
        return gates
    if not tensor.width:
        return reader.checked(name)
    num_rows = shape[-2]
    rows = reader.matrix((max(1, stack) * num_rows, tensor.width), name)
    if tensor.by_columns:
        ids = np.arange(num_rows, dtype=np.int32)
        with reader.together():
            for index, part in enumerate(np.split(rows, max(1, stack))):
                reader.columns(name, num_rows, part, ids, stack, index)
    else:
        reader.rows(name, num_rows, rows, stack=stack)
    return rows.view(np.uint8).reshape(shape)


def _new_directory(out: Path) -> Path:
    """Make a directory beside `out`. Errors: UsageError where `out` exists."""
    if os.path.lexists(out):
        raise UsageError(f"{out} exists; name a new directory")
    part = part_of(out)
    try:
        part.mkdir(parents=True)
    except OSError as problem:
        raise UsageError(f"{out}: cannot be made ({problem.strerror}); name another") from None
    return part


def _finish(part: Path, out: Path) -> None:
    if os.path.lexists(out):  # made by another process meanwhile
        raise UsageError(f"{out} exists; name a new directory")
    for file in part.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    sync_folder(part)
    part.rename(out)
    sync_folder(out.parent)


def _copy_small_files(path: Path, part: Path) -> None:
    """Copy tokenizer, generation settings, licence: files without weights.

    Folders are left out: profile and predictors in `hotcold` are those of the original's weights.
    Errors:  ConfigError for a link out of the folder
    """
    for file in sorted(path.iterdir()):
        name = file.name
        is_weights = name.endswith(_WEIGHT_FILES) or name.endswith(".index.json")
        if name == "config.json" or is_weights or not file.is_file():
            continue
        if file.stat().st_size <= _MAX_FILE_BYTES:
            shutil.copyfile(require_own(file), part / name)
