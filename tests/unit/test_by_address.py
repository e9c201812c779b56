"""Types of named tuples that reach kernels by their address."""

from __future__ import annotations

import pickle
from typing import NamedTuple

import numba
import numpy as np

from hotcold.numba_kernels.by_address import TupleByAddress
from hotcold.numba_kernels.loops.mailbox import SharedBuffers


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
