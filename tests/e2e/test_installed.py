"""The ways to install it: a wheel outside of the checkout, an editable install, the checkout."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import jedi
import pytest

from tests.e2e.commands import CHECKOUT, environment, ray_folder

PACKAGES = {path.name for path in (CHECKOUT / "hotcold").iterdir() if path.is_symlink()}
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
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=600)


def test_it_answers_with_the_embedded_model(installed: Path) -> None:
    question = "What does textwrap.dedent do?"
    line = ["generate", "--chat", "--temperature", "0", "--prompt", question]
    with ray_folder() as folder:
        outcome = _run(installed, folder, line)
    assert outcome.returncode == 0, outcome.stderr
    expected = "Remove any common leading whitespace from every line in `text`.\n"
    assert outcome.stdout == expected


def test_everything_that_is_read_is_in_it(installed: Path) -> None:
    """Every file of the library, Python or not, below the one import name."""
    (packages,) = installed.parent.glob("lib/python*/site-packages")
    tracked = subprocess.run(
        ["git", "-C", str(CHECKOUT), "ls-files", "-z"], capture_output=True, check=True, text=True
    ).stdout.split("\0")
    wanted = {name for name in tracked if name.split("/")[0] in PACKAGES}
    assert len(wanted) > 300
    assert {name for name in wanted if not (packages / "hotcold" / name).exists()} == set()
    assert (packages / "hotcold" / "py.typed").exists()
    (record,) = packages.glob("hotcold-*.dist-info/RECORD")
    top = {line.split("/")[0] for line in record.read_text().splitlines()}
    assert {name for name in top if name.isidentifier()} == {"hotcold"}


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with an editable install of the checkout."""
    folder = tmp_path_factory.mktemp("editable")
    python = folder / "venv/bin/python"
    create = [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")]
    subprocess.run(create, check=True)
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    install = ["install", "--no-deps", "--no-build-isolation", "--editable", str(CHECKOUT)]
    own = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--python", str(python), *install], check=True, env=own)
    return python


SAYS_WHERE = """
import hotcold, sys
from hotcold.actors.cpu import cpu_service
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.numba_kernels.kernel_cache import is_ours
assert is_ours(sys.modules["hotcold.numba_kernels.decode.ffn"].__file__)
assert (DEMO_DIRECTORY / "config.json").exists()
print(hotcold.__file__, cpu_service.__file__)
"""
# Modules of the user's beside the script, of names that the packages have within hotcold.
OWN_MODULES = ["actors.py", "model.py", "jobs.py", "placement.py", "ui/__init__.py"]


@pytest.mark.parametrize("where", ["an editable install", "a bare checkout"])
def test_it_is_imported_beside_a_users_own_modules(
    where: str, editable: Path, tmp_path: Path
) -> None:
    (tmp_path / "ui").mkdir()
    for name in OWN_MODULES:
        (tmp_path / name).write_text("raise SystemExit('this module is the user's')")
    (tmp_path / "script.py").write_text(SAYS_WHERE)
    own = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    python = editable if where == "an editable install" else Path(sys.executable)
    if where == "a bare checkout":
        own["PYTHONPATH"] = str(CHECKOUT)
    said = subprocess.run(
        [python, "script.py"], cwd=tmp_path, env=own, capture_output=True, text=True, timeout=600
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.split() == [
        str(CHECKOUT / "hotcold" / name) for name in ("__init__.py", "actors/cpu/cpu_service.py")
    ]


def test_editors_find_definitions() -> None:
    """By Jedi, which many editors ask; it reads sources alone."""
    code = "from hotcold.actors.driver.engine import Engine\nEngine"
    project = jedi.Project(CHECKOUT, added_sys_path=[str(CHECKOUT)])
    (found,) = jedi.Script(code, path=CHECKOUT / "script.py", project=project).goto(
        2, 1, follow_imports=True
    )
    assert found.full_name == "hotcold.actors.driver.engine.Engine"
    assert found.module_path.samefile(CHECKOUT / "actors/driver/engine.py")
