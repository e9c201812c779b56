"""The chat page: conversations, the live neuron map, the placement picture."""

from pathlib import Path

ASSETS = Path(__file__).parent / "assets"


def asset(name: str) -> str:
    """The text of a template, script or style in assets/."""
    return (ASSETS / name).read_text()
