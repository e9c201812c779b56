"""The chat page: a Gradio app over a running system, which needs nothing from other hosts."""

from pathlib import Path
from typing import Any

import gradio as gr
from starlette.routing import Mount

from model.config.build import read_config
from ui.api.backend import Backend
from ui.page.chat_settings import settings_form
from ui.page.chat_tab import MOST_VISITORS, ChatTab
from ui.page.live import live_panel
from ui.page.placement_tab import placement_tab
from ui.page.routes import PageRoutes

_FOLDER = Path(__file__).parent


def build_page(backend: Backend) -> gr.Blocks:
    """The page for what `backend` asks; `mount_page` puts it into a server.

    Errors:  ServiceError where the system has ended
    """
    settings, described = backend.settings, backend.described
    path = Path(described.model_path)
    config = read_config(path)
    tokenizer = backend.prompts.tokenizer
    is_chat = tokenizer is not None and tokenizer.has_chat_template
    chat = ChatTab(backend, is_chat)
    longest = min(described.context_length - 1, settings.max_tokens)
    with gr.Blocks(title=f"{settings.model_name} – hotcold", analytics_enabled=False) as page:
        gr.Markdown(f"# {settings.model_name}\nmode {described.mode}", elem_id="title")
        with gr.Tab("Chat"), gr.Row():
            with gr.Column(scale=2, min_width=190, elem_id="list-column"):
                chat.list_column()
            with gr.Column(scale=5, min_width=320):
                chat.chat_column(lambda: settings_form(path, longest, is_chat))
            with gr.Column(scale=4, min_width=320):
                live_panel(backend)
        with gr.Tab("Placement") as tab:
            placement_tab(backend, described.model_path, config, tab)
        chat.connect(page)
    page.state_session_capacity = MOST_VISITORS
    return page


def mount_page(app: Any, page: gr.Blocks, path: str = "/") -> Any:
    """Add the page to a FastAPI app, with its look, and with those of its routes that it needs."""
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    app = gr.mount_gradio_app(
        app,
        page,
        path,
        theme=gr.themes.Default(primary_hue="blue", **fonts),
        css=(_FOLDER / "page.css").read_text(),
        favicon_path=str(_FOLDER / "favicon.svg") if path == "/" else None,
        footer_links=[],
        ssr_mode=False,
        pwa=False,
        enable_monitoring=False,
        mcp_server=False,
        run_history=False,
    )
    mounted = [route for route in app.routes if isinstance(route, Mount)][-1]
    mounted.app = PageRoutes(mounted.app)
    return app
