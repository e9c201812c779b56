"""The chat page: a Gradio app over a running system, which needs nothing from other hosts."""

from pathlib import Path
from typing import Any

import gradio as gr

from actors.driver.text.prompts import Prompts
from actors.protocol.messages import SystemConfig
from actors.system import System
from model.config.build import read_config
from ui.page.chat_settings import settings_form
from ui.page.chat_tab import ChatTab
from ui.page.live import live_panel
from ui.page.placement_tab import placement_tab

_FOLDER = Path(__file__).parent
# A model may write an image's address, and a browser would fetch it: nothing leaves this host.
_HEAD = (
    '<meta http-equiv="Content-Security-Policy" content="'
    "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; form-action 'self'\">"
)


def build_page(system: System, model_name: str) -> gr.Blocks:
    """The page for `system`; `mount_page` puts it into a server.

    Errors:  ServiceError where the system has ended
    """
    described: SystemConfig = system.call("describe")
    path = Path(described.model_path)
    config = read_config(path)
    tokenizer = Prompts(path, config, described.context_length).tokenizer
    is_chat = tokenizer is not None and tokenizer.has_chat_template
    chat = ChatTab(system, is_chat)
    with gr.Blocks(title=f"{model_name} – hotcold", analytics_enabled=False) as page:
        gr.Markdown(f"# {model_name}\nmode {described.mode}", elem_id="title")
        with gr.Tab("Chat"), gr.Row():
            with gr.Column(scale=2, min_width=190, elem_id="list-column"):
                chat.list_column()
            with gr.Column(scale=5, min_width=320):
                chat.chat_column(lambda: settings_form(path, described.context_length, is_chat))
            with gr.Column(scale=4, min_width=320):
                live_panel(system)
        with gr.Tab("Placement") as tab:
            placement_tab(described, config, tab)
        chat.connect(page)
    return page


def mount_page(app: Any, page: gr.Blocks, path: str = "/") -> Any:
    """Add the page to a FastAPI app, with its look and its rule that nothing leaves this host."""
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    return gr.mount_gradio_app(
        app,
        page,
        path,
        theme=gr.themes.Default(primary_hue="blue", **fonts),
        css=(_FOLDER / "page.css").read_text(),
        head=_HEAD,
        footer_links=[],
        ssr_mode=False,
        pwa=False,
        enable_monitoring=False,
        mcp_server=False,
    )
