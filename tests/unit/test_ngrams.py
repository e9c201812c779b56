"""N-grams of a text, compared with a search through all of it."""

from __future__ import annotations

import gc
import itertools

import numpy as np

from hotcold.actors.driver.ngrams import _CHAIN, _LONGEST, NgramIndex, Ngrams


def longest(tokens: list[int]) -> tuple[int, int]:
    """The length of the longest n-gram that ends the text and stood before, and its latest end."""
    best, at = 0, -1
    for place in range(len(tokens) - 2, -1, -1):
        length = 0
        while length <= place and tokens[place - length] == tokens[-1 - length]:
            length += 1
        if min(length, _LONGEST) > best:
            best, at = min(length, _LONGEST), place
    return best, at


def test_the_longest_is_found() -> None:
    """Texts of few words, so that many n-grams come again; added in parts of any size."""
    random = np.random.default_rng(0)
    num_found = 0
    for _ in range(300):
        size = int(random.integers(1, 60))
        tokens = random.integers(0, int(random.integers(1, 12)), size).tolist()
        pairs = list(itertools.pairwise(tokens))
        index, first = NgramIndex(), 0
        while first < size:
            last = first + int(random.integers(1, 9))
            index.extend(tokens[first:last])
            first = last
        match, (length, at) = index.find(5), longest(tokens)
        if size < 3 or length < 2:
            assert match is None
            continue
        assert match is not None
        if max(map(pairs.count, pairs)) <= _CHAIN:
            assert match.length == length
            follows = tokens[at + 1 :] + tokens[at + 1 :] * 5
            assert match.ids == follows[:5]
            num_found += 1
    assert num_found > 100


class Request:
    """A key that can be forgotten."""


def test_requests_have_indices_of_their_own() -> None:
    ngrams, one, two = Ngrams(), Request(), Request()
    tokens = [1, 2, 3, 4, 1, 2]
    assert ngrams.find(two, [9, 9], 4) is None
    match = ngrams.find(one, tokens, 2)
    assert match is not None and match.ids == [3, 4]
    match = ngrams.find(one, [*tokens, 3], 2)
    assert match is not None and match.ids == [4, 1]
    assert ngrams.find(one, [*tokens, 3], 0) is None
    del one
    gc.collect()
    assert len(ngrams._indices) == 1
