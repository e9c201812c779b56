"""What config.json says of quantized weights: the key quantization_config."""

from __future__ import annotations

from typing import Any

from model.config.json_reader import ConfigReader
from model.config.model_config import WeightDtype
from model.errors import shown

KEY = "quantization_config"
METHOD = "hotcold"
VERSION = 1
GROUP_SIZE = 32
_BITS: dict[WeightDtype, int] = {"q8": 8, "q4": 4}


def quantization_config(dtype: WeightDtype) -> dict[str, Any]:
    """Return the value of the key for matrices in `dtype`, q8 or q4."""
    return {
        "quant_method": METHOD,
        "bits": _BITS[dtype],
        "group_size": GROUP_SIZE,
        "version": VERSION,
    }


def quantized_dtype(reader: ConfigReader) -> WeightDtype | None:
    """Return the format of the matrices that config.json declares; None where it declares none.

    Errors:  the reader's, one line, for another method, version, group size or number of bits
    """
    if not reader.has(KEY):
        return None
    values = reader.values[KEY]
    if not isinstance(values, dict):
        raise reader.fail(KEY, f"is {shown(values, 60)}, not an object; download it again")
    method = values.get("quant_method")
    if method != METHOD:
        raise reader.fail(
            KEY,
            f"names the method {shown(method, 60)}, which is not supported; use the model that is "
            "not quantized, with --dtype q8 or q4",
        )
    for name, known in (("version", (VERSION,)), ("group_size", (GROUP_SIZE,)), ("bits", (8, 4))):
        value = values.get(name)
        if type(value) is not int or value not in known:
            raise reader.fail(
                f"{KEY}.{name}",
                f"is {shown(value, 60)}, this program reads {' and '.join(map(str, known))}; make "
                "the model again with `hotcold quantize`",
            )
    return next(dtype for dtype, bits in _BITS.items() if bits == values["bits"])
