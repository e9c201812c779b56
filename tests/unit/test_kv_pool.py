"""The page allocator beside a model of it that only counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotcold.actors.kv_cache.pool import KvPool, Window, namespace_key, page_keys
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS
from hotcold.numba_kernels.loops.mailbox import RECURRENT, WINDOWED
from hotcold.numba_kernels.recurrent_arrays import NO_PAGE


def _keys(prompt: list[int]) -> list[bytes]:
    return page_keys(b"", [token for token in prompt for _ in range(PAGE_POSITIONS)])


def test_the_oldest_is_given_up_first_and_ends_before_beginnings() -> None:
    pool = KvPool(6, np.zeros((2, 2, 3), np.int32))
    prompts = [[1, 2, 3], [4, 5, 6]]
    for prompt in prompts:
        slot = pool.allocate(3 * PAGE_POSITIONS)
        assert slot == 0
        for index, key in enumerate(_keys(prompt)):
            assert pool.name(slot, index, key)
        pool.free(slot)
    assert pool.num_free_pages == 6
    slot = pool.allocate(3 * PAGE_POSITIONS, 0, _keys(prompts[0]))  # now used last
    assert slot == 0
    pool.free(slot)
    found: list[list[int]] = []
    for _ in range(6):
        pool.allocate(PAGE_POSITIONS)
        pool.name(0, 0, bytes(len(found) + 1))
        pool.hold(bytes(len(found) + 1))  # it does not come back
        pool.free(0)
        found.append([pool.find(_keys(prompt)) for prompt in prompts])
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


_LENGTH = 10  # pages of a prompt
_PROMPTS = [[a] * 4 + [b] * 4 + [c] * 2 for a in (1, 2) for b in (1, 2) for c in (1, 2)]
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", *["step"] * 4, "end", "hold", "let go", "forget"]),
        st.integers(0, 999),
    ),
    max_size=120,
)


@given(
    st.integers(10, 30),
    st.integers(1, 3 * PAGE_POSITIONS),
    st.integers(1, 3 * PAGE_POSITIONS),
    st.integers(0, 12) | st.none(),
    st.sampled_from([1, 2]),
    _STEPS,
)
def test_pages_hold_what_tokens_see(
    num_pages: int, size: int, step: int, more: int | None, together: int,
    steps: list[tuple[str, int]],
) -> None:  # fmt: skip
    """Beside a model of every page's content, by group and position.

    A step writes its positions and reads what its tokens see: in the first layers all before, in
    the others, where there are such, a window, and recurrent ones a few positions. Of a chunk these
    have only the pages that later tokens see.
    """
    window, tables = Window(size, step), np.full((3, 4, 4 * _LENGTH), -1, np.int32)
    states = Window(4, 32, 1, page_positions=16, most_ends=3)
    windows = {WINDOWED: (window, window.num_pages), RECURRENT: (states, states.num_pages)}
    windows = {group: (own, least + (more or 0)) for group, (own, least) in windows.items()}
    pool = KvPool(num_pages, tables, {} if more is None else windows)
    groups = range(len(pool._groups))
    content: dict[tuple[int, int, int], tuple[int, ...]] = {}  # group, page, row: tokens until it
    running: dict[int, list[int]] = {}  # tokens by slot
    done: dict[int, int] = {}
    held: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # pages, tokens

    sizes = [PAGE_POSITIONS, PAGE_POSITIONS, states.page_positions]

    def text(tokens: list[int], position: int) -> tuple[int, ...]:
        return (*tokens[: position // PAGE_POSITIONS + 1], position)

    def first_seen(group: int, position: int) -> int:
        return max(0, position + 1 - (0, size, states.size)[group]) if group else 0

    def require(group: int, slot: int, first: int, end: int) -> None:
        for position in range(first, end):
            page, row = divmod(position, sizes[group])
            number = int(tables[group, slot, page])
            assert number in pool._groups[group].held[slot].pages
            assert content[group, number, row] == text(running[slot], position)

    for what, number in steps:
        slot = sorted(running)[number % len(running)] if running else -1
        if what == "start":
            prompt = _PROMPTS[number % len(_PROMPTS)]
            keys = _keys(prompt)[: _LENGTH - 1]
            count = pool.find(keys, 0, together)
            assert count % together == 0
            before = pool.num_free_pages
            new = pool.allocate(_LENGTH * PAGE_POSITIONS, 0, keys[:count])
            if new is None:
                assert pool.num_free_pages.tolist() == before.tolist()
                assert len(running) or held
                continue
            running[new], done[new] = prompt, count * PAGE_POSITIONS
            for group in groups:
                require(group, new, first_seen(group, done[new]), done[new])
        elif what == "step" and running and done[slot] < _LENGTH * PAGE_POSITIONS:
            prompt, first = running[slot], done[slot]
            index = first // PAGE_POSITIONS
            if first % (together * PAGE_POSITIONS) == 0:
                keys = _keys(prompt)[index : _LENGTH - 1]
                if count := pool.find(keys, index, together):
                    pool.replace(slot, index, keys[:count])
                    done[slot] += count * PAGE_POSITIONS
                    for group in groups:
                        require(group, slot, first_seen(group, done[slot]), done[slot])
                    continue
            end = min(_LENGTH * PAGE_POSITIONS, first + number % step + 1)
            ends = sorted({end, end // PAGE_POSITIONS * PAGE_POSITIONS or end})
            is_chunk = end - first > states.step or number % 2 == 1
            if not pool.extend(slot, end, first, ends=ends if is_chunk else None):
                assert len(running) > 1 or held  # a sequence alone can always go on
                continue
            assert pool.num_positions(slot) >= end
            for one, own in zip(pool._groups[1:], (window, states), strict=False):
                taken = one.held[slot].pages
                assert len(taken) - taken.count(NO_PAGE) <= own.num_pages
            for group in groups:
                require(group, slot, first_seen(group, first), first)
                for position in range(first, end):
                    page, row = divmod(position, sizes[group])
                    place = int(tables[group, slot, page])
                    if place == NO_PAGE:
                        assert group == RECURRENT and is_chunk
                        continue
                    users = pool._groups[group]._num_users[place]
                    assert users == 1 or content.get((group, place, row)) == text(prompt, position)
                    content[group, place, row] = text(prompt, position)
            done[slot] = end
            for page in range(index, end // PAGE_POSITIONS):
                pool.name(slot, page, _keys(prompt)[page])
        elif what == "end" and running:
            pool.free(slot)
            del running[slot], done[slot]
        elif what == "hold" and running:
            at, of_states = number % _LENGTH, number % 3 == 0
            if (pages := pool.hold(_keys(running[slot])[at], of_states)) is not None:
                last = (at + 1) * PAGE_POSITIONS - 1
                held.append((pages, text(running[slot], last)))
        elif what == "let go" and held:
            pages, expected = held.pop(number % len(held))
            for group, page in enumerate(pages):  # nobody has written there meanwhile
                assert page == NO_PAGE or content[group, page, sizes[group] - 1] == expected
            pool.let_go(pages)
        elif what == "forget":
            pool.forget()
            assert not any(pool.find(_keys(prompt)) for prompt in _PROMPTS)
        for group in groups:
            for each in running:
                first = first_seen(group, done[each])
                require(group, each, first, done[each])
        used = [
            (
                {page for one in group.held.values() for page in one.pages}
                | {pages[number] for pages, _ in held}
            )
            - {NO_PAGE}
            for number, group in enumerate(pool._groups)
        ]
        free = pool.num_pages - pool.num_free_pages
        assert free.tolist() == [len(pages) for pages in used]
        assert pool.usage == pytest.approx(len(used[0]) / num_pages)
