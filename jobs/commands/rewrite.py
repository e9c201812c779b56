"""`hotcold quantize` and `pack`: a model again, smaller or for reading neurons from storage."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotcold.actors.protocol.options import QUANTIZED
from hotcold.jobs.support.console import json_option, progress_bar
from hotcold.jobs.support.options import system_option
from hotcold.model.byte_sizes import size_text
from hotcold.model.errors import ArtifactError

if TYPE_CHECKING:
    from hotcold.model.bundles.geometry import BundleGeometry


@click.command()
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(QUANTIZED),
    required=True,
    help="8 or 4 bits a weight, and a float16 scale for each 32; q4_1: and a minimum; mxfp4: a "
    "power of two instead.",
)
@json_option
def quantize(model: str, out: Path, dtype: str) -> dict[str, Any]:
    """Write MODEL to the new directory OUT with quantized matrices.

    The result loads faster than the original with --dtype, and gives the same: every command takes
    it as a model. Norms, biases and token embeddings stay as they are; profile and predictors are
    not copied, as they belong to the original.
    """
    from hotcold.model.config.weight_formats import QUANTIZED_NAMES
    from hotcold.model.files.locate import locate_model
    from hotcold.model.weights.quantized_checkpoint import write_quantized

    path = locate_model(model)
    wanted = next(name for name in QUANTIZED_NAMES if name == dtype)
    started = time.monotonic()
    with progress_bar(str(out)) as on_bytes:
        report = write_quantized(path, out, wanted, on_bytes)
    seconds = time.monotonic() - started
    click.echo(
        f"{out}: {dtype}, {size_text(report.num_bytes)} instead of "
        f"{size_text(report.stored_bytes)}, {report.num_quantized} tensors quantized, "
        f"{report.num_copied} copied, {seconds:.1f} s"
    )
    return {"path": str(out), "dtype": dtype, **asdict(report), "seconds": round(seconds, 3)}


@click.command()
@click.argument("model", required=False)
@system_option("weight_dtype")
@click.option("--verify", is_flag=True, help="Read the file that is there, and say what is wrong.")
@json_option
def pack(model: str | None, weight_dtype: str | None, verify: bool) -> dict[str, Any]:
    """Write MODEL's neurons into one file, from which they are read while it runs.

    A model that is larger than --cpu-memory makes it by itself. Where a profile is there, neurons
    that fire often come first. A run that was stopped goes on where it was.
    """
    from hotcold.actors.setup.preflight import packed_config
    from hotcold.actors.setup.storage import has_bundles
    from hotcold.jobs.support.loading import make_bundles
    from hotcold.model.bundles.bundle_file import bundle_path
    from hotcold.model.bundles.geometry import BundleGeometry
    from hotcold.model.files.locate import locate_model

    path = locate_model(model)
    config = packed_config(path, weight_dtype)
    geometry = BundleGeometry.of(config)
    started = time.monotonic()
    if verify:
        num_damaged = _verify(path, geometry)
        file = bundle_path(path, geometry)
    else:
        is_there = has_bundles(path, config)
        file, num_damaged = make_bundles(path, config, weight_dtype or ""), 0
        click.echo(f"{file}: {size_text(geometry.file_bytes)}{', anew' if is_there else ''}")
    seconds = round(time.monotonic() - started, 3)
    report = {"num_damaged": num_damaged, "seconds": seconds}
    return {"path": str(file), "num_bytes": geometry.file_bytes} | report


def _verify(path: Path, geometry: BundleGeometry) -> int:
    """How many neurons are damaged: none. Errors: ArtifactError where some are."""
    from hotcold.model.bundles.bundle_file import bundle_path, damaged_bundles, read_bundle_file
    from hotcold.model.files.artifact import ModelIdentity

    found = read_bundle_file(bundle_path(path, geometry), geometry, ModelIdentity.of(path))
    with progress_bar(str(found.path)) as on_bytes:
        damaged = damaged_bundles(found, on_bytes)
    if damaged:
        (layer, number), noun = damaged[0], geometry.noun
        raise ArtifactError(
            f"{found.path}: {len(damaged)} {noun}s are damaged, the first is {noun} {number} of "
            f"layer {layer}; make it again with `hotcold pack`"
        )
    click.echo(f"{found.path}: all {geometry.num_bundles} {geometry.noun}s are whole")
    return 0
