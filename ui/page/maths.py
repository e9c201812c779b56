"""Formulas in a text, marked for the page: `\\( \\)`, `\\[ \\]`, `$ $` and `$$ $$` outside code.

Gradio's Markdown would take them for formulas in code as well, and spoil it: its delimiters are
these with an invisible character around them, which is put there.
"""

import re
from functools import lru_cache

_MARK = "\u2063"
DELIMITERS = [
    {"left": _MARK + left, "right": right + _MARK, "display": left in ("$$", "\\[")}
    for left, right in (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$"))
]
# A dollar begins a formula before no blank and no digit's amount: as in pandoc, one that ends it
# follows no blank and stands before no letter or digit. Lengths are bounded, and nothing that was
# counted is given back, so that the time is about proportional to the text's length.
_PARTS = re.compile(
    r"""
    ^[ ]*+(?P<fence>`{3,}+(?=[^`\n]*\n)|~{3,}+)[^\n]*+\n(?:.*?^[ ]*+(?P=fence)|.*) # a block of code
    | (?<!`)(?P<ticks>`++).{1,2000}?(?<!`)(?P=ticks)(?!`)  # code in a line
    | (?<!\\)\\\[(?:[^\\]|\\[^][]){1,4000}+\\\]
    | \$\$.{1,4000}?\$\$
    | (?<!\\)\\\((?:[^\\]|\\[^()]){1,2000}+\\\)
    | (?<![\\$\w])\$(?=[^\s$])[^\n$]{0,500}?[^\s\\$]\$(?!\w)
    """,
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_TAG = re.compile(r"<(?=[a-zA-Z/!?])")


@lru_cache(maxsize=64)  # a thread is painted many times
def with_formulas(text: str) -> str:
    """The text with its formulas between DELIMITERS."""
    return _PARTS.sub(_marked, text) if "$" in text or "\\" in text else text


def without_marks(text: str) -> str:
    """What was written, where `with_formulas` was edited."""
    return text.replace(_MARK, "")


def _marked(found: re.Match[str]) -> str:
    if found["ticks"] or found["fence"]:
        return found[0]
    return f"{_MARK}{_TAG.sub('< ', found[0])}{_MARK}"  # else HTML would begin there
