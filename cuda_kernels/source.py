"""The kernels' sources as one text for a compiler, and the kernels instantiated from them."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from hotcold.cuda_kernels.format_header import NAME, format_header

CSRC = Path(__file__).parent / "csrc"
# Multiply-adds are fused only where the source says so: the same bits in every specialisation.
OPTIONS = ("-std=c++17", "--fmad=false")
_INCLUDE = re.compile(r'#include "(\w+\.cuh)"')


@dataclass(frozen=True)
class Entry:
    """One kernel: a macro of a source file, and its arguments."""

    file: str  # without its ending
    macro: str
    arguments: tuple[str | int, ...] = ()

    @property
    def name(self) -> str:
        """The compiled function's name."""
        return "_".join(map(str, (self.macro.lower(), *self.arguments)))

    @property
    def line(self) -> str:
        """The macro call that instantiates it, after the file's text."""
        return f"{self.macro}({', '.join(map(str, self.arguments))})"


@functools.cache
def plain_source(file: str) -> str:
    """A .cu file with its headers inlined, each once.

    One text: NVRTC needs no include folder, and a hash of it is a cache key.
    """
    return _inlined(f"{file}.cu", set())


def _inlined(name: str, done: set[str]) -> str:
    done.add(name)
    lines = []
    text = format_header() if name == NAME else (CSRC / name).read_text()
    for line in text.splitlines():
        found = _INCLUDE.fullmatch(line)
        if not found:
            lines.append(line.replace("#pragma once", ""))
        elif found[1] not in done:
            lines.append(_inlined(found[1], done))
    return "\n".join(lines)


def entry_source(entry: Entry) -> str:
    """The source of one kernel."""
    return f"{plain_source(entry.file)}\n{entry.line}\n"
