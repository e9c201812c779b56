"""README and docs as tests read them: pages, code blocks, commands, links, names of files."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Page:
    """One Markdown file; `path` is relative to the checkout."""

    path: Path

    @cached_property
    def text(self) -> str:
        return (ROOT / self.path).read_text()

    @cached_property
    def prose(self) -> str:
        """The text without its code blocks, fenced or indented."""
        return re.sub(r"^(?: {4,}|\t)\S.*$", "", _FENCE.sub("", self.text), flags=re.M)

    def blocks(self, language: str) -> list[str]:
        """What stands between fences of one language."""
        return [block for found, block in _FENCE.findall(self.text) if found == language]

    @cached_property
    def anchors(self) -> set[str]:
        """The ids that GitHub gives the page's headings."""
        headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", self.text), re.M)
        return {_anchor(heading) for heading in headings}

    def links(self) -> Iterator[tuple[Path, str]]:
        """Every link to a file of the checkout: its path, and the anchor or ""."""
        for target in re.findall(r"\]\(([^)\s]+)\)", self.text):
            if re.match(r"\w+:", target):
                continue
            name, _, anchor = target.partition("#")
            here = ROOT / self.path
            yield (here.parent / name if name else here).resolve(), anchor

    def code(self) -> list[str]:
        """What stands between backticks in prose, line ends as blanks."""
        return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", self.prose)]

    def commands(self) -> list[str]:
        """Every command of the page's shell blocks: comments cut off, parts of a line apart."""
        found = []
        for block in self.blocks("sh"):
            for line in block.replace("\\\n", " ").splitlines():
                found += _parts(line)
        return found


def pages() -> list[Page]:
    """README and everything in docs/."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [Page(path.relative_to(ROOT)) for path in paths]


def page(path: str) -> Page:
    return Page(Path(path))


def _parts(line: str) -> list[str]:
    """The commands of a line, without assignments before them and redirections behind."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[list[str]] = [[]]
    skip = False
    for word in lexer:
        if word in ("&&", ";", "|"):
            words.append([])
        elif word == ">":
            skip = True
        elif skip:
            skip = False
        elif words[-1] or not re.fullmatch(r"\w+=\S*", word):
            words[-1].append(word)
    return [shlex.join(part) for part in words if part]


def _anchor(heading: str) -> str:
    text = re.sub(r"`|\]\([^)]*\)|\[", "", heading).strip().lower()
    kept = "".join(c for c in text if c in " -_" or unicodedata.category(c)[0] in "LN")
    return kept.replace(" ", "-")
