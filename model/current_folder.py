"""The current folder is not trusted: no module in it is imported, no settings in it are read.

Users run commands in folders of models that others made. Python searches the current folder for
modules in programs run by `python -m`, and where PYTHONPATH has an empty entry (which
`PYTHONPATH=$PYTHONPATH:/mine` leaves). Some libraries search it for settings.
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
# On import these read settings in the current folder, `.numba_config.yaml` or `matplotlibrc`, which
# may name modules to import.
_READ_SETTINGS = {"numba.core.config", "matplotlib"}


def ignore_local_modules() -> None:
    """Remove the current folder from `sys.path`; modules imported before stay."""
    sys.path[:] = module_folders()


def ignore_local_settings() -> None:
    """Let modules imported from now on read no settings there; may be repeated."""
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
    """Return the folders among `folders` in which this program lies."""
    return [folder for folder in folders if os.path.realpath(folder) == _OWN]


def environment_of_python() -> dict[str, str]:
    """Variables that give a Python process this process's folders of modules, and no others."""
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
    """Change this process's current folder, that of all its threads, to / meanwhile."""
    try:
        here = os.open(os.curdir, os.O_PATH | os.O_DIRECTORY)
    except OSError:  # unreadable: nothing is found in it either
        yield
        return
    try:
        os.chdir(os.sep)
        yield
    finally:
        os.fchdir(here)
        os.close(here)


class _Elsewhere(MetaPathFinder):
    """Finds modules that read settings in the current folder, and runs them in another."""

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
            if hasattr(module, "_config_fname"):  # Numba reads it again when compiling
                setattr(module, "_config_fname", os.devnull)  # noqa: B010

        setattr(spec.loader, "exec_module", run_elsewhere)  # noqa: B010
        return spec
