"""The panel beside the chat: the script that asks for telemetry and draws it."""

from typing import Any

import gradio as gr

from hotcold.model.errors import HotcoldError
from hotcold.ui.api.backend import Backend
from hotcold.ui.page.files import asset
from hotcold.ui.telemetry import telemetry_json


def live_panel(backend: Backend) -> gr.HTML:
    """The panel. It asks only while the page can be seen and something runs."""

    def telemetry(_: Any = None) -> dict[str, Any]:
        try:
            return telemetry_json(backend.call("telemetry"))
        except HotcoldError as error:
            return {"error": str(error)}

    return gr.HTML(
        "",
        html_template=asset("live.html"),
        js_on_load=asset("live.js"),
        server_functions=[telemetry],
        elem_id="live",
        apply_default_css=False,
    )
