"""`hotcold quantize`: a model's directory again, with matrices of 8 or 4 bits."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import click

from jobs.support.console import json_option, print_json, progress_bar
from jobs.support.weight_dtype import QUANTIZED


@click.command()
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(QUANTIZED),
    required=True,
    help="8 or 4 bits a weight, and a float16 scale for each 32; q4_1: and a minimum.",
)
@json_option
def quantize(model: str, out: Path, dtype: str, as_json: bool) -> None:
    """Write MODEL to the new directory OUT with quantized matrices.

    The result loads faster than the original with --dtype, and gives the same: every command takes
    it as a model. Norms, biases and token embeddings stay as they are; profile and predictors are
    not copied, as they belong to the original.
    """
    from model.config.weight_formats import QUANTIZED_NAMES
    from model.files.locate import locate_model
    from model.weights.quantized_checkpoint import write_quantized

    path = locate_model(model)
    wanted = next(name for name in QUANTIZED_NAMES if name == dtype)
    started = time.monotonic()
    with progress_bar(str(out)) as on_bytes:
        report = write_quantized(path, out, wanted, on_bytes)
    seconds = time.monotonic() - started
    click.echo(
        f"{out}: {dtype}, {report.num_bytes / 1e9:.2f} GB instead of "
        f"{report.stored_bytes / 1e9:.2f} GB, {report.num_quantized} tensors quantized, "
        f"{report.num_copied} copied, {seconds:.1f} s"
    )
    if as_json:
        print_json(
            {"path": str(out), "dtype": dtype, **asdict(report), "seconds": round(seconds, 3)}
        )
