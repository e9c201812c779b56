"""config.json's quantization_config, the key of quantized weights."""

from __future__ import annotations

from typing import Any, NamedTuple

from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.errors import HotcoldError, shown
from hotcold.numba_kernels.formats import QUANT_GROUP, QUANTIZED_TO, WeightDtype

KEY = "quantization_config"
_EARLIER_KEY = "compression_config"  # of compressed-tensors before 2025
METHOD = "hotcold"
# Whose tensors become rows by the rules of `model/files/packed_methods.py`.
PACKED_METHODS = (
    "awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt", "mxfp4",
    "mxfp8", "quark",
)  # fmt: skip
_ROUNDS = ("auto-round", "intel/auto-round")  # which writes other methods' tensors
_PACKINGS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
    "auto_round:llm_compressor": "compressed-tensors",
}
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


class PackedMethod(NamedTuple):
    """One of PACKED_METHODS, and what config.json says of it."""

    name: str
    values: dict[str, Any]

    def values_of_groups(self, key: str) -> set[Any]:
        """The values of `key`, or of each of compressed-tensors' groups of modules for weights."""
        groups = self.values.get("config_groups")
        each = list(groups.values()) if isinstance(groups, dict) else []
        weights = [group.get("weights") for group in each if isinstance(group, dict)]
        found = [one.get(key) for one in (self.values, *weights) if isinstance(one, dict)]
        return {value for value in found if isinstance(value, int | str)}


def packed_method(reader: ConfigReader) -> PackedMethod | None:
    """Return the method that others quantized the model by; None for none, and for METHOD.

    Errors:  the reader's, one line, for a method, or a form of it, that is not read
    """
    values = reader.values.get(KEY) or reader.values.get(_EARLIER_KEY)
    if values is None:
        return None
    if not isinstance(values, dict):
        raise reader.fail(KEY, f"is {shown(values, 60)}, not an object; download it again")
    method = values.get("quant_method")
    if method is None and (values.get("load_in_4bit") or values.get("load_in_8bit")):
        method = "bitsandbytes"
    if method is None and "bits" in values and "group_size" in values:
        method = "MLX"
    if method in _ROUNDS:
        method = _PACKINGS.get(str(values.get("packing_format")), method)
    if method == METHOD:
        return None
    if method not in PACKED_METHODS:
        raise _not_read(reader, f"names the method {shown(method, 60)}, which is not supported")
    found = PackedMethod(method, values)
    what = _unread_form(found)
    if what:
        raise _not_read(reader, f"of {method} {what}, which is not supported")
    return found


def _unread_form(method: PackedMethod) -> str:
    """What of a method's form is not read; "" where all is."""
    values = method.values
    if method.name == "gptq":
        known: dict[str, tuple[Any, ...]] = {
            "bits": (2, 4, 8),
            "checkpoint_format": ("gptq", "gptq_v2", None),
        }
    elif method.name == "awq":
        known = {"bits": (4,), "version": ("gemm", "GEMM", None)}
    elif method.name == "compressed-tensors":
        known = {"transform_config": (None, {}), "format": _COMPRESSED}
        sparsity = values.get("sparsity_config")
        if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
            return f"has sparsity_config.format {shown(sparsity.get('format'), 60)}"
    else:
        return ""
    for key, accepted in known.items():
        if isinstance(values.get(key), float) or values.get(key) not in accepted:
            return f"has {key} {shown(values.get(key), 60)}"
    return ""


_COMPRESSED = (
    "dense", "float-quantized", "int-quantized", "mixed-precision", "mxfp4-pack-quantized",
    "mxfp8-quantized", "naive-quantized", "nvfp4-pack-quantized", "pack-quantized",
)  # fmt: skip


def _not_read(reader: ConfigReader, what: str) -> HotcoldError:
    *others, last = _FORMS
    return reader.fail(
        KEY,
        f"{what}; use the model that is not quantized, with --dtype {', '.join(others)} or {last}",
    )


def quantized_dtype(reader: ConfigReader) -> WeightDtype | None:
    """Return the format that config.json declares for all matrices; None for none.

    Errors:  the reader's, one line, for a method that is not read; for another version, group size
             or number of bits of METHOD
    """
    if packed_method(reader) is not None or not reader.has(KEY):
        return None
    values = reader.values[KEY]
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
