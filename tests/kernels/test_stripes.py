"""Sums of stripes are added in one tree, however services divide them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hotcold.actors.protocol.messages import ServicePart
from hotcold.actors.protocol.stripes import (
    num_outputs,
    share_stripes,
    sums_of_services,
)
from hotcold.numba_kernels.decode.stripes import first_stripes
from hotcold.numba_kernels.loops.layer_loop import add_sums

LANES, TOKENS, WIDTH = 64, 2, 5
VALUES = np.random.default_rng(1).standard_normal((LANES, TOKENS, WIDTH), dtype=np.float32)


def tree(first: int, end: int) -> np.ndarray:
    """The sum of stripes first..end-1, a power of two of them, half by half."""
    if end - first == 1:
        return VALUES[first]
    middle = (first + end) // 2
    return tree(first, middle) + tree(middle, end)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=7), st.booleans())
def test_services_sums_give_the_sum_of_all_stripes(threads: list[int], has_bias: bool) -> None:
    stripes = share_stripes(LANES, threads)
    parts = [ServicePart("gpu", has_head=True)]
    parts += [
        ServicePart(f"cpu{i}", neuron_ids=[], has_down_bias=i == 0, stripes=own)
        for i, own in enumerate(stripes)
    ]
    bias = np.random.default_rng(2).standard_normal((TOKENS, WIDTH), dtype=np.float32)
    partials = np.full((len(parts), TOKENS, WIDTH), np.nan, np.float32)
    most = num_outputs(stripes, has_bias)
    more = np.full((len(parts), most - 1, TOKENS, WIDTH), np.nan, np.float32)
    for service, own in enumerate(stripes, start=1):
        starts = first_stripes(own.first, own.end).tolist()
        sums = [tree(*span) for span in zip(starts, [*starts[1:], own.end], strict=True)]
        if has_bias and service == 1:
            sums.append(bias)
        for output, each in enumerate(sums):
            target = more[service, output - 1] if output else partials[service]
            target[:] = each
    found = sums_of_services(parts, has_bias)
    add_sums(partials, more, found, 0, TOKENS)
    expected = tree(0, LANES)
    np.testing.assert_array_equal(partials[1], expected + bias if has_bias else expected)
