"""The page allocator beside a model of it that only counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotcold.actors.protocol.kv_pool import KvPool, num_pages_of
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS

_ACTIONS = st.lists(st.one_of(st.integers(1, 5 * PAGE_POSITIONS), st.integers(-9, 0)), max_size=60)


@given(st.integers(1, 12), st.integers(1, 4), _ACTIONS)
def test_no_page_has_two_owners(num_pages: int, num_slots: int, actions: list[int]) -> None:
    """A positive action takes or extends by so many positions, another frees a slot."""
    tables = np.full((num_slots, 5), -1, np.int32)
    pool = KvPool(num_pages, tables)
    allocated: dict[int, list[int]] = {}
    for action in actions:
        free = num_pages - sum(map(len, allocated.values()))
        assert pool.num_free_pages == free
        if action > 0:
            wanted = -(-action // PAGE_POSITIONS)
            slot = pool.allocate(action)
            assert (slot is None) == (len(allocated) == num_slots or wanted > free)
            if slot is not None:
                assert slot == min(set(range(num_slots)) - set(allocated))
                allocated[slot] = tables[slot, :wanted].tolist()
            for slot, pages in allocated.items():
                lacking = max(0, wanted - len(pages))
                free = num_pages - sum(map(len, allocated.values()))
                assert pool.num_lacking(slot, action) == lacking
                assert pool.extend(slot, action) == (lacking <= free)
                if lacking <= free:
                    assert tables[slot, : len(pages)].tolist() == pages
                    pages += tables[slot, len(pages) : len(pages) + lacking].tolist()
        elif allocated:
            slot = sorted(allocated)[-action % len(allocated)]
            pool.free(slot)
            del allocated[slot]
        owned = [page for pages in allocated.values() for page in pages]
        assert len(set(owned)) == len(owned) and set(owned) <= set(range(num_pages))
        for slot, pages in allocated.items():  # nothing that runs loses a page
            assert tables[slot, : len(pages)].tolist() == pages


def test_pages_freed_last_are_lent_first() -> None:
    tables = np.zeros((2, 3), np.int32)
    pool = KvPool(6, tables)
    assert pool.allocate(3 * PAGE_POSITIONS) == 0 and pool.allocate(PAGE_POSITIONS + 1) == 1
    assert tables.tolist() == [[0, 1, 2], [3, 4, 0]]
    pool.free(1)
    pool.free(0)
    assert pool.allocate(2 * PAGE_POSITIONS) == 0 and pool.allocate(PAGE_POSITIONS) == 1
    assert tables[0, :2].tolist() == [0, 1] and tables[1, 0] == 2


def test_pages_that_are_to_be_spare() -> None:
    pool = KvPool(3, np.zeros((3, 3), np.int32))
    assert pool.allocate(PAGE_POSITIONS, 3) is None and pool.allocate(PAGE_POSITIONS, 2) == 0
    assert pool.allocate(PAGE_POSITIONS, 2) is None and pool.allocate(PAGE_POSITIONS, 1) == 1


def test_more_than_a_slot_can_have() -> None:
    assert [num_pages_of(n) for n in (0, 1, PAGE_POSITIONS, PAGE_POSITIONS + 1)] == [0, 1, 1, 2]
    pool = KvPool(9, np.zeros((1, 2), np.int32))
    with pytest.raises(ValueError, match="129 positions"):
        pool.allocate(2 * PAGE_POSITIONS + 1)
    assert pool.num_free_pages == 9
    assert pool.allocate(1) == 0
    with pytest.raises(ValueError, match="129 positions"):
        pool.extend(0, 2 * PAGE_POSITIONS + 1)
    assert pool.num_free_pages == 8
