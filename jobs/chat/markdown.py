"""Answers as a terminal shows them: markdown rendered, and nothing of the text left out."""

from __future__ import annotations

import re

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, TableDataElement
from rich.syntax import Syntax
from rich.text import Text

# What would leave out text: tags, the addresses of pictures, definitions of links.
_LEFT_OUT = ("html_block", "html_inline", "image", "reference")
_PADDING = re.compile(r"(?<! ) ++((?:\x1b\[[\d;]*+m)*+)$")
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
    tokens: list[Token] = parser.parse(text)
    lines = {one.map[0] for one in tokens if one.level == 0 and one.map}
    starts = [0, *(match.end() for match in _LINE_END.finditer(text))]
    return [starts[line] for line in sorted(lines)]


def rendered(text: str, is_markdown: bool) -> RenderableType:
    """The text, for rich."""
    return _Markdown(text) if is_markdown else Text(text, overflow="fold")


def lines_of(console: Console, renderable: RenderableType, width: int) -> list[str]:
    """Lines of at most `width` cells, with their colours, without blanks at their ends."""
    with console.capture() as captured:
        console.print(renderable, width=width)
    lines = captured.get().removesuffix("\n").split("\n")
    return [_PADDING.sub(r"\1", line) for line in lines]
