"""An answer on a terminal while it comes, and once it is there."""

from __future__ import annotations

import io
import random

import pyte
import pytest
from rich.console import Console

from hotcold.jobs.chat.live_answer import LiveAnswer
from hotcold.jobs.chat.markdown import block_begins
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
 ─────────────────────────────────────────────────────────
 1  averyveryverylongwordthatcannotbebrokenatallbecauseith
    asnoblanks

def f(x):
    return x  # comment

class A: pass

▌ quoted
▌ text

[ref]: http://gone.example

-----------------------------------------------------------

The end <ok> ␛[31mred"""


class Output(io.StringIO):
    """Shows what is written on a screen, and looks at it after each character."""

    def __init__(self, columns: int, lines: int) -> None:
        super().__init__()
        self.screen = pyte.HistoryScreen(columns, lines, history=1000, ratio=0.5)
        self._stream = pyte.Stream(self.screen)
        self.watched: list[str] = []  # lines that must not vanish for a moment
        self.vanished: list[str] = []

    def write(self, text: str) -> int:
        for character in text:
            self._stream.feed(character)
            if self.watched:
                text_now = self.text
                self.vanished += [line for line in self.watched if line not in text_now]
        return len(text)

    @property
    def text(self) -> str:
        above = [
            "".join(line[column].data for column in range(self.screen.columns)).rstrip()
            for line in self.screen.history.top
        ]
        return "\n".join([*above, *(line.rstrip() for line in self.screen.display)]).rstrip()


def answer(output: Output, is_markdown: bool = True, status: str = "status") -> LiveAnswer:
    console = Console(
        file=output, force_terminal=True, width=output.screen.columns, height=output.screen.lines,
        color_system="256",
    )  # fmt: skip
    return LiveAnswer(console, is_markdown, lambda: status)


def feed(live: LiveAnswer, text: str, seed: int) -> None:
    draw, at = random.Random(seed), 0
    while at < len(text):
        size = draw.randint(1, 12)
        live._next_at = 0.0  # however long the last one took
        live.add(text[at : at + size])
        at += size


@pytest.mark.parametrize("lines", [5, 24, 100])
@pytest.mark.parametrize("status", ["status", ""])
def test_the_text_is_whole_however_it_came(lines: int, status: str) -> None:
    """Also on a screen that has no room for one of its blocks."""
    output = Output(60, lines)
    live = answer(output, status=status)
    feed(live, TEXT, lines)
    assert output.text.endswith(status)
    live.end()
    assert output.text == EXPECTED
    assert output.screen.cursor.x == 0


def test_plain_text_is_whole_and_as_it_was_written() -> None:
    output = Output(60, 10)
    live = answer(output, is_markdown=False)
    feed(live, TEXT, 0)
    live.end()
    assert output.text.split("\n")[0] == "# A title"
    assert "".join(output.text.split()) == "".join(plain(TEXT).split())


def test_nothing_that_is_shown_vanishes_while_more_comes() -> None:
    output = Output(60, 40)
    live = answer(output)
    live.add("First.\n\nSecond, which is **whole**.\n\n- one\n")
    live._next_at = 0.0
    output.watched = ["First.", "Second, which is whole.", " • one"]
    feed(live, "- two\n- three\n\n\nAnd then", 0)
    live._next_at = 0.0
    live.add(" ")
    output.watched.append("And then")
    feed(live, "one line that grows.\n\nmore.", 0)
    live.end()
    assert output.vanished == []
    end = "\n\nAnd then one line that grows.\n\nmore."
    assert output.text.endswith(f" • one\n • two\n • three{end}")


def test_a_terminal_that_gets_narrower_loses_nothing() -> None:
    output = Output(60, 30)
    live = answer(output)
    live.add("Some words. " * 8)
    live._console.width = 40
    assert live._up(["x" * 60, "\x1b[1mbold\x1b[0m", ""]) == "\x1b[3A\r"  # the first takes two rows
    output.screen.resize(30, 40)
    live._next_at = 0.0
    live.add("The end.")
    live.end()
    assert "The end." in output.text and "status" not in output.text.splitlines()[-1]


def test_nothing_is_shown_of_an_empty_answer() -> None:
    output = Output(60, 10)
    live = answer(output)
    live.end()
    assert output.text == "" and output.screen.cursor.y == 0


def test_where_blocks_begin() -> None:
    text = "\n\na\nb\n\n- c\n\n  d\n\n```\ne\n\n"
    assert [text[at:].split("\n")[0] for at in block_begins(text)] == ["a", "- c", "```"]
    assert block_begins("\n \n") == []
