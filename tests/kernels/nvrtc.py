"""NVRTC by ctypes: it compiles for any GPU, and needs none."""

from __future__ import annotations

import ctypes
import site
from pathlib import Path


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
