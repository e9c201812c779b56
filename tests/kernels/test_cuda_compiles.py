"""Every CUDA source compiles for the oldest and the newest GPU, without a warning.

The sources look at no generation, and the oldest has the least memory for a block of threads. Each
template is compiled in few specialisations, which between them have every format, both ways to read
and every tile of tokens. HOTCOLD_ALL_KERNELS=1 compiles all of them for every generation, which
takes minutes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import site
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hotcold.cuda_kernels.source import CSRC, OPTIONS, Entry, plain_source
from tests.kernels.emulation.build import all_entries

TARGETS = (75, 80, 86, 89, 90, 120)
_CUPY_OPTIONS = ["--device-as-default-execution-space"]  # which it always gives
IS_ALL = os.environ.get("HOTCOLD_ALL_KERNELS") == "1"
FILES = sorted(path.stem for path in CSRC.glob("*.cu"))


def chosen(file: str) -> list[Entry]:
    """All, or few that have between them every argument of a template in every place."""
    own = [entry for entry in all_entries() if entry.file == file]
    if IS_ALL:
        return own
    found, seen = [], set[tuple[int, Any]]()
    for entry in own:
        arguments = set(enumerate(entry.arguments))
        if not arguments or not arguments <= seen:
            found.append(entry)
            seen |= arguments
    return found


def source_of(file: str) -> str:
    return "\n".join([plain_source(file), *(entry.line for entry in chosen(file)), ""])


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize("file", FILES)
def test_nvcc(file: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on this machine")
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True)
    known = [target for target in TARGETS if f"sm_{target}" in listed.stdout.split()]
    assert known, f"{nvcc} knows none of {TARGETS}"
    source = tmp_path / f"{file}.cu"
    source.write_text(source_of(file))
    command = [nvcc, *OPTIONS, "-Werror", "all-warnings", "-fatbin", str(source), "-o"]
    command.append(str(tmp_path / "kernels.fatbin"))
    # The sources look at no target, so one PTX, of the oldest, stands for those of all.
    codes = ",".join(
        f"sm_{target}" for target in (known if IS_ALL else sorted({known[0], known[-1]}))
    )
    command.append(f"-gencode=arch=compute_{known[0]},code=[{codes}]")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if len(known) < len(TARGETS):
        unknown = sorted(set(TARGETS) - set(known))
        pytest.skip(f"compiled for {known}; this nvcc does not know {unknown}")


def find_nvrtc() -> Path | None:
    """The library that the wheels of the cuda extra bring."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    found = [path for folder in folders for path in Path(folder).glob("nvidia/*/lib/libnvrtc.so.*")]
    return next(iter(sorted(found)), None)


class Nvrtc:
    """One library of it."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def targets(self) -> set[int]:
        """The compute capabilities that it knows, as 75 for 7.5."""
        count = ctypes.c_int()
        self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._library.nvrtcGetSupportedArchs(numbers)
        return set(numbers)

    def compile(self, source: str, options: list[str]) -> tuple[bool, str]:
        """Whether it compiles, and what the compiler says: errors and warnings."""
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        library = self._library
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
        )
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), words)
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        library.nvrtcDestroyProgram(ctypes.byref(program))
        return status == 0, log.value.decode(errors="replace").strip()


def test_nvrtc() -> None:
    """What CuPy compiles with; where nvcc is missing it stands in for it."""
    path = find_nvrtc()
    if path is None:
        pytest.skip("no NVRTC: pip install 'hotcold[cuda]'")
    compiler = Nvrtc(path)
    known = [target for target in TARGETS if target in compiler.targets()]
    assert known
    for file in FILES:
        for target in known if shutil.which("nvcc") is None else known[-1:]:
            options = [*OPTIONS, *_CUPY_OPTIONS, f"-arch=sm_{target}"]
            is_done, log = compiler.compile(source_of(file), options)
            assert is_done and not log, log
