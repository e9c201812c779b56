"""Argument checks that this package's wrappers share, and codes of activation functions."""

import numpy as np

from hotcold.numba_kernels.formats import FORMATS

# Codes of an FFN's function in kernels. drelu is relu(gate . x) * relu(up . x); fatrelu has a
# threshold, clamped_silu a limit.
RELU, SILU, GELU, GELU_TANH, RELU2, FATRELU, DRELU, CLAMPED_SILU = range(8)
CLAMPED_SLOPE = 1.702  # of clamped_silu
ACTIVATES_UP = DRELU, CLAMPED_SILU  # those that change up . x, too
ACTIVATION_CODES = {
    "relu": RELU,
    "silu": SILU,
    "gelu": GELU,
    "gelu_tanh": GELU_TANH,
    "relu2": RELU2,
    "fatrelu": FATRELU,
    "drelu": DRELU,
    "clamped_silu": CLAMPED_SILU,
}
_KNOWN = ", ".join(kind.name if dtype.names else f"{dtype}" for dtype, kind in FORMATS.items())


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition`."""
    if not condition:
        raise ValueError(message)


def weight_rows(name: str, array: np.ndarray) -> np.ndarray:
    """A matrix of weights with contiguous rows and aligned items; other views are copied.

    safetensors may give unaligned views, and compiled loads assume alignment.
    """
    require(array.ndim == 2, f"{name} must have 2 dimensions, not {array.ndim}")
    require(array.dtype in FORMATS, f"{name} must be of {_KNOWN}, not {array.dtype}")
    if not array.flags.aligned or (array.size and array.strides[1] != array.itemsize):
        return np.ascontiguousarray(array).copy()
    return array


def float_array(name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A contiguous, aligned float32 array of the shape given; unaligned views are copied."""
    if array.dtype != np.float32:  # texts are made for errors alone: they take microseconds
        raise ValueError(f"{name} must be float32, not {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, not {array.shape}")
    if not (array.flags.aligned and array.flags.c_contiguous):
        return np.ascontiguousarray(array).copy()
    return array


def read_only(array: np.ndarray) -> np.ndarray:
    """A view that is not writeable, which is another type to Numba."""
    view = array.view()
    view.flags.writeable = False
    return view


def activation_code(activation_fn: str) -> int:
    """The code of an activation function. Errors: ValueError for an unknown name."""
    require(activation_fn in ACTIVATION_CODES, f"no activation function named {activation_fn!r}")
    return ACTIVATION_CODES[activation_fn]
