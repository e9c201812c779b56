"""The compiled kernels' cache: a changed source gives new folders to what imports it."""

from __future__ import annotations

import ast
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hotcold.numba_kernels import kernel_cache

PACKAGE = Path(kernel_cache.__file__).resolve().parent
SOURCES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
ROOT = PACKAGE.parent


def in_another_process(code: str, parent: Path, cache: Path) -> str:
    """What `code` prints, with the package hotcold of the folder `parent`."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(parent)},
        cwd=parent, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder that holds this package's sources as hotcold.numba_kernels."""
    target = tmp_path / "copy" / "hotcold"
    shutil.copytree(PACKAGE, target / "numba_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    (target / "__init__.py").write_text("")
    return target.parent


# The names of all sources' folders, and of those after a change of each source.
FOLDERS = """
import json
from pathlib import Path
from hotcold.numba_kernels import kernel_cache
package = Path("hotcold/numba_kernels").resolve()
sources = sorted(package.rglob("*.py"))
names = {one: str(one.relative_to(package)) for one in sources}

def folders():
    kernel_cache._read.cache_clear()  # as another process
    kernel_cache._folder_name.cache_clear()
    return {names[one]: kernel_cache.kernel_folder(one).name for one in sources}

found = {"": folders()}
for source in (one for one in sources if one.name != "__init__.py"):
    text = source.read_text()
    source.write_text(text + "\\n")
    found[names[source]] = folders()
    source.write_text(text)
print(json.dumps(found))
"""


@functools.cache
def imports() -> dict[str, set[str]]:
    """The sources that each imports itself, as Python's parser reads them."""
    imports: dict[str, set[str]] = {}
    for path in SOURCES:
        imports[str(path)] = found = set()
        for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (node.module, *(f"{node.module}.{each.name}" for each in node.names)):
                    found.add(name.removeprefix("hotcold.numba_kernels.").replace(".", "/") + ".py")
    return imports


def importers_of(source: str) -> set[str]:
    """This source and all that import it, directly or not."""
    reached, new = set(), {source}
    while new:
        reached |= new
        new = {path for path, names in imports().items() if names & new} - reached
    return reached


def test_a_changed_source_changes_the_folders_of_what_imports_it(copy: Path) -> None:
    found = json.loads(in_another_process(FOLDERS, copy, copy))
    before = {str(path): kernel_cache.kernel_folder(PACKAGE / path).name for path in SOURCES}
    assert found.pop("") == before
    for source, after in found.items():
        changed = {name for name in after if before[name] != after[name]}
        assert changed == importers_of(source), source


def test_a_changed_source_compiles_what_imports_it_alone(copy: Path, tmp_path: Path) -> None:
    """`convert` does not import `finite`; nothing is compiled anew but a kernel of the latter."""
    code = """
import numpy as np
from hotcold.numba_kernels.decode import finite
from hotcold.numba_kernels.load import convert
convert.widen_kernel(np.zeros((2, 2), np.uint16), np.zeros((2, 2), np.float32), 0, 2)
assert finite.finite_row(np.zeros(2, np.float32))
for kernel in (convert.widen_kernel, finite.finite_row):
    print(sum(kernel.stats.cache_misses.values()), end=" ")
"""
    cache = tmp_path / "cache"
    assert in_another_process(code, copy, cache) == "1 1 "
    changed = copy / "hotcold/numba_kernels/decode/finite.py"
    changed.write_text(changed.read_text() + "\n")
    assert in_another_process(code, copy, cache) == "0 1 "


def test_what_nobody_used_for_a_month_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    used = kernel_cache.own_kernel_folder(PACKAGE / "formats.py")
    now, day = time.time(), 24 * 3600
    ages = {"formats-0123": 40, "gone-4567": 31, "rows-89ab": 29}
    for name, days in ages.items():
        (used.parent / name).mkdir()
        (used.parent / name / "kernel.nbc").write_bytes(b"code")
        os.utime(used.parent / name, (now - days * day,) * 2)
    kernel_cache.own_kernel_folder(PACKAGE / "formats.py")
    assert len(list(used.parent.iterdir())) == 4  # it has been looked for today
    os.utime(used, (now - 2 * day,) * 2)
    kernel_cache.own_kernel_folder(PACKAGE / "formats.py")
    assert {folder.name for folder in used.parent.iterdir()} == {used.name, "rows-89ab"}
    assert now - used.stat().st_mtime < day


# Waits for a line, compiles for two formats and prints who found what on disk.
COMPILING = """
import json, sys
import numpy as np
from hotcold.numba_kernels.load import convert
print("ready", flush=True)
sys.stdin.readline()
for dtype in (np.uint16, np.int16):
    convert.widen_kernel(np.zeros((2, 2), dtype), np.zeros((2, 2), np.float32), 0, 2)
stats = convert.widen_kernel.stats
print(json.dumps([sum(stats.cache_hits.values()), sum(stats.cache_misses.values())]))
"""


def started(code: str, folder: Path) -> subprocess.Popen[str]:
    """Python with its cache in `folder`, which runs `code`."""
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
        env=os.environ | {"XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def compiled(process: subprocess.Popen[str]) -> list[int]:
    """What COMPILING has found on disk and what not."""
    found: list[int] = json.loads(process.communicate("\n", timeout=150)[0].splitlines()[-1])
    return found


def test_a_kernel_is_compiled_by_one_process_of_many(tmp_path: Path) -> None:
    """Also beside one that failed to compile it for other types, which locks nobody out."""
    refused = """
from numba.core.errors import TypingError
from hotcold.numba_kernels.load import convert
try:
    convert.widen_kernel("no array", 1, 2, 3)
except TypingError:
    print("refused", flush=True)
    input()
"""
    with started(refused, tmp_path) as held:
        assert line_of(held) == "refused\n"
        processes = [started(COMPILING, tmp_path) for _ in range(2)]
        for process in processes:
            assert line_of(process) == "ready\n"
            assert process.stdin is not None
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        found = [compiled(process) for process in processes]
        assert [sum(each) for each in zip(*found, strict=True)] == [2, 2]
        held.communicate("\n")


def test_nobody_waits_for_other_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process stops while it compiles for float16; another compiles for bfloat16 meanwhile."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = """
import sys
import numpy as np
from numba.core import event
from hotcold.numba_kernels.load import convert
class Stop(event.Listener):
    def on_start(self, _):
        event.unregister("numba:compile", self)
        print("begun", flush=True)
        sys.stdin.readline()
    def on_end(self, _):
        pass
if STOPS:
    event.register("numba:compile", Stop())
convert.widen_kernel(np.zeros((2, 2), np.{}), np.zeros((2, 2), np.float32), 0, 2)
print(sum(convert.widen_kernel.stats.cache_misses.values()), flush=True)
"""
    with started("STOPS = True" + code.format("uint16"), tmp_path) as first:
        assert line_of(first) == "begun\n"
        assert kernel_cache.kernels_since(0) == (0, 1)
        with started("STOPS = False" + code.format("int16"), tmp_path) as other:
            try:
                assert other.communicate(timeout=100)[0] == "1\n"
            finally:
                other.kill()
        done, asked = kernel_cache.kernels_since(0)
        assert 1 <= done == asked - 1
        assert first.communicate("\n")[0] == "1\n"
    done, asked = kernel_cache.kernels_since(0)
    assert 2 <= done == asked and kernel_cache.kernels_since(time.time() + 1) == (0, 0)


def test_a_full_disk_costs_the_cache_alone(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1))"
    with started(limit + COMPILING, tmp_path) as process:
        out, problems = process.communicate("\n")
    assert json.loads(out.splitlines()[-1]) == [0, 2] and problems.count("\n") == 1
    assert f"{tmp_path}/hotcold/numba" in problems and "File too large" in problems
    assert not list(tmp_path.rglob("*.nbc")) and not list(tmp_path.rglob("*.part"))


def test_what_is_damaged_is_compiled_again(tmp_path: Path) -> None:
    """As a loss of power or a bad disk leave it; what unpickles does not notice a bit."""
    for_three = COMPILING.replace("np.int16)", "np.int16, np.float32)")
    assert compiled(started(for_three, tmp_path)) == [0, 3]

    def one_bit_off(content: bytes) -> bytes:
        middle = len(content) // 2
        return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]

    damages: list[Callable[[bytes], bytes]] = [one_bit_off, lambda old: b"", lambda old: old[:-100]]
    for file, damaged in zip(tmp_path.rglob("*.nbc"), damages, strict=True):
        file.write_bytes(damaged(file.read_bytes()))
    process = started(for_three, tmp_path)
    out, problems = process.communicate("\n")
    assert json.loads(out.splitlines()[-1]) == [0, 3] and problems == ""
    assert compiled(started(for_three, tmp_path)) == [3, 0]
