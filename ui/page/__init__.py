"""The chat page: conversations, the live neuron map, the placement picture."""

from pathlib import Path
from urllib.parse import quote

ASSETS = Path(__file__).parent / "assets"
_STYLES = ("colours", "chat", "panel", "frame")  # the later ones win


def asset(name: str) -> str:
    """The text of a template or style in assets/."""
    return (ASSETS / name).read_text()


def styles() -> str:
    """The page's styles for its <head>, before any of Gradio's arrives.

    An element of the class `glyph-NAME` shows the picture of that name, which `--NAME` is, too.
    """
    icons = "".join(
        f':root{{--{file.stem}:url("data:image/svg+xml,{quote(file.read_text())}")}}'
        f".glyph-{file.stem}{{--icon:var(--{file.stem})}}"
        for file in sorted(ASSETS.glob("icons/*.svg"))
    )
    sheets = [icons, *(asset(f"styles/{name}.css") for name in _STYLES)]
    return "".join(f"<style>{sheet}</style>" for sheet in sheets)
