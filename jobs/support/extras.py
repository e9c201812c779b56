"""Packages that only some commands need, by the extra that installs them."""

import importlib.util

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
            f"pip install 'hotcold[{name}]'"
        )
