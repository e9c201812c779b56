"""Formulas in a text, marked for the page: `\\( \\)`, `\\[ \\]`, `$ $` and `$$ $$` outside code.

The page's Markdown would look for these in code as well, and spoil it. So it looks for characters
of Unicode's private use alone, which take their places here.
"""

import re
from functools import lru_cache
from html import escape

_INLINE, _DISPLAY = ("\ue000", "\ue001"), ("\ue002", "\ue003")
DELIMITERS = [
    {"left": left, "right": right, "display": is_display}
    for (left, right), is_display in ((_INLINE, False), (_DISPLAY, True))
]
# A dollar begins a formula before no blank and no digit's amount: as in pandoc, one that ends it
# follows no blank and stands before no letter or digit. Lengths are bounded, and nothing that was
# counted is given back, so that the time is about proportional to the text's length.
_PARTS = re.compile(
    r"""
    ^[ ]*+(?P<fence>`{3,}+(?=[^`\n]*\n)|~{3,}+)[^\n]*+\n(?:.*?^[ ]*+(?P=fence)|.*) # a block of code
    | (?<!`)(?P<ticks>`++).{1,2000}?(?<!`)(?P=ticks)(?!`)  # code in a line
    | (?<!\\)\\\[(?P<display>(?:[^\\]|\\[^][]){1,4000}+)\\\]
    | \$\$(?P<dollars>.{1,4000}?)\$\$
    | (?<!\\)\\\((?P<inline>(?:[^\\]|\\[^()]){1,2000}+)\\\)
    | (?<![\\$\w])\$(?P<dollar>(?=[^\s$])[^\n$]{0,500}?[^\s\\$])\$(?!\w)
    """,
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)


@lru_cache(maxsize=64)  # a thread is painted many times
def with_formulas(text: str) -> str:
    """The text with its formulas between DELIMITERS, as HTML."""
    return _PARTS.sub(_marked, text) if "$" in text or "\\" in text else text


def _marked(found: re.Match[str]) -> str:
    if found["ticks"] or found["fence"]:
        return found[0]
    display = found["display"] or found["dollars"]
    left, right = _DISPLAY if display else _INLINE
    return left + escape(display or found["inline"] or found["dollar"], quote=False) + right
