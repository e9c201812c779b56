"""Drafts from the text itself: what followed the longest n-gram that a request ends in.

After prompt-lookup decoding (Saxena, 2023) and the hash chains of LZ77: answers that quote, edit
or repeat their prompt come again.
"""

from array import array
from collections.abc import Hashable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

_HASH_BITS = 15
_CHAIN = 24  # earlier places that are compared, the latest first
_LONGEST = 32  # tokens that are compared there; an n-gram as long is not searched any further
_FEWEST = 2  # tokens of an n-gram
_TOKENS_AT_ONCE = 1024  # indexed between two steps: half a millisecond


class Match(NamedTuple):
    """What may follow: ids after an n-gram of `length` tokens that stood there before."""

    ids: list[int]
    length: int


class NgramIndex:
    """Where each pair of tokens of one text stood before.

    Units:   128 KiB and 8 bytes a token; a token is added in constant time
    """

    def __init__(self) -> None:
        self._heads = array("i", [-1]) * (1 << _HASH_BITS)  # by hash: the latest pair's end
        self._before = array("i")  # by place: the pair before it with the same hash
        self._tokens = array("i")

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, ids: Sequence[int]) -> None:
        """Add the text's next tokens."""
        tokens, before, heads = self._tokens, self._before, self._heads
        for token_id in ids:
            place = len(tokens)
            tokens.append(token_id)
            if place == 0:
                before.append(-1)
                continue
            key = _hash(tokens[place - 1], token_id)
            before.append(heads[key])
            heads[key] = place

    def find(self, count: int) -> Match | None:
        """The `count` tokens after the longest n-gram that the text ends in, of 2 at least.

        Of n-grams as long it is the latest. Where it reaches into the text's end, what follows is
        repeated.
        """
        tokens = self._tokens
        last = len(tokens) - 1
        if last < _FEWEST:
            return None
        best, best_place = _FEWEST - 1, -1
        place = self._before[last]
        for _ in range(_CHAIN):
            if place < 0:
                break
            # Only a place that also agrees at the best length so far can be better.
            if place >= best and tokens[place - best] == tokens[last - best]:
                length = 0
                most = min(_LONGEST, place + 1)
                while length < most and tokens[place - length] == tokens[last - length]:
                    length += 1
                if length > best:
                    best, best_place = length, place
                    if best == _LONGEST:
                        break
            place = self._before[place]
        if best_place < 0:
            return None
        ids = tokens[best_place + 1 : best_place + 1 + count].tolist()
        period = last - best_place
        while len(ids) < count:
            ids.append(ids[len(ids) - period])
        return Match(ids, best)


class Ngrams:
    """The indices of all requests that run; each is forgotten with its request."""

    def __init__(self) -> None:
        self._indices: WeakKeyDictionary[Hashable, NgramIndex] = WeakKeyDictionary()

    def find(self, request: Hashable, tokens: Sequence[int], count: int) -> Match | None:
        """What may follow a request's `tokens`, to which tokens were only added since last time.

        None where nothing is found, or while a long prompt is being indexed, a part at a time.
        """
        index = self._indices.get(request)
        if index is None:
            index = self._indices[request] = NgramIndex()
        first = len(index)
        index.extend(tokens[first : first + _TOKENS_AT_ONCE])
        return index.find(count) if len(index) == len(tokens) and count > 0 else None


def _hash(first: int, second: int) -> int:
    return ((first * 0x9E3779B1 ^ second * 0x85EBCA6B) >> 7) & ((1 << _HASH_BITS) - 1)
