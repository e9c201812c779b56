"""The CUDA sources as a shared library for the CPU, and every specialisation that launches use."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hotcold.cuda_kernels.source import Entry, plain_source
from hotcold.numba_kernels.formats import FORMATS, is_quantized, summed_dtype

FOLDER = Path(__file__).parent
_PREDICTING = ("PACK_PLANES", "SCORE_NEURONS", "COUNT_MASKS", "LIST_NEURONS")
_LOWRANK = ("LOWRANK_HIDDEN", "LOWRANK_MASKS")
_FORMATS = {kind.short.upper(): dtype for dtype, kind in FORMATS.items()}
_FLAGS = [
    "-std=c++17",
    "-O1",
    "-march=native",
    "-ffp-contract=off",
    "-U_FORTIFY_SOURCE",  # its longjmp wants one stack
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-shared",
    "-fPIC",
]


def all_entries() -> list[Entry]:
    """Every kernel in every specialisation."""
    return [
        *_products(),
        *_downs(),
        *_attentions(),
        *(Entry("widen", "WIDEN", (f, v)) for f in _FORMATS for v in ("true", "false")),
        *(Entry("rope", "ROPE_STORE", (f,)) for f in ("F32", "F16")),
        Entry("quantize", "QUANTIZE_VECTORS"),
        Entry("norm", "NORM_TOKENS"),
        Entry("softcap", "SOFTCAP"),
        Entry("attention", "MERGE_SPLITS"),
        *(Entry("attention", "WEIGH_POSITIONS", (f,)) for f in ("F32", "F16")),
        Entry("sum_parts", "SUM_PARTS"),
        Entry("router", "CHOOSE_EXPERTS"),
        *(Entry("predict", each) for each in _PREDICTING),
        *(Entry("predict", macro, (kind,)) for macro in _LOWRANK for kind in ("INT8", "HALF")),
        *(Entry("share", each) for each in ("GIVE_INPUT", "AWAIT_OUTPUTS", "ADD_OUTPUTS")),
    ]


def _products() -> Iterator[Entry]:
    for file, macro in (("gemv", "GEMV"), ("gates", "GATES")):
        for weight_format in _FORMATS:
            for is_vector, tiles in (("true", (1, 2, 4, 8)), ("false", (1, 8))):
                for tokens in tiles:
                    yield Entry(file, macro, (weight_format, is_vector, tokens))


def _downs() -> Iterator[Entry]:
    for weight_format, dtype in _FORMATS.items():
        if summed_dtype(dtype) != dtype:
            continue
        whole = (1, 2, 4) if is_quantized(dtype) else (1, 2, 4, 8)
        for is_vector, tiles in (("true", whole), ("false", (1, 4))):
            for tokens in tiles:
                yield Entry("down", "DOWN_PARTS", (weight_format, is_vector, tokens))


def _attentions() -> Iterator[Entry]:
    for cache_format in ("F32", "F16"):
        for is_vector in ("true", "false"):
            for lanes in (8, 16, 32):
                for queries in (1, 4, 8):
                    arguments = (cache_format, is_vector, lanes, queries)
                    yield Entry("attention", "ATTEND_SPLITS", arguments)


def build_library(folder: Path, entries: Sequence[Entry], flags: Sequence[str] = ()) -> Path:
    """Compile `entries` for this CPU, into `folder`.

    Errors:  FileNotFoundError without a C++ compiler, RuntimeError for what it says
    """
    return build_text(folder, _text(entries), flags)


def build_key(entries: Sequence[Entry]) -> str:
    """What the library depends on, as a file's name: sources, flags, compiler and CPU.

    Errors:  FileNotFoundError without a C++ compiler
    """
    version = subprocess.run([_compiler(), "-v"], capture_output=True, text=True, check=True)
    headers = [path.read_text() for path in sorted(FOLDER.glob("*.h"))]
    parts = [_text(entries), *headers, *_FLAGS, version.stderr, _cpu()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """What -march=native goes by."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    known = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(known)}))


def _compiler() -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        raise FileNotFoundError("no g++ on this machine")
    return compiler


def build_text(folder: Path, text: str, flags: Sequence[str] = ()) -> Path:
    """The same of a text that includes emulation.h and has a `run_kernel`."""
    compiler = _compiler()
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(text)
    command = [compiler, *_FLAGS, *flags, f"-I{FOLDER}", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"g++ cannot compile the kernels:\n{done.stderr[:4000]}")
    return library


def _text(entries: Sequence[Entry]) -> str:
    """One file of everything. Headers come again and again, in namespaces of their own."""
    parts = ['#include "emulation.h"']
    for file in sorted({entry.file for entry in entries}):
        own = [entry for entry in entries if entry.file == file]
        source = plain_source(file).replace('#include "emulation.h"', "")
        lines = "\n".join(entry.line for entry in own)
        parts.append(f"namespace {file}_file {{\n{source}\n{lines}\n}}")
    parts.append(
        kernel_table({entry.name: f"{entry.file}_file::{entry.name}" for entry in entries})
    )
    return "\n".join(parts)


def kernel_table(functions: Mapping[str, str]) -> str:
    """The function `run_kernel`, which knows kernels by their names."""
    head = 'extern "C" const char* run_kernel(const char* name, const emulation::Launch* launch)'
    lines = [
        f'if (!strcmp(name, "{name}")) return emulation::run_kernel<{function}>(*launch);'
        for name, function in functions.items()
    ]
    return "\n".join([head, "{", *lines, 'return "no such kernel";', "}", ""])
