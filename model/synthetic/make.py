"""Writes a checkpoint of any size with random weights that behave like a sparse model's.

Its neurons fire at rates that follow a power law with a chosen mean; see gate.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from hotcold.model.config.build import build_config
from hotcold.model.config.families.tensor_names import TensorNames
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import HotcoldError, UsageError
from hotcold.model.files.safetensors_writer import SafetensorsWriter, require_disk_space
from hotcold.model.sparsity import MAX_DENSITY, MIN_DENSITY
from hotcold.model.synthetic.layers import NUM_TOKENS, FiringStats, LayerMaker
from hotcold.model.synthetic.random_source import NormalSource
from hotcold.model.synthetic.shape import SyntheticShape, config_json, generation_config_json
from hotcold.model.synthetic.tensor_specs import tensor_specs, written_names
from hotcold.numba_kernels.formats import WeightDtype

_POSITIONS_RMS = 0.3
_LOGITS_RMS = 3.0  # about a trained model's
_OUR_FILES = ("model*.safetensors", "model*.part", "model.safetensors.index.json", "*config.json")


@dataclass(frozen=True)
class SyntheticReport:
    """Sizes, and how each layer's neurons fire on tokens that were not fitted."""

    num_bytes: int
    num_parameters: int
    layers: tuple[FiringStats, ...]

    @property
    def density(self) -> float:
        """Share of all neurons that fires for a token."""
        return sum(layer.density for layer in self.layers) / len(self.layers)


def make_model(
    out: Path,
    shape: SyntheticShape,
    *,
    density: float = 0.1,
    dtype: WeightDtype = "float16",
    seed: int = 0,
    force: bool = False,
    on_bytes: Callable[[int, int], None] = lambda written, total: None,
) -> SyntheticReport:
    """Write a Hugging Face directory with random weights to `out`.

    `on_bytes` gets the bytes written and their total. config.json is written last, so an incomplete
    directory is no model.
    Units:   needs about twice the largest tensor's float32 bytes of memory
    Errors:  UsageError for a density out of range or a directory in use; HotcoldError where the
             disk has too little space. After any error no file of the new model is left
    """
    if not MIN_DENSITY <= density <= MAX_DENSITY:
        raise UsageError(
            f"--density must be between {MIN_DENSITY} and {MAX_DENSITY}, not {density}"
        )
    written_config = config_json(shape, dtype)
    config = build_config(written_config)
    specs = tensor_specs(config)
    num_parameters = sum(spec.num_items for spec in specs)
    total_bytes = num_parameters * getattr(torch, dtype).itemsize
    is_new = not out.exists()
    _prepare_directory(out, total_bytes, force)
    written = 0

    def count(num_bytes: int) -> None:
        nonlocal written
        written += num_bytes
        on_bytes(written, total_bytes)

    try:
        with torch.inference_mode(), SafetensorsWriter(out, specs, dtype, on_bytes=count) as writer:
            layers = _write_tensors(config, density, NormalSource(seed), writer)
        _write_json(out / "generation_config.json", generation_config_json(shape))
        _write_json(out / "config.json", written_config)
    except BaseException as problem:
        _remove(_old_files(out), out if is_new else None)
        if isinstance(problem, OSError):
            raise HotcoldError(
                f"{out}: cannot be written ({problem.strerror}); give fewer --layers or another "
                "disk"
            ) from None
        raise
    return SyntheticReport(total_bytes, num_parameters, tuple(layers))


def _write_tensors(
    config: ModelConfig, density: float, source: NormalSource, writer: SafetensorsWriter
) -> list[FiringStats]:
    names = written_names(config)
    hidden_states = _embed(config, names, source, writer)
    maker = LayerMaker(config, density, source, writer.write)
    layers = [
        maker.make(names.of_layer(layer), hidden_states) for layer in range(config.num_layers)
    ]
    _write_head(config, names, hidden_states, source, writer)
    return layers


def _embed(
    config: ModelConfig, names: TensorNames, source: NormalSource, writer: SafetensorsWriter
) -> torch.Tensor:
    """Write the embeddings and return those of random tokens, (NUM_TOKENS, D).

    RMSNorm has no bias, so embeddings get a common direction for gates, half of their energy. A
    tied head would then always favour some tokens; Llama's is not tied.
    """
    embedding = source.normal((config.vocab_size, config.hidden_size))
    if not config.norm_bias:
        embedding += source.normal((config.hidden_size,))
        embedding *= 0.5**0.5
    writer.write(f"{names.tokens}.weight", embedding)
    hidden_states = embedding[source.token_ids((NUM_TOKENS,), config.vocab_size)]
    if names.positions:
        rows = config.max_positions + config.position_offset
        positions = source.normal((rows, config.hidden_size), _POSITIONS_RMS)
        writer.write(f"{names.positions}.weight", positions)
        hidden_states += positions[source.token_ids((NUM_TOKENS,), rows)]
    return hidden_states


def _write_head(
    config: ModelConfig,
    names: TensorNames,
    hidden_states: torch.Tensor,
    source: NormalSource,
    writer: SafetensorsWriter,
) -> None:
    """Write final norm and head, such that greedy decoding does not repeat a few tokens.

    Untied: the head is orthogonal to the mean of its inputs. Tied: the norm's bias subtracts that
    mean, and its weight flips the sign of random components, so that a token's logits do not favour
    that token.
    """
    hidden = config.hidden_size
    scale = _LOGITS_RMS * hidden**-0.5
    if not names.head:
        weight = scale * source.signs(hidden)
        outputs = functional.layer_norm(hidden_states, (hidden,), weight)
        writer.write(f"{names.final_norm}.weight", weight)
        writer.write(f"{names.final_norm}.bias", -outputs.mean(dim=0))
        return
    writer.write(f"{names.final_norm}.weight", torch.ones(hidden))
    outputs = functional.rms_norm(hidden_states, (hidden,))
    direction = functional.normalize(outputs.mean(dim=0), dim=0)
    head = source.normal((config.vocab_size, hidden), scale)
    writer.write(f"{names.head}.weight", head.addr_(head @ direction, direction, alpha=-1))


def _prepare_directory(out: Path, num_bytes: int, force: bool) -> None:
    if out.is_dir() and any(out.iterdir()) and not force:
        raise UsageError(f"{out} is not empty; name another directory or give --force")
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; name a directory")
    old = _old_files(out)
    freed_bytes = sum(path.lstat().st_size for path in old)
    require_disk_space(out, num_bytes, "give fewer --layers or another disk", freed_bytes)
    _remove(old)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UsageError(f"{out}: cannot be made ({problem.strerror}); name another") from None


def _old_files(out: Path) -> list[Path]:
    """Files that an earlier run wrote there."""
    return [path for pattern in _OUR_FILES for path in out.glob(pattern)]


def _remove(files: Sequence[Path], folder: Path | None = None) -> None:
    """Remove the files, and then the folder if it is empty."""
    for path in files:
        path.unlink(missing_ok=True)
    if folder is not None:
        with suppress(OSError):
            folder.rmdir()


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
