"""Records of LAYER_NUMBERS for tests of kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from hotcold.numba_kernels.layer_record import LAYER_NUMBERS


def layer_numbers(**facts: Any) -> Any:
    """A record with `facts`; the rest is 0 or False, but residual_scale is 1."""
    record = np.zeros(1, LAYER_NUMBERS)[0]
    for name, value in ({"residual_scale": 1} | facts).items():
        record[name] = value
    return record
