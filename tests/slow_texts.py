"""Texts that make a regular expression slow: what it repeats, many times, and then no end of it."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import islice
from typing import Any

codes, parser = (import_module(f"re.{name}") for name in ("_constants", "_parser"))  # without types
LONGEST = 1 << 17  # characters; a field of a request may have about as many
MOST_S = 0.1  # of the processor's time, for one text
_SAMPLES = 4  # texts of a class, an alternation, a repetition
_ENDS = ("", "\0", " ", "\n")
_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)
_CATEGORIES = {
    codes.CATEGORY_DIGIT: "7",
    codes.CATEGORY_NOT_DIGIT: "x ",
    codes.CATEGORY_SPACE: "\n ",
    codes.CATEGORY_NOT_SPACE: "x7",
    codes.CATEGORY_WORD: "w7",
    codes.CATEGORY_NOT_WORD: "- ",
}
_ANY = "x `7\\$[-\n"


def slowest(pattern: re.Pattern[Any], methods: Iterable[str]) -> tuple[float, str]:
    """The most seconds that a text took, and which it was; the first beyond MOST_S is the last."""
    worst, about = 0.0, ""
    source = pattern.pattern
    is_text = isinstance(source, str)
    tree = parser.parse(source if is_text else source.decode("latin-1"), pattern.flags & ~re.ASCII)
    parts = dict.fromkeys(_repeated(list(tree), ""))
    for method in methods:
        for before, part in parts:
            for end in _ENDS:
                for count in _counts(LONGEST // len(part)):
                    text = before + part * count + end
                    took = _seconds(pattern, method, text if is_text else text.encode())
                    if took > worst:
                        worst, about = took, f"{method}: {before!r} + {part!r} * {count} + {end!r}"
                    if took > MOST_S:
                        return worst, about
    return worst, about


def _counts(most: int) -> list[int]:
    """How often to repeat a text; what doubles with each is so told in time."""
    few, many = (4, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 64), (256, 1024, 4096, 16384)
    return [*(count for count in (*few, *many) if count < most), most]


def _seconds(pattern: re.Pattern[Any], method: str, text: Any) -> float:
    gc.disable()  # of all that other tests hold
    began = time.thread_time()
    if method in ("sub", "subn"):
        getattr(pattern, method)(text[:0], text)
    else:
        found = getattr(pattern, method)(text)
        if method == "finditer":
            list(found)
    took = time.thread_time() - began
    gc.enable()
    return took


def _repeated(items: list[Any], before: str) -> Iterator[tuple[str, str]]:
    """What to repeat, and a text before it: of each repetition, and of each way to begin."""
    for place, (code, argument) in enumerate(items):
        sequences = _within(code, argument)
        if code in _REPEATS and argument[1] > 1:
            after = _sample(items[place + 1 :])
            for part in islice(_samples(sequences[0]), _SAMPLES):
                yield from ((before, whole) for whole in (part, part + after) if whole)
        for sequence in sequences:
            yield from _repeated(sequence, before)
        for sample in islice(_of(code, argument), 2):
            if before + sample:
                yield "", before + sample
        before += next(iter(_of(code, argument)), "")


def _within(code: Any, argument: Any) -> list[list[Any]]:
    """The sequences within an item."""
    if code is codes.BRANCH:
        return [list(one) for one in argument[1]]
    if code in _REPEATS:
        return [list(argument[2])]
    if code is codes.SUBPATTERN:
        return [list(argument[-1])]
    if code in (codes.ASSERT, codes.ASSERT_NOT):
        return [list(argument[1])]
    return [list(argument)] if code is codes.ATOMIC_GROUP else []


def _sample(items: list[Any]) -> str:
    return next(_samples(items), "")


def _samples(items: list[Any]) -> Iterator[str]:
    """Some texts of a sequence."""
    choices = [list(islice(_of(*item), _SAMPLES)) or [""] for item in items]
    for number in range(max(map(len, choices), default=0)):
        yield "".join(one[min(number, len(one) - 1)] for one in choices)


def _of(code: Any, argument: Any) -> Iterable[str]:
    """Some texts of an item."""
    if code is codes.LITERAL:
        return chr(argument)
    if code is codes.NOT_LITERAL:
        return (one for one in _ANY if ord(one) != argument)
    if code is codes.ANY:
        return _ANY
    if code is codes.IN:
        return _of_set(argument)
    if code in (codes.ASSERT, codes.ASSERT_NOT):
        return ""
    samples = (one for sequence in _within(code, argument) for one in _samples(sequence))
    if code in _REPEATS:
        least, most, _ = argument
        return (one * min(max(least, 1), most) for one in samples)
    return samples


def _of_set(items: list[Any]) -> Iterable[str]:
    found = []
    for code, argument in items:
        if code is codes.LITERAL:
            found.append(chr(argument))
        elif code is codes.RANGE:
            found.append(chr(argument[0]))
        elif code is codes.CATEGORY:
            found += _CATEGORIES[argument]
    is_negated = items[0][0] is codes.NEGATE
    return (one for one in _ANY if one not in found) if is_negated else found
