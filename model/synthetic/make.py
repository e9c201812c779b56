"""Writes a checkpoint of any size with random weights that behave like a sparse model's.

Its neurons fire at rates that follow a power law with a chosen mean; see gate.py. A mixture's
experts are chosen with a skew, and some are kept from token to token; see topics.py and router.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional

from hotcold.model.config.build import build_config
from hotcold.model.config.families.tensor_names import TensorNames
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import HotcoldError, UsageError
from hotcold.model.files.safetensors_writer import SafetensorsWriter, TensorSpec, require_disk_space
from hotcold.model.sparsity import MAX_DENSITY, MIN_DENSITY
from hotcold.model.synthetic.ffn import FiringStats
from hotcold.model.synthetic.layers import LayerMaker, normalization, written_names
from hotcold.model.synthetic.random_source import NormalSource
from hotcold.model.synthetic.router import RoutingStats
from hotcold.model.synthetic.shape import SyntheticShape, config_json, generation_config_json
from hotcold.model.synthetic.topics import SampleText, Topics
from hotcold.numba_kernels.formats import WeightDtype

_DENSE_TEXT = SampleText(num_sequences=16, sequence_tokens=12)
_POSITIONS_RMS = 0.3
_LOGITS_RMS = 3.0  # about a trained model's
_OUR_FILES = ("model*.safetensors", "model*.part", "model.safetensors.index.json", "*config.json")


_Write = Callable[[str, torch.Tensor], None]


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

    @property
    def routing(self) -> RoutingStats | None:
        """Means of all layers' routers; None without experts."""
        found = [layer.routing for layer in self.layers if layer.routing is not None]
        if not found:
            return None
        return RoutingStats(
            sum(each.skew for each in found) / len(found),
            sum(each.kept for each in found) / len(found),
        )


@torch.inference_mode()
def make_model(
    out: Path,
    shape: SyntheticShape,
    *,
    dtype: WeightDtype = "float16",
    seed: int = 0,
    force: bool = False,
    on_bytes: Callable[[int, int], None] = lambda written, total: None,
) -> SyntheticReport:
    """Write a Hugging Face directory with random weights to `out`.

    `on_bytes` gets the bytes written and their total. config.json is written last, so an incomplete
    directory is no model.
    Units:   needs about the bytes of one layer and of twice the largest float32 tensor in memory
    Errors:  UsageError for a density out of range or a directory in use; HotcoldError where the
             disk has too little space. After any error no file of the new model is left
    """
    if not MIN_DENSITY <= shape.density <= MAX_DENSITY:
        raise UsageError(
            f"--density must be between {MIN_DENSITY} and {MAX_DENSITY}, not {shape.density}"
        )
    written_config = config_json(shape, dtype)
    config = build_config(written_config)
    _require_free(out, force)
    drawn = dict[str, torch.Tensor]()
    writer: SafetensorsWriter | None = None

    def write(name: str, tensor: torch.Tensor) -> None:
        if writer is None:
            drawn[name] = tensor.to(getattr(torch, dtype))
        else:
            writer.write(name, tensor)

    made = _layers(config, shape, NormalSource(seed), write)
    layers = [next(made)]
    specs = _tensor_specs(config, drawn)
    num_parameters = sum(spec.num_items for spec in specs)
    total_bytes = num_parameters * getattr(torch, dtype).itemsize
    is_new = not out.exists()
    _prepare_directory(out, total_bytes)
    written = 0

    def count(num_bytes: int) -> None:
        nonlocal written
        written += num_bytes
        on_bytes(written, total_bytes)

    try:
        with SafetensorsWriter(out, specs, dtype, on_bytes=count) as writer:
            for name in list(drawn):
                writer.write(name, drawn.pop(name))
            layers.extend(made)
        _write_json(out / "generation_config.json", generation_config_json(shape))
        report = SyntheticReport(total_bytes, num_parameters, tuple(layers))
        share = {"firing_share": round(report.density, 4)}
        _write_json(out / "config.json", written_config | share)
    except BaseException as problem:
        _remove(_old_files(out), out if is_new else None)
        if isinstance(problem, OSError):
            raise HotcoldError(
                f"{out}: cannot be written ({problem.strerror}); give fewer --layers or another "
                "disk"
            ) from None
        raise
    return report


