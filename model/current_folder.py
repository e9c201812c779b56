"""The current folder is foreign: no module in it is run, no settings in it are obeyed.

Users stand in folders of models that others made. Python looks for modules in the current folder
where a program is run by `python -m`, and where PYTHONPATH has an empty entry (which
`PYTHONPATH=$PYTHONPATH:/mine` leaves). Some libraries look for settings there.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

import hotcold

_OWN = os.path.realpath(os.path.dirname(os.path.dirname(hotcold.__file__)))
_STANDARD_LIBRARY = os.path.dirname(os.__file__)
# Modules that read settings in the current folder when they are imported: `.numba_config.yaml` and
# `matplotlibrc`, which may both name modules to import.
_READ_SETTINGS = {"numba.core.config", "matplotlib"}


def ignore_modules_there() -> None:
    """Let this process look for modules anywhere but there; what it has imported before stays."""
    sys.path[:] = module_folders()


def ignore_settings_there() -> None:
    """Let what is imported from now on read no settings in the current folder; may be repeated."""
    if not any(isinstance(finder, _Elsewhere) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Elsewhere())


def module_folders() -> list[str]:
    """`sys.path` without the current folder and the script's, unless this program lies there.

    Behind the standard library are folders of what is installed, wherever one stands.
    """
    here = _current_folder()
    foreign = {here, _script_folder()} - {_OWN}
    folders = [folder for folder in (one or here for one in sys.path) if os.path.isabs(folder)]
    is_first = [folder == _STANDARD_LIBRARY for folder in folders]
    num_before = is_first.index(True) if any(is_first) else len(folders)
    before = [one for one in folders[:num_before] if os.path.realpath(one) not in foreign]
    return before + folders[num_before:]


def own_folders(folders: Sequence[str]) -> list[str]:
    """Those of them in which this program lies."""
    return [folder for folder in folders if os.path.realpath(folder) == _OWN]


def environment_of_python() -> dict[str, str]:
    """Variables with which a Python finds modules where this process does, and nowhere else."""
    return {"PYTHONPATH": os.pathsep.join(module_folders()), "PYTHONSAFEPATH": "1"}


def _current_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it has been removed
        return ""


def _script_folder() -> str:
    """The folder of the script that Python was started with, where Python looks first; or ""."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.dirname(os.path.realpath(script)) if script else ""


@contextmanager
def elsewhere() -> Iterator[None]:
    """Let this process, with all its threads, stand in the root folder meanwhile."""
    try:
        here = os.open(os.curdir, os.O_PATH | os.O_DIRECTORY)
    except OSError:  # it may not be looked into, so nothing in it is found either
        yield
        return
    try:
        os.chdir(os.sep)
        yield
    finally:
        os.fchdir(here)
        os.close(here)


class _Elsewhere(MetaPathFinder):
    """Finds modules that read settings in the current folder, and has them run elsewhere."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _READ_SETTINGS else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_elsewhere(module: ModuleType) -> None:
            with elsewhere():
                run(module)
            if hasattr(module, "_config_fname"):  # Numba reads it again when it compiles
                setattr(module, "_config_fname", os.devnull)  # noqa: B010

        setattr(spec.loader, "exec_module", run_elsewhere)  # noqa: B010
        return spec
