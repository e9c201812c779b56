"""`hotcold make-model`: a checkpoint of a given shape with random weights and chosen sparsity."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from hotcold.jobs.support.console import json_option, progress_bar
from hotcold.model.byte_sizes import size_text
from hotcold.model.synthetic.shape import DTYPES, SHAPES, SYNTHETIC_FAMILIES, resolve_shape

_ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh", "relu2")
_COUNT = click.IntRange(min=1)


@click.command("make-model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--shape", "shape_name", default="tiny", help=f"{', '.join(SHAPES)}; the sizes below change it."
)
@click.option("--family", type=click.Choice(list(SYNTHETIC_FAMILIES)), help="Kind of model.")
@click.option("--layers", type=_COUNT, help="Number of layers.")
@click.option("--hidden", type=click.IntRange(min=8), help="Size of the hidden states.")
@click.option("--ffn", type=_COUNT, help="Neurons a layer, or an expert.")
@click.option("--heads", type=_COUNT, help="Attention heads.")
@click.option("--kv-heads", type=_COUNT, help="Key-value heads; falcon: 1 as 7b, else as 40b.")
@click.option("--head-dim", type=_COUNT, help="Size of one head.")
@click.option("--vocab", type=click.IntRange(min=2), help="Number of tokens.")
@click.option("--context", type=_COUNT, help="Positions.")
@click.option("--activation", type=click.Choice(_ACTIVATIONS), help="Of the FFN.")
@click.option(
    "--density",
    type=float,
    help="Mean share of active neurons; in a mixture, of chosen experts'. Only with a ReLU-type "
    "activation are the others exactly zero, and left out in `exact`.",
)
@click.option("--experts", type=_COUNT, help="Experts a layer.")
@click.option("--chosen", type=_COUNT, help="Experts that a token has.")
@click.option(
    "--skew", type=click.FloatRange(0.5, 1), help="Choices that the busier half of experts has."
)
@click.option(
    "--kept",
    type=click.FloatRange(0, 1),
    help="Share of a token's experts that the one before had.",
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="f16")
@click.option("--seed", type=click.IntRange(min=0), default=0)
@click.option("--force", is_flag=True, help="Replace the model in a directory that is not empty.")
@json_option
def make_model(
    out: Path, shape_name: str, dtype: str, seed: int, force: bool, **sizes: Any
) -> dict[str, Any]:
    """Write a Hugging Face directory OUT with random weights.

    A few neurons fire nearly always and most seldom: their rates follow a power law whose mean is
    the density. A mixture's router chooses some experts more often than others, and some again for
    the next token, in text that the model writes: its tokens have topics, and it keeps to a topic
    for a while. There is no tokenizer; prompts are given as ids.
    """
    from hotcold.model.synthetic.make import make_model as write_model  # imports torch

    shape, started = resolve_shape(shape_name, sizes), time.monotonic()
    with progress_bar(str(out)) as on_bytes:
        made = write_model(out, shape, DTYPES[dtype], seed, force, on_bytes)
    facts = {"density": shape.density}
    if made.routing is not None:  # the nearest to what is asked
        facts |= {"skew": made.routing.skew, "kept": made.routing.kept}
    seconds = time.monotonic() - started
    click.echo(
        f"{out}: {made.num_parameters / 1e6:,.2f} million parameters, {size_text(made.num_bytes)}, "
        f"{', '.join(f'{name} {value:.3g}' for name, value in facts.items())}, {seconds:.1f} s"
    )
    return {
        "path": str(out),
        "bytes": made.num_bytes,
        "parameters": made.num_parameters,
        "seconds": round(seconds, 3),
        **facts,
    }
