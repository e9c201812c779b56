"""`hotcold train-predictors`: fit what says which neurons will fire, to what `profile` recorded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotcold.actors.protocol.options import QUANTIZED
from hotcold.jobs.support.console import json_option, steps_bar
from hotcold.jobs.support.options import given_option
from hotcold.model.errors import UsageError

if TYPE_CHECKING:
    from hotcold.model.config.model_config import ModelConfig
    from hotcold.model.files.artifact import ModelIdentity
    from hotcold.predictors.predictor_file import Predictors, Quality
    from hotcold.predictors.stacked import AnyLayer

KINDS = ("lowrank", "sign", "best")
_RECALL = 0.98


@click.command("train-predictors")
@click.argument("model", required=False)
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="lowrank",
    help="Two linear layers; sign bits, where only thresholds are fitted; or, for each "
    "layer, what is faster on this machine, be it none.",
)
@click.option(
    "--recall",
    "target_recall",
    type=float,
    help="Share of the firing neurons to compute, in each layer; without it "
    f"{_RECALL}, or that of the predictors that are there.",
)
@click.option(
    "--dtype",
    "weight_dtype",
    type=click.Choice(QUANTIZED),
    help="For use with this --dtype: where gates are smaller, so is the predictor that pays.",
)
@click.option(
    "--inputs",
    "inputs_file",
    type=click.Path(path_type=Path),
    help="What `hotcold profile` recorded; the model's own without it.",
)
@click.option(
    "--import",
    "folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Take PowerInfer's predictors from this folder instead of fitting any.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Where to write; beside the model without it."
)
@json_option
def train_predictors(
    model: str | None,
    kind: str,
    target_recall: float | None,
    weight_dtype: str | None,
    inputs_file: Path | None,
    folder: Path | None,
    out: Path | None,
) -> dict[str, Any]:
    """Fit a predictor for each layer of MODEL, and say how good it is on tokens it never saw."""
    from hotcold.actors.setup.modes import require_predictable
    from hotcold.actors.setup.preflight import read_model
    from hotcold.jobs.profile.files import require_writable
    from hotcold.model.files.artifact import ModelIdentity
    from hotcold.model.files.artifact_places import artifact_folders
    from hotcold.model.files.locate import locate_model
    from hotcold.model.weights.sizes import ffn_bytes
    from hotcold.predictors.predictor_file import (
        predictors_name,
        predictors_path,
        recall_of,
        write_predictors,
    )

    path = locate_model(model)
    config = read_model(path, weight_dtype)
    require_predictable(config, "`hotcold train-predictors`")
    identity = ModelIdentity.of(path)
    started = time.monotonic()
    made = "lowrank" if folder is not None else kind
    before = predictors_path(path, made, weight_dtype or "")
    target = out or artifact_folders(path)[0] / predictors_name(made, weight_dtype or "")
    require_writable("--out", target)
    if folder is not None:
        if given := given_option("kind", "target_recall", "weight_dtype", "inputs_file"):
            raise UsageError(f"{given} says how to fit, and --import fits nothing; leave one out")
        from hotcold.predictors.powerinfer import import_powerinfer

        predictors = import_powerinfer(folder, config)
        share = None
    else:
        if target_recall is None:
            target_recall = max(_RECALL, recall_of(before, identity))
        predictors, share = _train(path, config, identity, inputs_file, kind, target_recall)
    write_predictors(target, identity, predictors)
    used = predictors_path(path, made, weight_dtype or "")
    seconds = time.monotonic() - started
    _print_report(predictors)
    if share is not None:
        click.echo(f"to know which neurons fire takes {share:.2f} of the time of all gates here")
    of_ffn = predictors.num_bytes / ffn_bytes(config, config.num_neurons)
    click.echo(f"{target}: {predictors.num_bytes / 1e6:.2f} MB a token, {of_ffn:.1%} of the FFN's "
               f"weights; {seconds:.1f} s")  # fmt: skip
    if out is None and used != target:
        click.echo(f"{used}: stays in use, as its predictors are for no less recall; to use the "
                   f"new ones, give --predictors {target}")  # fmt: skip
    elif out is None and before.exists() and before != target:
        click.echo(f"used from now on in place of {before}; remove the new file to go back")
    facts = {"path": str(target), "seconds": round(seconds, 3), "time_of_gates": share}
    return _as_json(predictors) | facts


def _train(
    path: Path,
    config: ModelConfig,
    identity: ModelIdentity,
    inputs_file: Path | None,
    kind: str,
    target_recall: float,
) -> tuple[Predictors, float]:
    """The predictors, and what they and the gates that they let through take, of all gates."""
    import torch

    from hotcold.model.files.artifact_places import artifact_path
    from hotcold.placement.machine.survey import usable_cores
    from hotcold.predictors.fitting.inputs import read_inputs
    from hotcold.predictors.fitting.read_prices import measure_prices
    from hotcold.predictors.fitting.training import Fitted, gather, train_predictors

    source = inputs_file or artifact_path(path, "inputs.safetensors")
    inputs = read_inputs(source, identity, config)
    made: list[Fitted] = []
    num_threads = len(usable_cores())
    torch.set_num_threads(num_threads)  # torch knows of no quota
    with steps_bar("layers", config.num_layers) as show:
        measure = partial(measure_prices, config, num_threads)
        for layer in train_predictors(path, config, inputs, kind, target_recall, measure):
            made.append(layer)
            show(len(made))
    with_ffn = sum(size > 0 for size in config.ffn_sizes)
    share = sum(fitted.share_of_gates for fitted in made) / with_ffn
    return gather(made, inputs, target_recall), share


def _print_report(predictors: Predictors) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 1))
    names = ("layer", "kind", "size", "format", "MB", "active", "computed", "recall",
             "precision")  # fmt: skip
    for name in names:
        table.add_column(name, justify="left" if name == "kind" else "right")
    qualities: Sequence[Quality | None] = predictors.qualities or [None] * len(predictors.layers)
    for i, (layer, quality) in enumerate(zip(predictors.layers, qualities, strict=True)):
        if layer is None:
            continue
        shares = ["-"] * 4 if quality is None else [
            f"{quality.active:.1%}", f"{quality.computed:.1%}", f"{quality.recall:.3f}",
            f"{quality.precision:.3f}",
        ]  # fmt: skip
        size = str(getattr(layer, "hidden_size", "-"))
        table.add_row(
            str(i), *_kind_and_format(layer, size), f"{layer.num_bytes / 1e6:.2f}", *shares
        )
    Console(highlight=False).print(table)


def _kind_and_format(layer: AnyLayer, size: str) -> tuple[str, str, str]:
    planes = getattr(layer, "num_weight_planes", None)
    if planes is not None:
        return "sign", size, "1 bit" if planes == 1 else "2 bits"
    return "lowrank", size, "int8" if layer.down.dtype.itemsize == 1 else "f16"  # type: ignore[union-attr]


def _as_json(predictors: Predictors) -> dict[str, Any]:
    qualities = predictors.qualities
    return {
        "recall": None if qualities is None else [q.recall for q in qualities],
        "precision": None if qualities is None else [q.precision for q in qualities],
        "computed": None if qualities is None else [q.computed for q in qualities],
        "active": None if qualities is None else [q.active for q in qualities],
        "bytes": [0 if layer is None else layer.num_bytes for layer in predictors.layers],
        "hidden_size": [getattr(layer, "hidden_size", None) for layer in predictors.layers],
        "target_recall": predictors.target_recall,
    }
