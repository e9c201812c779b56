"""Packages that only some commands need, by the extra that installs them.

A message names this program's own Python: another `pip` may be the first on PATH, which would look
for hotcold anew.
"""

import importlib.util
import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires, version

from hotcold.model.errors import UsageError

EXTRAS = {
    "ui": ("fastapi", "uvicorn", "prometheus_client"),
    "fleet": ("watchfiles", "simpy"),
    "plan": ("scipy",),
    "plot": ("matplotlib",),
}


def require_extra(name: str, what: str) -> None:
    """Raise UsageError where a package of an extra is missing; `what` needs it."""
    missing = [package for package in EXTRAS[name] if importlib.util.find_spec(package) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UsageError(
            f"{what} needs {', '.join(missing)}, which {verb} not installed; {_install(name)}"
        )


def require_known_gradio() -> None:
    """Raise UsageError where another version of Gradio is installed than the chat page takes.

    Nothing where it is not installed, or hotcold itself is not. Gradio is not imported.
    """
    from packaging.requirements import Requirement

    try:
        found, lines = version("gradio"), requires("hotcold") or ()
    except PackageNotFoundError:
        return
    for asked in map(Requirement, lines):
        if asked.name == "gradio" and not asked.specifier.contains(found, prereleases=True):
            raise UsageError(
                f"the chat page needs gradio{asked.specifier}, and {found} is installed; "
                f"{_install('ui')}, or --no-page does without"
            )


def _install(name: str) -> str:
    python = shlex.quote(sys.executable)
    has_pip = importlib.util.find_spec("pip") is not None  # environments of uv's have none
    pip = f"{python} -m pip install" if has_pip else f"uv pip install --python {python}"
    return f"{pip} 'hotcold[{name}]'"
