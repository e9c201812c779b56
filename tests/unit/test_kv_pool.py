"""The page allocator beside a model of it that only counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotcold.actors.protocol.kv_pool import KvPool, num_pages_of
from hotcold.actors.protocol.page_index import namespace_key, page_keys
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


_PROMPTS = [[a, b, c, d] for a in (1, 2) for b in (1, 2) for c in (1, 2) for d in (1, 2)]
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "fill", "fill", "end", "hold", "let go", "forget"]),
        st.integers(0, 99),
    ),
    max_size=80,
)


@given(st.integers(4, 14), _STEPS)
def test_a_page_that_is_found_holds_what_its_key_says(
    num_pages: int, steps: list[tuple[str, int]]
) -> None:
    """Beside a model that knows every page's content; prompts are of four pages."""
    tables = np.full((4, 4), -1, np.int32)
    pool = KvPool(num_pages, tables)
    content: dict[int, tuple[int, ...]] = {}
    running: dict[int, list[int]] = {}  # prompts by slot
    done: dict[int, int] = {}
    held: list[int] = []
    for what, number in steps:
        slot = sorted(running)[number % len(running)] if running else -1
        if what == "start":
            prompt = _PROMPTS[number % len(_PROMPTS)]
            found = pool.find(_keys(prompt)[:3])
            free = pool.num_free_pages
            new = pool.allocate(4 * PAGE_POSITIONS, 0, found)
            in_use = {page for each in running for page in pool.pages(each)} | set(held)
            num_new = 4 - len(set(found) & in_use)
            assert (new is None) == (num_new > free or len(running) == 4)
            if new is not None:
                running[new], done[new] = prompt, len(found)
        elif what == "fill" and running and done[slot] < 4:
            prompt, at = running[slot], done[slot]
            if found := pool.find(_keys(prompt)[at : at + 1]):
                pool.replace(slot, at, found)
            else:
                page = pool.pages(slot)[at]
                users = [each for each in running if page in pool.pages(each)]
                assert users == [slot] and page not in held  # nobody else sees it change
                content[page] = tuple(prompt[: at + 1])
                assert pool.name(page, _keys(prompt)[at])
            done[slot] += 1
        elif what == "end" and running:
            pool.free(slot)
            del running[slot], done[slot]
        elif what == "hold" and running:
            key = _keys(running[slot])[number % 4]
            if (found_page := pool.hold(key)) is not None:
                held.append(found_page)
        elif what == "let go" and held:
            pool.let_go(held.pop(number % len(held)))
        elif what == "forget":
            pool.forget()
            assert not any(pool.find(_keys(prompt)) for prompt in _PROMPTS)
        for each, prompt in running.items():
            assert tables[each].tolist() == pool.pages(each)
            for at in range(done[each]):
                assert content[pool.pages(each)[at]] == tuple(prompt[: at + 1])
        for prompt in _PROMPTS:
            for at, page in enumerate(pool.find(_keys(prompt))):
                assert content[page] == tuple(prompt[: at + 1])
        in_use = {page for each in running for page in pool.pages(each)} | set(held)
        assert pool.num_free_pages == num_pages - len(in_use)
        assert pool.usage == pytest.approx(len(in_use) / num_pages)


def _keys(prompt: list[int]) -> list[bytes]:
    return page_keys(b"", [token for token in prompt for _ in range(PAGE_POSITIONS)])


def test_the_oldest_is_given_up_first_and_ends_before_beginnings() -> None:
    pool = KvPool(6, np.zeros((2, 3), np.int32))
    prompts = [[1, 2, 3], [4, 5, 6]]
    for prompt in prompts:
        slot = pool.allocate(3 * PAGE_POSITIONS)
        assert slot == 0
        for page, key in zip(pool.pages(slot), _keys(prompt), strict=True):
            assert pool.name(page, key)
        pool.free(slot)
    assert pool.num_free_pages == 6
    slot = pool.allocate(3 * PAGE_POSITIONS, 0, pool.find(_keys(prompts[0])))  # now used last
    assert slot == 0
    pool.free(slot)
    found: list[list[int]] = []
    for _ in range(6):
        pool.allocate(PAGE_POSITIONS)
        pool.name(pool.pages(0)[0], bytes(len(found) + 1))
        pool.hold(bytes(len(found) + 1))  # it does not come back
        pool.free(0)
        found.append([len(pool.find(_keys(prompt))) for prompt in prompts])
    assert found == [[3, 2], [3, 1], [3, 0], [2, 0], [1, 0], [0, 0]]


def test_keys_say_all_tokens_before() -> None:
    ids = list(range(3 * PAGE_POSITIONS))
    keys = page_keys(b"a", ids)
    assert len(keys) == 3 and page_keys(b"a", ids[:-1]) == keys[:2]
    changed = page_keys(b"a", [7, *ids[1:]])
    assert not set(keys) & {*changed, *page_keys(b"b", ids)}
    assert namespace_key(b"i", "a") != namespace_key(b"i", "") != namespace_key(b"j", "")
    assert namespace_key(b"i", "\ud800") != namespace_key(b"i", "\ud801")  # JSON may have these
    last = page_keys(b"a", [*ids[:-1], 0])
    assert last[:2] == keys[:2] and last[2] != keys[2]
