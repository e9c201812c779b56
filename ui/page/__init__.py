"""The chat page: conversations, the live neuron map, the placement picture."""

from pathlib import Path
from urllib.parse import quote

ASSETS = Path(__file__).parent / "assets"
_STYLES = ("colours", "frame", "chat", "side", "panel", "narrow")  # the later ones win


def asset(name: str) -> str:
    """The text of a template or style in assets/."""
    return (ASSETS / name).read_text()


def script(name: str) -> str:
    """A script in assets/, after what all of them begin with."""
    return asset("dom.js") + asset(name)


def styles() -> str:
    """The page's styles for its <head>, before any of Gradio's arrives.

    An element of the class `glyph-NAME` shows the picture of that name.
    """
    icons = "".join(
        f'.glyph-{file.stem}{{--icon:url("data:image/svg+xml,{quote(file.read_text())}")}}'
        for file in sorted(ASSETS.glob("icons/*.svg"))
    )
    sheets = [icons, *(asset(f"styles/{name}.css") for name in _STYLES)]
    return "".join(f"<style>{sheet}</style>" for sheet in sheets)
