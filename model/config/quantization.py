"""config.json's quantization_config, the key of quantized weights."""

from __future__ import annotations

from typing import Any, NamedTuple

from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.model_config import WeightDtype
from hotcold.model.errors import shown

KEY = "quantization_config"
METHOD = "hotcold"
GROUP_SIZE = 32
_MINIMUM = "minimum"  # whether groups have a minimum; absent for no


class _Form(NamedTuple):
    """The key's values for a format. Older programs refuse a newer version."""

    bits: int
    version: int
    has_min: bool


_FORMS: dict[WeightDtype, _Form] = {
    "q8": _Form(8, 1, False),
    "q4": _Form(4, 1, False),
    "q4_1": _Form(4, 2, True),
}


def quantization_config(dtype: WeightDtype) -> dict[str, Any]:
    """Return the key's value for matrices in `dtype`, a quantized one."""
    form = _FORMS[dtype]
    return {
        "quant_method": METHOD,
        "bits": form.bits,
        "group_size": GROUP_SIZE,
        "version": form.version,
        **({_MINIMUM: True} if form.has_min else {}),
    }


def quantized_dtype(reader: ConfigReader) -> WeightDtype | None:
    """Return the format that config.json declares for matrices; None without the key.

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
            "not quantized, with --dtype q8, q4_1 or q4",
        )
    for name, known in (("version", (1, 2)), ("group_size", (GROUP_SIZE,)), ("bits", (8, 4))):
        value = values.get(name)
        if type(value) is not int or value not in known:
            raise reader.fail(
                f"{KEY}.{name}",
                f"is {shown(value, 60)}, this program reads {' and '.join(map(str, known))}; make "
                "the model again with `hotcold quantize`",
            )
    found = _Form(values["bits"], values["version"], values.get(_MINIMUM) is True)
    for dtype, form in _FORMS.items():
        if form == found:
            return dtype
    raise reader.fail(
        KEY,
        f"describes no format of this program ({found.bits} bits, version {found.version}); make "
        "the model again with `hotcold quantize`",
    )
