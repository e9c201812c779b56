"""An answer while it comes: blocks that are whole stay, what follows them is shown as it is so far.

Only lines that change are written, over what they were, so that nothing flickers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from itertools import pairwise

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from hotcold.jobs.chat.markdown import block_begins, lines_of, rendered
from hotcold.jobs.support.console import plain

_PACE = 4.0  # after painting, so many times as long as it took is not painted
# The last line, where it may yet become a list's item, a fence, a heading's underline.
_UNDECIDED = re.compile(r"\n[ \t]*+[-+*=#>|`~\d.)]{0,4}+[ \t]*+$")
_CODES = re.compile(r"\x1b\[[\d;]*m")
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"  # a terminal that knows these shows it all at once
_TO_END_OF_LINE, _TO_END_OF_SCREEN = "\x1b[K", "\x1b[J"


class LiveAnswer:
    """Shows one answer, below where the cursor is."""

    def __init__(
        self, console: Console, is_markdown: bool, status: Callable[[], str] = lambda: ""
    ) -> None:
        """`status` is a line below the text that is not whole; without any it is not shown."""
        self._console = console
        self._is_markdown = is_markdown
        self._status = status
        self._text = ""  # that is not written for good
        self._has_written = False
        self._shown: list[str] = []  # the last lines of the screen
        self._at_begin = True  # of a line on which nothing is
        self._width = 0
        self._next_at = 0.0

    def add(self, text: str) -> None:
        """Take more of the answer, and show it unless that was done just now."""
        self._text += plain(text)
        began = time.monotonic()
        if began < self._next_at:
            return
        whole, rest = self._split()
        self._text = rest
        self._paint(self._lines(whole, True), self._tail(rest))
        ended = time.monotonic()
        self._next_at = ended + _PACE * (ended - began)

    def end(self) -> None:
        """Write the rest for good, and begin a new line."""
        self._paint(self._lines(self._text, True), [])
        self._text = ""
        if not self._at_begin:
            self._console.file.write("\r\n")
            self._console.file.flush()

    def _split(self) -> tuple[str, str]:
        """The blocks to which nothing can be added any more, and what follows them."""
        text = self._text
        if not self._is_markdown:
            end = text.rfind("\n") + 1
            return text[:end], text[end:]
        *before, last = [0, *block_begins(_UNDECIDED.sub("\n", text))]
        end = last if before else 0
        return text[:end], text[end:]

    def _lines(self, text: str, is_for_good: bool) -> list[str]:
        """A text's lines; an empty one parts blocks."""
        if not self._is_markdown:
            return self._rendered(text.removesuffix("\n")) if text else []
        found: list[str] = []
        begins = block_begins(text)
        for begin, end in pairwise([*begins, len(text)]):
            lines = self._rendered(text[begin:end])
            while lines and _is_empty(lines[0]):
                lines.pop(0)
            while lines and _is_empty(lines[-1]):
                lines.pop()
            found += [""] if found or self._has_written else []
            found += lines
        self._has_written |= is_for_good and bool(found)
        return found

    def _rendered(self, text: str) -> list[str]:
        return lines_of(self._console, rendered(text, self._is_markdown), self._columns)

    def _tail(self, rest: str) -> list[str]:
        """As much of what is not whole as the screen has room for, and the status."""
        below = []
        if status := self._status():
            line = Text(status, style="dim", no_wrap=True, overflow="ellipsis")
            below = ["", *lines_of(self._console, line, self._columns)]
        room = max(1, self._console.height - len(below) - 1)
        most_chars = self._columns * room * 2
        if self._is_markdown and len(rest) <= most_chars:
            rest = _UNDECIDED.sub("\n", rest)
        lines = self._lines(rest[-most_chars:], False)
        return [*lines[-room:], *below]

    @property
    def _columns(self) -> int:
        # One less than there are: in the last one terminals differ in where the cursor goes.
        return max(8, self._console.width - 1)

    def _paint(self, whole: list[str], tail: list[str]) -> None:
        """Write `whole` for good where the tail was, and the new tail below."""
        new, old, same = [*whole, *tail], self._shown, 0
        if self._width == self._console.width:
            while same < min(len(new), len(old)) and new[same] == old[same]:
                same += 1
        if 0 < same == len(new) < len(old):
            same -= 1  # the cursor is to stand behind the last line
        self._shown, self._width = tail, self._console.width
        if same == len(new) == len(old):
            return
        parts = []
        if same < len(old):
            parts.append(self._up(old[same:]))
        elif not self._at_begin:
            parts.append("\r\n")
        parts += ["\r\n".join(line + _TO_END_OF_LINE for line in new[same:]), _TO_END_OF_SCREEN]
        self._at_begin = not new
        self._console.file.write("".join([_BEGIN, *parts, _END]))
        self._console.file.flush()

    def _up(self, lines: list[str]) -> str:
        """To where the first of the last `lines` begins; narrower, each takes more rows."""
        width = max(1, self._console.width)
        rows = [max(1, -(-cell_len(_CODES.sub("", line)) // width)) for line in lines]
        up = sum(rows) - 1
        return f"\x1b[{up}A\r" if up else "\r"


def _is_empty(line: str) -> bool:
    return not _CODES.sub("", line).strip()
