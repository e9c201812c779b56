"""config.json's quantization_config, the key of quantized weights."""

from __future__ import annotations

from typing import Any, NamedTuple

from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.errors import shown
from hotcold.numba_kernels.formats import QUANT_GROUP, QUANTIZED_TO, WeightDtype

KEY = "quantization_config"
METHOD = "hotcold"
# Of some modules alone, whose tensors say it themselves: `model/files/mxfp4_pairs.py`.
MXFP4_METHOD = "mxfp4"
_MINIMUM = "minimum"  # whether groups have a minimum; absent for no


class _Form(NamedTuple):
    """The key's values for a format. Older programs refuse a newer version."""

    bits: int
    version: int
    has_min: bool


_FORMS = {row.name: _Form(row.bits, row.version, row.has_min) for row in QUANTIZED_TO}
_KNOWN = {
    "version": sorted({form.version for form in _FORMS.values()}),
    "group_size": [QUANT_GROUP],
    "bits": sorted({form.bits for form in _FORMS.values()}, reverse=True),
}


def quantization_config(dtype: WeightDtype) -> dict[str, Any]:
    """Return the key's value for matrices in `dtype`, a quantized one."""
    form = _FORMS[dtype]
    return {
        "quant_method": METHOD,
        "bits": form.bits,
        "group_size": QUANT_GROUP,
        "version": form.version,
        **({_MINIMUM: True} if form.has_min else {}),
    }


def quantized_dtype(reader: ConfigReader) -> WeightDtype | None:
    """Return the format that config.json declares for all matrices; None for none.

    Errors:  the reader's, one line, for another method, version, group size or number of bits
    """
    if not reader.has(KEY):
        return None
    values = reader.values[KEY]
    if not isinstance(values, dict):
        raise reader.fail(KEY, f"is {shown(values, 60)}, not an object; download it again")
    method = values.get("quant_method")
    if method == MXFP4_METHOD:
        return None
    if method != METHOD:
        *others, last = _FORMS
        raise reader.fail(
            KEY,
            f"names the method {shown(method, 60)}, which is not supported; use the model that is "
            f"not quantized, with --dtype {', '.join(others)} or {last}",
        )
    for name, known in _KNOWN.items():
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
