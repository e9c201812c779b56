"""The option --dtype, alone in a file that imports nothing heavy."""

import click

QUANTIZED = ("q8", "q4")
dtype_option = click.option(
    "--dtype",
    "weight_dtype",
    type=click.Choice(QUANTIZED),
    help="Quantize the weights while they load, to 8 or 4 bits; as stored without it.",
)
