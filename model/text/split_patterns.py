"""Which patterns of a tokenizer's file read any text in a time that grows with its length alone.

The tokenizers library tries all ways in which a pattern may match, so one of a foreign file may
take hours for a page, in C, where nothing ends it. A pattern is an alternation; those that are told
here as linear have branches that cannot fail once they have read much, or another branch that then
reads on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_INNER = r"\[(?:\\.|[^\]\[\\])++\]"  # a set within a set, as of [a-z&&[^k]]
_SET = rf"\[(?:\\.|{_INNER}|[^\]\[\\])++\]"
_ATOM = rf"(?:\\[pP]\{{\^?\w+\}}|\\[sSdDwWnrtfv]|\\\W|{_SET}|[^\\\[\](){{}}|?*+^$])"
_GROUP = r"\((?:\?i?:)?['\w|\[\]]*+\)"  # of short texts
# A few characters, of which two may vary; then any number of one kind; then what may be missing.
_ONE = rf"{_ATOM}(?![*+?{{])"
_FEW = rf"(?:{_ATOM}(?:\?\+?|\{{\d(?:,\d)?\}})|{_GROUP}\??)(?![*+{{])"
_MANY = rf"{_ATOM}(?:[*+]\+?|\{{\d(?:,\d)?\}}\+)"  # {1,3}+ is any number
_BRANCH = re.compile(
    rf"(?:(?:{_ONE})*+{_FEW}){{0,2}}+(?:{_ONE})*+(?:{_MANY}(?:{_ATOM}[?*]\+?|{_GROUP}\?)*+)?"
)
_BRANCHES = re.compile(rf"(?:\\.|{_SET}|\([^()]*+\)|[^|\\\[\]()])++|\|", re.DOTALL)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
HAN = r"[\p{Han}]"
_SPACES = (r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)")  # where these fail, \s+ reads on
LAST_SPACES = r"(?<!\s)\s++$"  # is tried once where white space begins, and there alone
_MAX_CHARS = 2000


def without_han(letters: str) -> str:
    """The set without Chinese characters."""
    return letters.removesuffix("]") + r"&&[^\p{Han}]]"


_CASES = ((UPPER, LOWER), (without_han(UPPER), without_han(LOWER)))


def is_linear(pattern: str) -> bool:
    """Whether it is known to be; what is not known may be slow."""
    parts = _BRANCHES.findall(pattern[:_MAX_CHARS])
    if "".join(parts) != pattern:
        return False
    branches = {part for part in parts if part not in ("|", LAST_SPACES)}
    others = {_reads_on(branch) for branch in branches}
    return others <= branches and all(map(_BRANCH.fullmatch, others))


def _reads_on(branch: str) -> str:
    """The branch that reads on where this one fails after much; itself where it does not fail."""
    if branch in _SPACES:
        return r"\s+"
    for upper, lower in _CASES:
        branch = branch.replace(f"{upper}*{lower}+", f"{upper}+{lower}*")
    return branch


def patterns_of(component: Any) -> Iterator[str]:
    """The patterns of a normalizer, a pre-tokenizer or a decoder; None has none."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if isinstance(one.get("Regex"), str):
                yield one["Regex"]
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
