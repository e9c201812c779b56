"""What browsers are given of the page beside Gradio's own: templates, scripts, styles."""

from pathlib import Path

_FOLDER = Path(__file__).parent / "assets"
_STYLES = ("colours", "frame", "chat", "side", "panel", "narrow")  # the later ones win


def asset(name: str) -> str:
    """The text of a file in assets/."""
    return (_FOLDER / name).read_text()


def favicon() -> Path:
    """Where the page's sign lies."""
    return _FOLDER / "favicon.svg"


def head() -> str:
    """What stands in the page's <head>: its styles, before any of Gradio's arrives."""
    return "".join(f"<style>{asset(f'styles/{name}.css')}</style>" for name in _STYLES)
