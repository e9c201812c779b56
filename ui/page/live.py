"""The panel beside the chat: the script that asks for telemetry and draws it."""

from pathlib import Path
from typing import Any

import gradio as gr

from model.errors import HotcoldError
from ui.api.backend import Backend
from ui.telemetry import telemetry_json

_FOLDER = Path(__file__).parent


def live_panel(backend: Backend) -> gr.HTML:
    """The panel. It asks only while the page can be seen and something runs."""

    def telemetry(_: Any = None) -> dict[str, Any]:
        try:
            return telemetry_json(backend.call("telemetry"))
        except HotcoldError as error:
            return {"error": str(error)}

    return gr.HTML(
        "",
        html_template=(_FOLDER / "live.html").read_text(),
        css_template=(_FOLDER / "live.css").read_text(),
        js_on_load=(_FOLDER / "live.js").read_text(),
        server_functions=[telemetry],
        elem_id="live",
    )
