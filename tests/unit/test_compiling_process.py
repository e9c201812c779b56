"""What a process that only compiles leaves out changes no compiled code; types by address."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
import pytest

from hotcold.numba_kernels.by_address import TupleByAddress
from hotcold.numba_kernels.serve.mailbox import SharedBuffers

_COMPILE = """
import hashlib, sys
import numpy as np
from hotcold.numba_kernels.decode.norm import norm_kernel
from hotcold.numba_kernels.decode.sampling import sample_kernel
if sys.argv[1] == "alone":
    from hotcold.numba_kernels.compiling_process import only_compile
    only_compile()
x = np.ones(64, np.float32)
norm_kernel(np.int32(0), x, x, x[:0], np.float32(1e-5), x)
sample_kernel(x, 1.0, 2, 0.9, 0.1, 0.5, x.astype(float), x.view(np.uint32), x.view(np.int32))
for kernel in (norm_kernel, sample_kernel):
    (code,) = kernel.inspect_asm().values()
    print(hashlib.sha256(code.encode()).hexdigest(), len(code) > 1000)
"""


@pytest.mark.timeout(620)
def test_code_is_the_same(tmp_path: Path) -> None:
    told = [_compiled(kind, tmp_path) for kind in ("alone", "usual")]
    assert told[0] == told[1]
    assert told[0].split()[1::2] == ["True", "True"]


def _compiled(kind: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, kind],
        # Names of symbols depend on the order of sets.
        env=os.environ | {"XDG_CACHE_HOME": str(folder / kind), "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class _Few(NamedTuple):
    first: np.ndarray


def test_a_type_by_address_is_one_object_whose_hash_stays_in_its_process() -> None:
    array = numba.float32[::1]
    fields = [array] * len(SharedBuffers._fields)
    kind = numba.types.NamedTuple(fields, SharedBuffers)
    assert not isinstance(kind, TupleByAddress)
    made = numba.types.BaseTuple.from_types(fields, SharedBuffers)
    assert isinstance(made, TupleByAddress)
    assert hash(made) == hash(made) and made == made
    (_, (_, _, state)) = made.__reduce__()
    assert state["_hash"] == 0
    assert pickle.loads(pickle.dumps(made)) is made
    other = numba.types.BaseTuple.from_types([numba.int64[::1], *fields[1:]], SharedBuffers)
    assert made != other
    assert not isinstance(numba.types.BaseTuple.from_types([array], _Few), TupleByAddress)
