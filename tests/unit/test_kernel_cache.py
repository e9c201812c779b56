"""The compiled kernels' cache: any change of any source gives a new folder."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from numba.core.dispatcher import Dispatcher

from hotcold.numba_kernels import kernel_cache
from hotcold.numba_kernels.decode import ffn
from hotcold.numba_kernels.load import convert
from hotcold.numba_kernels.prompt import prompt_ffn
from hotcold.numba_kernels.serve import serve_ffn

PACKAGE = Path(kernel_cache.__file__).parent
SOURCES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
ONE_A_FOLDER = sorted({path.parent: path for path in SOURCES}.values())


def folder_of(package: Path) -> Path:
    """The cache folder for the sources in `package`."""
    spec = importlib.util.spec_from_file_location("copied", package / "kernel_cache.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = module.cache_folder()
    assert isinstance(folder, Path)
    return folder


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package's sources in another place."""
    return shutil.copytree(PACKAGE, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))


def test_same_sources_share_a_folder(copy: Path) -> None:
    assert folder_of(copy) == kernel_cache.cache_folder()


@pytest.mark.parametrize("source", ONE_A_FOLDER, ids=str)
def test_a_changed_source_has_its_own_folder(copy: Path, source: Path) -> None:
    text = (copy / source).read_text()
    (copy / source).write_text(text + "\n")
    assert folder_of(copy) != kernel_cache.cache_folder()
    (copy / source).write_text(text)
    assert folder_of(copy) == kernel_cache.cache_folder()


def test_moved_text_has_its_own_folder(copy: Path) -> None:
    first, second = (copy / source for source in ONE_A_FOLDER[:2])
    text = first.read_text()
    first.write_text("")
    second.write_text(text + second.read_text())
    assert folder_of(copy) != kernel_cache.cache_folder()


def test_every_folder_is_tried() -> None:
    folders = {path.parent.as_posix() for path in SOURCES}
    assert folders >= {".", "decode", "ir", "load", "prompt", "serve"}
    assert {path.parent for path in ONE_A_FOLDER} == {path.parent for path in SOURCES}


@pytest.mark.parametrize(
    "kernel",
    [
        ffn.up_down_kernel,
        convert.widen_kernel,
        prompt_ffn.list_fired,
        serve_ffn.ffn_request,
    ],
    ids=lambda kernel: kernel.__qualname__,
)
def test_kernels_of_all_folders_are_kept_there(kernel: Dispatcher) -> None:
    assert Path(kernel.stats.cache_path) == kernel_cache.cache_folder()


def test_files_of_the_cache_are_told_apart() -> None:
    """Numba names them by the stem of the source, the function and its line."""
    stems = Counter(path.stem for path in SOURCES if path.name != "__init__.py")
    assert max(stems.values()) == 1


# Waits for the other one, compiles for two formats and prints who found what on disk.
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


def test_a_kernel_is_compiled_by_one_process_of_many(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(PACKAGE.parent)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", COMPILING], env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    found = [json.loads(process.communicate()[0]) for process in processes]
    assert [sum(each) for each in zip(*found, strict=True)] == [4, 2]


def started(code: str, folder: Path) -> subprocess.Popen[str]:
    """Python with an empty cache in `folder`, which runs `code`."""
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(PACKAGE.parent)},
    )  # fmt: skip


def test_nobody_waits_for_other_types(tmp_path: Path) -> None:
    """One process stops while it compiles for float16; another compiles for bfloat16 meanwhile."""
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
        assert first.stdout is not None and first.stdout.readline() == "begun\n"
        with started("STOPS = False" + code.format("int16"), tmp_path) as other:
            try:
                assert other.communicate(timeout=100)[0] == "1\n"
            finally:
                other.kill()
        assert first.communicate("\n")[0] == "1\n"
    for dtype in ("uint16", "int16"):
        with started("STOPS = False" + code.format(dtype), tmp_path) as again:
            assert again.communicate()[0] == "0\n"


def test_a_function_that_cannot_be_compiled_locks_nobody_out(tmp_path: Path) -> None:
    code = """
from numba.core.errors import TypingError
from hotcold.numba_kernels.load import convert
try:
    convert.widen_kernel("no array", 1, 2, 3)
except TypingError:
    print("refused", flush=True)
    input()
"""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(PACKAGE.parent)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    ) as held:  # fmt: skip
        assert held.stdout is not None and held.stdout.readline() == "refused\n"
        done = subprocess.run(
            [sys.executable, "-c", COMPILING], env=environment, input="\n", capture_output=True,
            text=True, timeout=150, check=True,
        )  # fmt: skip
        assert json.loads(done.stdout.splitlines()[-1]) == [0, 2]
        held.communicate("\n")


def compiled(folder: Path, most_bytes: int = -1) -> subprocess.CompletedProcess[str]:
    """COMPILING, with the cache in `folder`, where no file grows beyond `most_bytes`."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({most_bytes}, -1))"
    return subprocess.run(
        [sys.executable, "-c", limit + COMPILING],
        env=os.environ | {"XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(PACKAGE.parent)},
        input="\n", capture_output=True, text=True, check=True,
    )  # fmt: skip


def test_a_full_disk_costs_the_cache_alone(tmp_path: Path) -> None:
    done = compiled(tmp_path, 1000)
    assert json.loads(done.stdout.splitlines()[-1]) == [0, 2]
    assert done.stderr.count("\n") == 1
    assert f"{tmp_path}/hotcold/numba" in done.stderr and "File too large" in done.stderr
    assert not list(tmp_path.rglob("*.nbc")) and not list(tmp_path.rglob("*.tmp.*"))


def test_what_a_loss_of_power_has_damaged_is_compiled_again(tmp_path: Path) -> None:
    for pattern, content in (("*.nbi", b""), ("*.nbc", b"\x80\x05damaged"), ("*.nbi", b"none")):
        compiled(tmp_path)
        for file in tmp_path.rglob(pattern):
            file.write_bytes(content)
        done = compiled(tmp_path)
        assert json.loads(done.stdout.splitlines()[-1]) == [0, 2] and done.stderr == ""
        assert json.loads(compiled(tmp_path).stdout.splitlines()[-1]) == [2, 0]
