"""Where prompts are cut, over all lengths and beginnings."""

from __future__ import annotations

import itertools

import pytest

from hotcold.actors.protocol.step_sizes import (
    MATRIX_TOKENS,
    chunk_sizes,
    cut_tokens,
    matrix_tokens,
    share_tokens,
)
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS

_LENGTHS = range(1, 700)
_MAX_TOKENS = [16, 33, 40, 63, 64, 65, 100, 128, 256, 512]
_SYSTEMS = list(itertools.product(_MAX_TOKENS, (False, True)))


@pytest.mark.parametrize(("max_tokens", "has_gpu"), _SYSTEMS)
def test_chunks_from_every_beginning(max_tokens: int, has_gpu: bool) -> None:
    """Which tokens go through matmul is the same, on a GPU every cut too; what is shared does."""
    cut = cut_tokens(max_tokens, has_gpu)
    share = share_tokens(cut)
    assert bool(share) == (max_tokens >= MATRIX_TOKENS)
    assert not share or (share % PAGE_POSITIONS == 0 and share % cut == 0)
    for length in _LENGTHS:
        whole = chunk_sizes(length, max_tokens, cut)
        assert sum(whole) == matrix_tokens(length, cut) <= length
        assert all(size % cut == 0 for size in whole[:-1])
        assert max_tokens < MATRIX_TOKENS or length - sum(whole) < MATRIX_TOKENS
        assert not share or sum(whole) >= length // share * share
        cuts = set(itertools.accumulate(whole, initial=0))
        for first in range(0, length, share or length):
            sizes = chunk_sizes(length, max_tokens, cut, first)
            assert first + sum(sizes) == sum(whole) or (not sizes and first >= sum(whole))
            assert all(MATRIX_TOKENS <= size <= max_tokens for size in sizes)
            if has_gpu and sizes:
                assert set(itertools.accumulate(sizes, initial=first)) <= cuts


def test_what_is_shared() -> None:
    assert [share_tokens(cut_tokens(most, False)) for most in (32, 40, 64, 512)] == [0, 320, 64, 64]
    assert [share_tokens(cut_tokens(most, True)) for most in (32, 100, 512)] == [0, 1600, 512]
