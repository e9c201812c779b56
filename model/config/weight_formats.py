"""Names of weight formats in config.json and --dtype, and the bytes of their rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hotcold.model.config.model_config import MatrixKind, ModelConfig
from hotcold.model.errors import UsageError, shown
from hotcold.numba_kernels.formats import (
    DTYPES,
    FLOAT_FORMATS,
    FORMATS,
    Q8,
    QUANT_GROUP,
    QUANTIZED_TO,
    WeightDtype,
    is_quantized,
    row_items,
    summed_dtype,
)

QUANTIZED_NAMES: tuple[WeightDtype, ...] = tuple(row.name for row in QUANTIZED_TO)
# Those that weights are cast to, by --dtype's names.
CAST_NAMES = {kind.short: kind.name for kind in FLOAT_FORMATS.values() if kind.bits == 16}


def agreed_dtype(dtypes: set[np.dtype]) -> np.dtype:
    """Return the dtype of matrices that would each have one of `dtypes`: the one, else Q8.

    They agree also where down rows would. Only of floats it is float32.
    """
    for agreed in (dtypes, set(map(summed_dtype, dtypes))):
        if len(agreed) == 1:
            return next(iter(agreed))
    return Q8 if any(map(is_quantized, dtypes)) else np.dtype(np.float32)


def numpy_dtype(name: WeightDtype) -> np.dtype:
    """Return the dtype of arrays that hold the format."""
    return DTYPES[name]


def dtype_name(dtype: np.dtype) -> WeightDtype:
    """Return the name of the format that arrays of `dtype` hold. Errors: KeyError for no format."""
    return FORMATS[dtype].name


def requested_dtype(name: str) -> np.dtype | None:
    """Return the dtype of --dtype `name`; None for "", which means as stored.

    Errors:  UsageError for another name than f16, bf16 and those of QUANTIZED_NAMES
    """
    if not name:
        return None
    known = CAST_NAMES | {each: each for each in QUANTIZED_NAMES}
    if name not in known:
        *others, last = known
        raise UsageError(f"--dtype is {shown(name)}; give {', '.join(others)} or {last}")
    return DTYPES[known[name]]


def option_name(dtype: np.dtype) -> str:
    """Return the format's name as --dtype spells it. Errors: KeyError for no format."""
    return FORMATS[dtype].short


def row_bytes(config: ModelConfig, width: int, kind: MatrixKind) -> int:
    """Return the bytes of a row of `width` weights in a matrix of this kind.

    Errors:  ValueError for a quantized row whose width is no multiple of 32
    """
    dtype = DTYPES[config.dtype_of(kind)]
    return row_items(dtype, width) * dtype.itemsize


def mean_row_bytes(config: ModelConfig, width: int, kind: MatrixKind) -> float:
    """Return `row_bytes`, or their mean where layers have different formats."""
    return dict(config.mean_row_bytes).get(kind) or row_bytes(config, width, kind)


def loaded_config(config: ModelConfig, dtype: str) -> ModelConfig:
    """Return `config` as loaded with --dtype `dtype`, for a model with nothing but config.json.

    Errors:  UsageError for an unknown dtype, or rows that it cannot hold
    """
    target = requested_dtype(dtype)
    if target is None:
        return config
    require_whole_groups(target, *config.matrix_widths)
    return replace(
        config, dtype=dtype_name(target), other_dtypes=(), mean_row_bytes=(), block_formats=()
    )


def require_whole_groups(dtype: np.dtype, *widths: int) -> None:
    """Raise UsageError where rows of one of these widths cannot be quantized to `dtype`."""
    for width in widths:
        if is_quantized(dtype) and width % QUANT_GROUP:
            raise UsageError(
                f"--dtype {option_name(dtype)} takes weights in groups of {QUANT_GROUP}, and this "
                f"model has rows of {width}, which are no whole groups; use it in the dtype that "
                "it is stored in"
            )