def _tensor_specs(config: ModelConfig, drawn: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """Return all tensors in the order of writing: other layers are as the first, which is drawn."""
    names, hidden = written_names(config), config.hidden_size
    specs = [TensorSpec(name, tuple(tensor.shape)) for name, tensor in drawn.items()]
    first = names.layers.format(0)
    of_layer = [spec for spec in specs if spec.name.startswith(first)]
    for layer in range(1, config.num_layers):
        prefix = names.layers.format(layer)
        specs += [replace(one, name=prefix + one.name.removeprefix(first)) for one in of_layer]
    specs.append(TensorSpec(f"{names.final_norm}.weight", (hidden,)))
    if config.norm_bias:
        specs.append(TensorSpec(f"{names.final_norm}.bias", (hidden,)))
    if names.head:
        specs.append(TensorSpec(f"{names.head}.weight", (config.vocab_size, hidden)))
    return specs


def _layers(
    config: ModelConfig, shape: SyntheticShape, source: NormalSource, write: _Write
) -> Iterator[FiringStats]:
    """Write embeddings and layers, one by one, then the head."""
    names, topics, text = written_names(config), None, _DENSE_TEXT
    if config.experts is None:
        hidden_states = _embed(config, names, source, write)
    else:
        topics = Topics.draw(config.vocab_size, config.hidden_size, source)
        embedding = topics.embedding(config.vocab_size, source)
        write(f"{names.tokens}.weight", embedding)
        ids, text = topics.sample(config.vocab_size, source)
        hidden_states = embedding[ids]
        del embedding
    wanted = RoutingStats(shape.skew, shape.kept)
    maker = LayerMaker(config, shape.density, source, write, text, topics, wanted)
    for layer, spec in enumerate(config.layers):
        yield maker.make(spec, names.of_layer(layer), hidden_states)
    if topics is None:
        _write_head(config, names, hidden_states, source, write)
    else:
        write(f"{names.final_norm}.weight", torch.ones(config.hidden_size))
        outputs = functional.rms_norm(hidden_states, (config.hidden_size,))
        head = topics.head(config.vocab_size, outputs, text, source)
        write(f"{names.head}.weight", head)


def _embed(
    config: ModelConfig, names: TensorNames, source: NormalSource, write: _Write
) -> torch.Tensor:
    """Write the embeddings and return those of random tokens, (T, D).

    RMSNorm has no bias, so embeddings get a common direction for gates, half of their energy. A
    tied head would then always favour some tokens; Llama's is not tied.
    """
    embedding = source.normal((config.vocab_size, config.hidden_size))
    if not config.norm_bias:
        embedding += source.normal((config.hidden_size,))
        embedding *= 0.5**0.5
    write(f"{names.tokens}.weight", embedding)
    num_tokens = _DENSE_TEXT.num_tokens
    hidden_states = embedding[source.token_ids((num_tokens,), config.vocab_size)]
    if names.positions:
        rows = config.max_positions + config.position_offset
        positions = source.normal((rows, config.hidden_size), _POSITIONS_RMS)
        write(f"{names.positions}.weight", positions)
        hidden_states += positions[source.token_ids((num_tokens,), rows)]
    return hidden_states


def _write_head(
    config: ModelConfig,
    names: TensorNames,
    hidden_states: torch.Tensor,
    source: NormalSource,
    write: _Write,
) -> None:
    """Write final norm and head, such that greedy decoding does not repeat a few tokens.

    Untied: the head is orthogonal to the mean of its inputs. Tied: the norm's bias subtracts that
    mean, and its weight flips the sign of random components, so that a token's logits do not favour
    that token.
    """
    hidden = config.hidden_size
    scale = _LOGITS_RMS * hidden**-0.5
    if not names.head:
        weight = scale * source.normal((hidden,)).sign()
        outputs = functional.layer_norm(hidden_states, (hidden,), weight)
        write(f"{names.final_norm}.weight", weight)
        write(f"{names.final_norm}.bias", -outputs.mean(dim=0))
        return
    write(f"{names.final_norm}.weight", torch.ones(hidden))
    if config.norm_bias:
        write(f"{names.final_norm}.bias", torch.zeros(hidden))
    outputs = normalization(config)(hidden_states, (hidden,))
    direction = functional.normalize(outputs.mean(dim=0), dim=0)
    head = source.normal((config.vocab_size, hidden), scale)
    write(f"{names.head}.weight", head.addr_(head @ direction, direction, alpha=-1))


def _require_free(out: Path, force: bool) -> None:
    if out.is_dir() and any(out.iterdir()) and not force:
        raise UsageError(f"{out} is not empty; name another directory or give --force")
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; name a directory")


def _prepare_directory(out: Path, num_bytes: int) -> None:
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
