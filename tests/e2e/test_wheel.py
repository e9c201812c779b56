"""A wheel, installed outside the checkout in an environment of its own, holds what it needs."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import CHECKOUT, environment, ray_folder

_NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "tests", "results")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment with the wheel, and with this one's packages."""
    folder = tmp_path_factory.mktemp("wheel")
    source, venv = folder / "source", folder / "venv"
    shutil.copytree(CHECKOUT, source, ignore=_NOT_COPIED)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    own = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run([*pip, *build], check=True, env=own)
    shutil.rmtree(source)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin/python"
    install = ["--python", str(python), "install", "--no-deps", str(wheel)]
    subprocess.run([*pip, *install], check=True, env=own)
    # Not read are .pth files in these folders, such as an editable install's of the checkout.
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return venv / "bin"


def _run(installed: Path, folder: Path, line: list[str]) -> subprocess.CompletedProcess[str]:
    own = {name: text for name, text in environment(folder).items() if name != "PYTHONPATH"}
    command = [str(installed / "hotcold"), *line]
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=120)


def test_it_answers_with_the_embedded_model(installed: Path) -> None:
    question = "What does textwrap.dedent do?"
    line = ["generate", "--chat", "--temperature", "0", "--prompt", question]
    with ray_folder() as folder:
        outcome = _run(installed, folder, line)
    assert outcome.returncode == 0, outcome.stderr
    expected = "Remove any common leading whitespace from every line in `text`.\n"
    assert outcome.stdout == expected


def test_everything_that_is_read_is_in_it(installed: Path) -> None:
    """Every file of the library that is no Python, and that the checkout's own packages have."""
    (packages,) = installed.parent.glob("lib/python*/site-packages")
    tracked = subprocess.run(
        ["git", "-C", str(CHECKOUT), "ls-files", "-z"], capture_output=True, check=True, text=True
    ).stdout.split("\0")
    rooms = {path.parent.name for path in CHECKOUT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    wanted = {name for name in tracked if name.split("/")[0] in rooms}
    assert len(wanted) > 300
    assert {name for name in wanted if not (packages / name).exists()} == set()
