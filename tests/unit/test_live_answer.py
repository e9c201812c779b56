"""An answer on a terminal while it comes, and once it is there."""

from __future__ import annotations

import io
import random

import pyte
import pytest
from rich.console import Console

from hotcold.jobs.chat.markdown import LiveAnswer, block_begins
from hotcold.jobs.support.console import plain

TEXT = """# A title

A paragraph with **bold**, `code`, a <unk> tag, ![pic](http://x.y/z.png) and [link](http://a.b).
A second line of it that is long enough to be wrapped in a terminal of sixty columns.
A third.

**All of this is bold, as only its end says:
second,
third,
fourth line**

1. one
2. two
   - nested *em*

   more

| a | b |
|---|---|
| 1 | averyveryverylongwordthatcannotbebrokenatallbecauseithasnoblanks |

```python
def f(x):
    return x  # comment

class A: pass
```

> quoted
> text

[ref]: http://gone.example

---

The end &lt;ok&gt; \x1b[31mred
"""
EXPECTED = """A title

A paragraph with bold, code, a <unk> tag, !pic
(http://x.y/z.png) and link (http://a.b).
A second line of it that is long enough to be wrapped in a
terminal of sixty columns.
A third.

All of this is bold, as only its end says:
second,
third,
fourth line

 1 one
 2 two
    • nested em
   more

 a  b
 ──────────────────────────────────────────────────────────
 1  averyveryverylongwordthatcannotbebrokenatallbecauseitha
    snoblanks

def f(x):
    return x  # comment

class A: pass

▌ quoted
▌ text

[ref]: http://gone.example

------------------------------------------------------------

The end <ok> ␛[31mred"""


class Output(io.StringIO):
    """Shows what is written on a screen."""

    def __init__(self, columns: int, lines: int) -> None:
        super().__init__()
        self.screen = pyte.HistoryScreen(columns, lines, history=1000, ratio=0.5)
        self._stream = pyte.Stream(self.screen)

    def write(self, text: str) -> int:
        self._stream.feed(text.replace("\n", "\r\n"))
        return len(text)

    @property
    def text(self) -> str:
        above = [
            "".join(line[column].data for column in range(self.screen.columns)).rstrip()
            for line in self.screen.history.top
        ]
        return "\n".join([*above, *(line.rstrip() for line in self.screen.display)]).rstrip()


def shown(lines: int, is_markdown: bool = True, status: str = "") -> str:
    """What is on the screen at the end; pieces of the text come in any size."""
    output, draw, at = Output(60, lines), random.Random(lines), 0
    console = Console(
        file=output, force_terminal=True, width=60, height=lines, color_system="256",
        legacy_windows=False,
    )  # fmt: skip
    live = LiveAnswer(console, is_markdown, lambda: status)
    while at < len(TEXT):
        size = draw.randint(1, 12)
        live._next_at = 0.0  # however long the last one took
        live.add(TEXT[at : at + size])
        at += size
        assert output.text.endswith(status)
    live.end()
    assert output.screen.cursor.x == 0
    return output.text


@pytest.mark.parametrize("lines", [5, 24, 100])
@pytest.mark.parametrize("status", ["status", ""])
def test_the_text_is_whole_however_it_came(lines: int, status: str) -> None:
    """Also on a screen that has no room for one of its blocks."""
    assert shown(lines, status=status) == EXPECTED


def test_plain_text_is_whole_and_as_it_was_written() -> None:
    text = shown(10, is_markdown=False)
    assert text.split("\n")[0] == "# A title"
    assert "".join(text.split()) == "".join(plain(TEXT).split())


def test_nothing_is_shown_of_an_empty_answer() -> None:
    output = Output(60, 10)
    LiveAnswer(Console(file=output, force_terminal=True, width=60, height=10), True).end()
    assert output.text == "" and output.screen.cursor.y == 0


def test_where_blocks_begin() -> None:
    text = "\n\na\nb\n\n- c\n\n  d\n\n```\ne\n\n"
    assert [text[at:].split("\n")[0] for at in block_begins(text)] == ["a", "- c", "```"]
    assert block_begins("\n \n") == []
