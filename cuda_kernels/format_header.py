"""The header `format_table.cuh`: what sources know of a format, from `numba_kernels.formats`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hotcold.numba_kernels import formats
from hotcold.numba_kernels.formats import ROW_FORMATS

NAME = "format_table.cuh"
_KINDS = {kind.short.upper(): kind for kind in formats.FORMATS.values()}
_ROWS = {row.short.upper(): row for row in ROW_FORMATS.values()}


def format_header() -> str:
    """Its text: numbers of formats, codes and factors, and functions of a format."""
    codes = {name: f"{row.codes.name.upper()}_CODES" for name, row in _ROWS.items()}
    factors = {name: f"{row.factors.name.upper()}_FACTORS" for name, row in _ROWS.items()}
    units = {name: f"{row.unit}f" for name, row in _ROWS.items()}
    lines = [
        _enum("Format", _KINDS),
        _enum("Codes", ("FLOAT_CODES", *dict.fromkeys(codes.values()))),
        _enum("Factors", ("NO_FACTORS", *dict.fromkeys(factors.values()))),
        *(
            f"SHARED_CONSTANT int {name} = {value};"
            for name, value in (
                ("GROUP", formats.QUANT_GROUP),
                ("CHUNK_GROUPS", formats.CHUNK_GROUPS),
                ("CHUNK", formats.CHUNK),
            )
        ),
        _function("Codes", "codes_of", codes, "FLOAT_CODES"),
        _function("Factors", "factors_of", factors, "NO_FACTORS"),
        _function("int", "bits_of", _facts(_KINDS, "bits"), 0),
        *_tables(),
        _function("float", "unit_of", units, "1.0f"),
        _function("int", "offset_of", _facts(_ROWS, "offset"), 0),
        _function("int", "block_groups_of", _facts(_ROWS, "block_groups"), 1),
        _function("bool", "has_min", _facts(_ROWS, "has_min"), 0),
        _function("bool", "has_halves", _facts(_ROWS, "has_halves"), 0),
    ]
    return "\n".join(lines)


def _tables() -> Iterable[str]:
    """Whether numbers of codes stand for values; four of them each as a word of signed bytes."""
    tables = {name: row.codes.values for name, row in _ROWS.items() if row.codes.values}
    yield _function("bool", "has_table", dict.fromkeys(tables, 1), 0)
    for first in range(0, 16, 4):
        words = {
            name: f"{int.from_bytes(bytes(value % 256 for value in values[first:][:4]), 'little')}u"
            for name, values in tables.items()
        }
        yield _function("u32", f"table_{first}_of", words, "0u")


def _enum(kind: str, names: Iterable[str]) -> str:
    return f"enum {kind} {{ {', '.join(names)} }};"


def _function(kind: str, name: str, values: Mapping[str, object], otherwise: object) -> str:
    """A function of a format: its value, or `otherwise`."""
    cases = "".join(
        f"format == {each} ? {value} : " for each, value in values.items() if value != otherwise
    )
    return f"DEVICE constexpr {kind} {name}(int format) {{ return {cases}{otherwise}; }}"


def _facts(kinds: Mapping[str, object], fact: str) -> dict[str, int]:
    return {name: int(getattr(kind, fact)) for name, kind in kinds.items()}
