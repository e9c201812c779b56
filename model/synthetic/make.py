"""Writes a checkpoint of any size with random weights that behave like a sparse model's."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from hotcold.model.config.build import build_config
from hotcold.model.errors import HotcoldError, UsageError
from hotcold.model.files.safetensors_writer import SafetensorsWriter, TensorSpec, require_disk_space
from hotcold.model.sparsity import MAX_DENSITY, MIN_DENSITY
from hotcold.model.synthetic.routing import Routing
from hotcold.model.synthetic.shape import SyntheticShape, config_json
from hotcold.model.synthetic.weights import RandomModel
from hotcold.numba_kernels.formats import WeightDtype

_REMEDY = "give fewer --layers or another disk"
_OUR_FILES = ("model*.safetensors", "model*.part", "model.safetensors.index.json", "*config.json")


@dataclass(frozen=True)
class SyntheticReport:
    """The sizes of what was written, and how a mixture's experts are chosen."""

    num_bytes: int
    num_parameters: int
    routing: Routing | None


@torch.inference_mode()
def make_model(
    out: Path,
    shape: SyntheticShape,
    dtype: WeightDtype = "float16",
    seed: int = 0,
    force: bool = False,
    on_bytes: Callable[[int, int], None] = lambda written, total: None,
) -> SyntheticReport:
    """Write a Hugging Face directory with random weights to `out`.

    `on_bytes` gets the bytes written and their total. config.json is written last, so an incomplete
    directory is no model.
    Units:   needs about twice the bytes of the largest float32 tensor in memory
    Errors:  UsageError for a density out of range or a directory in use; HotcoldError where the
             disk has too little space. After any error no file of the new model is left
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; name a directory")
    is_new = not out.exists()
    if not is_new and any(out.iterdir()) and not force:
        raise UsageError(f"{out} is not empty; name another directory or give --force")
    values = config_json(shape, dtype)
    config = build_config(values)
    # Of drelu's neurons those fire whose up . x is above 0, too: half of them.
    most = MAX_DENSITY / 2 if config.activation_fn == "drelu" else MAX_DENSITY
    if not MIN_DENSITY <= shape.density <= most:
        raise UsageError(
            f"--density must be between {MIN_DENSITY} and {most} in this family, "
            f"not {shape.density}"
        )
    model = RandomModel(config, shape, seed)
    specs = [TensorSpec(tensor.name, tensor.shape) for tensor in model.tensors()]
    num_parameters = sum(spec.num_items for spec in specs)
    total_bytes = num_parameters * getattr(torch, dtype).itemsize
    old_bytes = sum(path.lstat().st_size for path in _our_files(out))
    require_disk_space(out, total_bytes, _REMEDY, old_bytes)
    written = 0

    def count(num_bytes: int) -> None:
        nonlocal written
        written += num_bytes
        on_bytes(written, total_bytes)

    try:
        _remove_ours(out)
        out.mkdir(parents=True, exist_ok=True)
        with SafetensorsWriter(out, specs, dtype, on_bytes=count) as writer:
            for tensor in model.tensors():
                writer.write(tensor.name, tensor.draw())
        greedy = {key: values[key] for key in ("bos_token_id", "eos_token_id")}
        _write_json(out / "generation_config.json", greedy | {"do_sample": False})
        _write_json(out / "config.json", values | {"firing_share": shape.density})
    except BaseException as problem:
        _remove_ours(out)
        if is_new:
            with suppress(OSError):
                out.rmdir()
        if isinstance(problem, OSError):
            raise HotcoldError(
                f"{out}: cannot be written ({problem.strerror}); {_REMEDY}"
            ) from None
        raise
    return SyntheticReport(total_bytes, num_parameters, model.routing)


def _our_files(out: Path) -> list[Path]:
    """What this, or an earlier run, wrote there."""
    return [path for pattern in _OUR_FILES for path in out.glob(pattern)]


def _remove_ours(out: Path) -> None:
    for path in _our_files(out):
        path.unlink(missing_ok=True)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
