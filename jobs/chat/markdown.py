"""Answers as a terminal shows them: markdown by rich, and nothing of the text left out."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from itertools import chain

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Heading, Markdown, TableDataElement
from rich.segment import Segment, Segments
from rich.syntax import Syntax
from rich.text import Text

from hotcold.jobs.support.console import plain

# What would leave out text: tags, the addresses of pictures, definitions of links.
_LEFT_OUT = ("html_block", "html_inline", "image", "reference")
_PACE = 4.0  # after painting, so many times as long as it took is not painted
_LINE_END = re.compile("\n")


class _Code(CodeBlock):
    """As it can be copied: no frame of blanks around it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip("\n")
        yield Syntax(
            code, self.lexer_name, theme=self.theme, word_wrap=True, background_color="default"
        )


class _Heading(Heading):
    """Where text begins, as all of it does."""

    LEVEL_ALIGN = {**Heading.LEVEL_ALIGN, "h1": "left"}  # noqa: RUF012  (rich's own)


class _Cell(TableDataElement):
    """Its long words are broken, not cut."""

    def __init__(self, justify: str) -> None:
        super().__init__(justify)  # type: ignore[arg-type]
        self.content.overflow = "fold"


class _Markdown(Markdown):
    elements = {  # noqa: RUF012  (rich's own)
        **Markdown.elements,
        "heading_open": _Heading,
        "fence": _Code,
        "code_block": _Code,
        "td_open": _Cell,
        "th_open": _Cell,
    }

    def __init__(self, text: str) -> None:
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.parsed = _parser().parse(text)
        for token in self.parsed:
            for part in token.children or ():
                if part.type == "softbreak":  # lines stay as the model has written them
                    part.type = "hardbreak"


def _parser() -> MarkdownIt:
    return MarkdownIt().enable(["strikethrough", "table"]).disable(_LEFT_OUT)


def block_begins(text: str) -> list[int]:
    """Where in a text its outermost blocks begin; what is before the first of them is blank."""
    parser = _parser()
    parser.core.ruler.disable("inline")
    lines = {one.map[0] for one in parser.parse(text) if one.level == 0 and one.map}
    starts = [0, *(match.end() for match in _LINE_END.finditer(text))]
    return [starts[line] for line in sorted(lines)]


class LiveAnswer:
    """Shows an answer while it comes: whole blocks for good, and below them as it is so far.

    Below stands as much as the screen has room for, and a line of status, "" for none.
    """

    def __init__(
        self, console: Console, is_markdown: bool, status: Callable[[], str] = lambda: ""
    ) -> None:
        """Nothing is shown yet."""
        self._console, self._is_markdown, self._status = console, is_markdown, status
        self._text = ""  # that is not written for good
        self._has_written = False
        self._next_at = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def add(self, text: str) -> None:
        """Take more of the answer, and show it unless that was done just now."""
        self._text += plain(text)
        began = time.monotonic()
        if began < self._next_at:
            return
        self._live.start()
        # A line that is not whole may yet become a list's item, or a heading's underline.
        lines = self._text[: self._text.rfind("\n") + 1]
        end = block_begins(lines)[-1:] if self._is_markdown else [len(lines)]
        if end and (whole := self._text[: end[0]]):
            self._text = self._text[end[0] :]
            self._write(whole)
        self._live.update(self._below(), refresh=True)
        ended = time.monotonic()
        self._next_at = ended + _PACE * (ended - began)

    def end(self) -> None:
        """Write the rest for good."""
        self._live.stop()
        self._write(self._text)
        self._text = ""

    def _write(self, text: str) -> None:
        if lines := self._lines(text.removesuffix("\n") if text else ""):
            self._console.print(_joined(lines), end="")
            self._has_written = True

    def _lines(self, text: str) -> list[list[Segment]]:
        """A text's lines without empty ones around them, but for one below what is written."""
        if not self._is_markdown:
            return (
                self._console.render_lines(Text(text, overflow="fold"), pad=False) if text else []
            )
        lines = self._console.render_lines(_Markdown(text), pad=False)
        for end in (0, -1):
            while lines and not any(one.text.strip() for one in lines[end]):
                lines.pop(end)
        return [[], *lines] if lines and self._has_written else lines

    def _below(self) -> RenderableType:
        """As much of what is not written as the screen has room for, and the status."""
        room = max(1, self._console.height - 3)
        lines = self._lines(self._text[-self._console.width * room * 2 :])[-room:]
        parts: list[RenderableType] = [_joined(lines)] if lines else []
        if status := self._status():
            parts += ["", Text(status, style="dim", no_wrap=True, overflow="ellipsis")]
        return Group(*parts)


def _joined(lines: list[list[Segment]]) -> Segments:
    return Segments(chain.from_iterable([*line, Segment.line()] for line in lines))
