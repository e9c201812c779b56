"""CPU kernels, compiled by Numba: arrays and scalars in, arrays out.

Weights are float32, float16 or bfloat16 matrices whose rows are contiguous. NumPy and Numba know
no bfloat16 and Numba's CPU target no float16, so a kernel tells the formats apart by the array's
dtype: float32 = itself, uint16 = float16 bits, int16 = bfloat16 bits.

A function of this package without a leading underscore either checks its arguments (the wrappers,
ValueError on any mismatch) or says in its docstring that it checks nothing (kernels, for the
serving loops, whose arguments were checked when the weights were loaded).

Importing the package points Numba's on-disk cache at a folder named after a hash of its sources:
`cache=True` alone misses a change in a function that was imported from another module.
"""

import hashlib
import os
from pathlib import Path

import numba


def _cache_folder() -> Path:
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return base / "hotcold" / "numba" / digest.hexdigest()[:16]


if not os.environ.get("NUMBA_CACHE_DIR"):
    numba.config.CACHE_DIR = str(_cache_folder())
