"""Random arrays in the forms that kernels get."""

from __future__ import annotations

import numpy as np

from tests.kernels.reference import narrowed

BITS = {"f32": np.float32, "f16": np.uint16, "bf16": np.int16}


def random_floats(seed: int, *shape: int) -> np.ndarray:
    """Normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def random_bits(seed: int, dtype: type, *shape: int) -> np.ndarray:
    """Normal numbers as weight bits."""
    return narrowed(random_floats(seed, *shape), dtype)


def unaligned(array: np.ndarray) -> np.ndarray:
    """A read-only copy that starts at an odd address."""
    view = np.frombuffer(b"\0" + array.tobytes(), array.dtype, offset=1).reshape(array.shape)
    assert view.ctypes.data % 2 and not view.flags.aligned
    return view
