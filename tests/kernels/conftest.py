"""The kernel packages that the suite runs over, each as a namespace of the wrappers by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from numba_kernels.attention import decode_attention, rope, rope_table
from numba_kernels.convert import to_bfloat16
from numba_kernels.ffn import sparse_ffn
from numba_kernels.norm import layer_norm, rms_norm
from numba_kernels.rows import rows_times_vectors
from numba_kernels.sampling import sample

BACKENDS = {
    "numba": SimpleNamespace(
        decode_attention=decode_attention,
        layer_norm=layer_norm,
        rms_norm=rms_norm,
        rope=rope,
        rope_table=rope_table,
        rows_times_vectors=rows_times_vectors,
        sample=sample,
        sparse_ffn=sparse_ffn,
        to_bfloat16=to_bfloat16,
    )
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The wrappers of one kernel package."""
    return BACKENDS[request.param]
