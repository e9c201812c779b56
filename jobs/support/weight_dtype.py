"""The option --dtype, alone in a file that imports nothing heavy."""

import click

from jobs.settings.shared_option import shared_option

QUANTIZED = ("q8", "q4_1", "q4")
DTYPES = ("f16", "bf16", *QUANTIZED)
dtype_option = shared_option(
    "--dtype",
    "weight_dtype",
    type=click.Choice(DTYPES),
    help="Cast the weights to 16 bits while they load, or quantize them to 8 or 4 (q4_1: with a "
    "minimum beside each scale); as stored without it.",
)
