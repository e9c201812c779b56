"""Commands in a folder that is full of modules and settings: none of them is run or obeyed.

Each module there leaves its name in a file when it is run, whoever runs it.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from hotcold.model.files.locate import DEMO_DIRECTORY
from tests.e2e.commands import CHECKOUT, environment, processes_left, ray_folder

WAIT_S = 600.0
LONG = "return the wrapped text " * 50  # so many tokens go through matrix products, of torch
GREEDY = ["--temperature", "0", "--ignore-eos", "--max-tokens", "2"]
INSTALLED = {name for name in importlib.metadata.packages_distributions() if name.isidentifier()}
# Python itself imports some of its library, these two, and what *.pth files name, before
# any program's first line. So where a user has it look in the current folder, only others
# can be kept from being run.
PATH_FILES = Path(sysconfig.get_path("purelib")).glob("*.pth")
OF_PYTHON = {*sys.stdlib_module_names, "sitecustomize", "usercustomize"}.union(
    *(re.findall(r"\w+", path.read_text()) for path in PATH_FILES)
)
MAIN = "from hotcold.jobs.cli import run\nrun()\n"
WITHOUT_PRIVATE_RAY = f"""
import hotcold.jobs.foreign_folder, hotcold.actors.launch
def init_private(*_, **__):
    raise TypeError("as of a Ray that is not known")
hotcold.actors.launch.init_private = init_private
{MAIN}"""


@dataclass
class Foreign:
    """Such a folder, in which a model lies too; `program` is what a console script would be."""

    folder: Path
    marks: Path
    program: Path
    ray: Path

    def fill(self, names: Sequence[str]) -> None:
        """With a module and a package of each name, and plugins."""
        for name in names:
            left = f"print({name!r}, file=open({str(self.marks)!r}, 'a'))\n"
            (self.folder / name).mkdir(exist_ok=True)
            for path in (f"{name}.py", f"{name}/__init__.py"):
                (self.folder / path).write_text(left)
        plugin = self.folder / "foreign_plugin-1.dist-info"
        plugin.mkdir()
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign_plugin\nVersion: 1")
        loaded = [f"[{group}]\nforeign = foreign_plugin" for group in PLUGIN_GROUPS]
        (plugin / "entry_points.txt").write_text("\n".join(loaded))
        (self.folder / ".numba_config.yaml").write_text("{")  # whoever reads it fails
        (self.folder / "matplotlibrc").write_text("backend: module://foreign_plugin")

    def begin(
        self, line: Sequence[str], code: str = MAIN, path: str = str(CHECKOUT)
    ) -> subprocess.Popen[str]:
        self.program.write_text(code)
        changes = {"PYTHONPATH": path, "XDG_RUNTIME_DIR": str(self.program.parent)}
        return subprocess.Popen(
            [sys.executable, *line], cwd=self.folder, stdin=subprocess.PIPE, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment(self.ray) | changes,
        )  # fmt: skip

    def run(self, *arguments: str, code: str = MAIN, stdin: str = "") -> tuple[str, str]:
        """What a command prints that does well, and that it has run nothing."""
        return self.end(self.begin([str(self.program), *arguments], code), stdin)

    def end(self, process: subprocess.Popen[str], stdin: str = "") -> tuple[str, str]:
        out, err = process.communicate(stdin, timeout=WAIT_S)
        assert process.returncode == 0, err
        self.require_no_marks()
        return out, err

    def require_no_marks(self) -> None:
        assert not self.marks.exists(), self.marks.read_text()


# What Numba, torch, fsspec and Gradio look for among all that is installed.
PLUGIN_GROUPS = ["numba_extensions", "torch.backends", "fsspec.specs", "gradio.plugins"]


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Foreign]:
    folder = tmp_path / "foreign"
    shutil.copytree(DEMO_DIRECTORY, folder)
    for path in [*folder.glob("*.py"), *folder.glob("__pycache__")]:
        path.unlink() if path.is_file() else shutil.rmtree(path)
    (tmp_path / "bin").mkdir(0o700)
    with ray_folder() as ray:
        yield Foreign(folder, tmp_path / "marks", tmp_path / "bin" / "program.py", ray)
        assert processes_left(ray) == []


@pytest.fixture
def full(foreign: Foreign) -> Foreign:
    foreign.fill(sorted(INSTALLED | OF_PYTHON | {"foreign_plugin"}))
    return foreign


def test_the_folder_leaves_marks_where_python_looks_in_it(full: Foreign) -> None:
    process = full.begin(["-c", "import brotli, torch"])
    process.communicate(timeout=WAIT_S)
    assert {"brotli", "torch"} <= set(full.marks.read_text().split())


def test_commands_that_start_nothing(full: Foreign) -> None:
    full.run("doctor", "--no-measure")
    full.run("plan", ".", "--out", "here.plan")
    text = full.folder / "heldout.txt"
    text.write_text(LONG)
    profile = ["profile", ".", "--text", "heldout.txt", "--out", "here.profile", "--max-tokens"]
    full.run(*profile, "256", "--plot", "here.png")
    assert (full.folder / "here.png").exists()  # by Matplotlib


def test_a_kept_system_and_commands_that_use_it(full: Foreign) -> None:
    try:
        out, err = full.run("generate", ".", "--prompt", LONG, *GREEDY, "--keep", "10m")
        assert "stays for 600 s" in err
        again, err = full.run("generate", ".", "--prompt", LONG, *GREEDY)
        assert "that is kept" in err and again == out
        full.run("chat", ".", "--max-tokens", "2", stdin="Hi\n")
        assert "exact" in full.run("ps")[0]
    finally:
        full.run("stop")


@pytest.mark.thorough
def test_a_server_and_its_page(full: Foreign) -> None:
    process = full.begin([str(full.program), "serve", ".", "--port", "0", "--log", "none"])
    try:
        assert process.stdout is not None
        found = re.search(r" at (http://\S+) ", process.stdout.readline())
        assert found
        question = {
            "messages": [{"role": "user", "content": LONG}],
            "max_tokens": 2,
            "response_format": {"type": "json_object"},
        }
        for answer in (
            httpx.get(found[1], timeout=WAIT_S),
            httpx.post(f"{found[1]}/v1/chat/completions", json=question, timeout=WAIT_S),
        ):
            assert answer.status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        full.end(process)


@pytest.mark.thorough
def test_a_system_in_a_ray_that_starts_in_its_own_way(full: Foreign) -> None:
    """Its workers are Ray's own; they are not forked."""
    question = ["generate", ".", "--own", "--prompt", LONG, *GREEDY]
    _, err = full.run(*question, code=WITHOUT_PRIVATE_RAY)
    assert "Ray has started in its own way" in err


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize(
    ("line", "path"),
    [
        (["-m", "hotcold.jobs.cli"], str(CHECKOUT)),
        (["{program}"], f"{CHECKOUT}{os.pathsep}"),
    ],
    ids=["python -m", "an empty entry of PYTHONPATH"],
)
def test_where_python_looks_in_the_current_folder(
    foreign: Foreign, line: list[str], path: str
) -> None:
    own = {path.name for path in CHECKOUT.iterdir()}
    foreign.fill(sorted((INSTALLED | {"foreign_plugin"}) - OF_PYTHON - own))
    line = [word.format(program=foreign.program) for word in line]
    asked = ["generate", ".", "--own", "--prompt", LONG, *GREEDY]
    foreign.end(foreign.begin([*line, *asked], path=path))
