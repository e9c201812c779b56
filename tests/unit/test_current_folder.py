"""What of the current folder this program, and what it starts, takes notice of: nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray.core.generated import common_pb2

from hotcold.actors.processes.cluster import OwnFolders
from hotcold.model import current_folder
from hotcold.model.current_folder import elsewhere, environment_of_python, module_folders

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = str(Path(os.__file__).parent)
# Numba reads its settings when it is imported, and again when it compiles.
USES_LIBRARIES = """
import hotcold.jobs.foreign_folder, os
folder = os.getcwd()
import importlib, numba, matplotlib
importlib.invalidate_caches()
assert numba.njit(lambda x: x + 1)(1) == 2
assert matplotlib.rcParams["lines.linewidth"] != 77
assert os.getcwd() == folder
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that one stands in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_libraries_read_no_settings_there(foreign: Path) -> None:
    (foreign / ".numba_config.yaml").write_text("{")  # a program that reads it fails
    (foreign / "matplotlibrc").write_text("lines.linewidth: 77")
    subprocess.run(
        [sys.executable, "-c", USES_LIBRARIES],
        env=os.environ | environment_of_python() | {"MPLBACKEND": "agg"},
        check=True,
        timeout=150,
    )


@pytest.mark.parametrize("entry", ["", ".", "below", "{here}", "{here}/", "{link}"])
def test_modules_are_not_looked_for_there(
    foreign: Path,
    monkeypatch: pytest.MonkeyPatch,
    entry: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    link = tmp_path_factory.mktemp("elsewhere") / "link"
    link.symlink_to(foreign)
    given = ["/one", entry.format(here=foreign, link=link), LIBRARY, "/installed"]
    monkeypatch.setattr(sys, "path", given)
    assert module_folders() == ["/one", LIBRARY, "/installed"]
    # What is installed there is found, such as another program's checkout.
    monkeypatch.setattr(sys, "path", ["/one", LIBRARY, str(foreign)])
    assert module_folders() == ["/one", LIBRARY, str(foreign)]


@pytest.mark.parametrize("entry", ["", str(ROOT)])
def test_this_program_is_found_by_who_stands_in_its_checkout(
    monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [entry, LIBRARY])
    assert module_folders() == [str(ROOT), LIBRARY]


def test_a_folder_that_has_been_removed(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign.rmdir()
    monkeypatch.setattr(sys, "path", ["", "/one", LIBRARY])
    assert module_folders() == ["/one", LIBRARY]
    with elsewhere():
        assert os.getcwd() == "/"
    with pytest.raises(FileNotFoundError):
        os.getcwd()


def test_a_folder_that_may_not_be_looked_into(
    foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(current_folder.os, "open", refuse)
    with elsewhere():
        assert os.getcwd() == str(foreign)


def test_workers_of_a_cluster_do_not_look_there(foreign: Path) -> None:
    job = OwnFolders(_py_driver_sys_path=[str(foreign), str(ROOT), sys.prefix])
    sent = common_pb2.JobConfig.FromString(job._serialize())
    assert list(sent.py_driver_sys_path) == [str(ROOT)]
