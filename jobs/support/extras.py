"""Packages that only some commands need, by the extra that installs them.

A message names this program's own Python: another `pip` may be the first on PATH, which would look
for hotcold anew.
"""

import importlib.util
import shlex
import sys

from hotcold.model.errors import UsageError

EXTRAS = {
    "ui": ("fastapi", "uvicorn", "prometheus_client"),
    "plan": ("scipy",),
    "plot": ("matplotlib",),
}


def require_extra(name: str, what: str) -> None:
    """Raise UsageError where a package of an extra is missing; `what` needs it."""
    missing = [package for package in EXTRAS[name] if importlib.util.find_spec(package) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UsageError(
            f"{what} needs {', '.join(missing)}, which {verb} not installed; "
            f"{shlex.quote(sys.executable)} -m pip install 'hotcold[{name}]'"
        )
