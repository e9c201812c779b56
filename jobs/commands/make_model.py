"""`hotcold make-model`: a checkpoint of a given shape with random weights and chosen sparsity."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hotcold.jobs.support.console import json_option, progress_bar
from hotcold.model.byte_sizes import size_text
from hotcold.model.errors import UsageError
from hotcold.model.synthetic.shape import DTYPES, SHAPES, SYNTHETIC_FAMILIES, resolve_shape

_ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh", "relu2")


@click.command("make-model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--shape", "shape_name", default="tiny", help=f"{', '.join(SHAPES)}; the sizes below change it."
)
@click.option("--family", type=click.Choice(list(SYNTHETIC_FAMILIES)), help="Kind of model.")
@click.option("--layers", type=int, help="Number of layers.")
@click.option("--hidden", type=int, help="Size of the hidden states.")
@click.option("--ffn", type=int, help="Neurons a layer, or an expert.")
@click.option("--heads", type=int, help="Attention heads.")
@click.option("--kv-heads", type=int, help="Key-value heads; falcon: 1 as 7b, else as 40b.")
@click.option("--head-dim", type=int, help="Size of one head.")
@click.option("--vocab", type=int, help="Number of tokens.")
@click.option("--context", type=int, help="Positions.")
@click.option("--activation", type=click.Choice(_ACTIVATIONS), help="Of the FFN.")
@click.option(
    "--density",
    type=float,
    help="Mean share of active neurons; in a mixture, of chosen experts'. Only with a ReLU-type "
    "activation are the others exactly zero, and left out in `exact`.",
)
@click.option("--experts", type=int, help="Experts a layer.")
@click.option("--chosen", type=int, help="Experts that a token has.")
@click.option("--skew", type=float, help="Share of choices that the busier half of experts has.")
@click.option("--kept", type=float, help="Share of a token's experts that the one before had.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="f16")
@click.option("--seed", type=int, default=0)
@click.option("--force", is_flag=True, help="Replace the model in a directory that is not empty.")
@json_option
def make_model(
    out: Path,
    shape_name: str,
    dtype: str,
    seed: int,
    force: bool,
    **sizes: Any,
) -> dict[str, Any]:
    """Write a Hugging Face directory OUT with random weights.

    A few neurons fire nearly always and most seldom: their rates follow a power law whose mean is
    the density. A mixture's router chooses some experts more often than others, and some again for
    the next token, in text that the model writes: its tokens have topics, and it keeps to a topic
    for a while. There is no tokenizer; prompts are given as ids.
    """
    from hotcold.model.synthetic.make import make_model as write_model  # imports torch

    if seed < 0:
        raise UsageError(f"--seed must be 0 or more, not {seed}")
    shape = resolve_shape(shape_name, sizes)
    started = time.monotonic()
    with progress_bar(str(out)) as on_bytes:
        report = write_model(
            out, shape, dtype=DTYPES[dtype], seed=seed, force=force, on_bytes=on_bytes
        )
    seconds = time.monotonic() - started
    routing, found, asked = "", report.routing, None
    if found is not None:
        asked = {"skew": shape.skew, "kept": shape.kept}
        routing = (
            f", random routers made so that the busier half of the experts has {found.skew:.2f} of "
            f"choices (asked {shape.skew}) and {found.kept:.2f} are kept from token to token "
            f"(asked {shape.kept})"
        )
    click.echo(
        f"{out}: {report.num_parameters / 1e6:,.2f} million parameters, "
        f"{size_text(report.num_bytes)}, density {report.density:.3f} (asked {shape.density})"
        f"{routing}, {seconds:.1f} s"
    )
    return {
        "path": str(out),
        "bytes": report.num_bytes,
        "parameters": report.num_parameters,
        "seconds": round(seconds, 3),
        "asked_density": shape.density,
        "density": report.density,
        "asked_routing": asked,
        "routing": found and asdict(found),
        "layers": [asdict(layer) for layer in report.layers],
    }
