"""The chat page: a Gradio app over a running system, which needs nothing from other hosts."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.setup.preflight import read_model
from hotcold.model.byte_sizes import binary_text, size_text
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import HotcoldError
from hotcold.model.weights.sizes import attention_bytes, head_bytes
from hotcold.placement.solver.cost import RowBytes
from hotcold.ui.api.backend import Backend
from hotcold.ui.page import asset, styles
from hotcold.ui.page.chat import MAX_VISITORS, Chat
from hotcold.ui.page.chat_settings import settings_form
from hotcold.ui.page.placement_tab import placement_tab
from hotcold.ui.telemetry import telemetry_json


def build_page(backend: Backend, paths: Mapping[str, str] | None = None) -> gr.Blocks:
    """The page of one model; `mount_page` adds it to a server.

    `paths`: of the pages of all models, by name.
    Errors:  ServiceError where the system has ended
    """
    settings, described = backend.settings, backend.described
    path = Path(described.model_path)
    config = read_config(path)
    is_chat = backend.has_chat_template
    chat = Chat(backend, described.model_path, is_chat)
    longest = min(described.context_length - 1, settings.max_tokens)
    with gr.Blocks(title=f"{settings.model_name} – hotcold", analytics_enabled=False) as page:
        _bar(settings.model_name, described, paths or {})
        with gr.Row(elem_id="frame"):
            with gr.Column(scale=0, min_width=260, elem_id="side"):
                chat.list_column()
            with gr.Column(elem_id="main"):
                chat.chat_column()
            with gr.Column(scale=0, min_width=360, elem_id="panel"):
                with gr.Tab("Live"):
                    live_panel(backend, read_model(path, described.weight_dtype))
                with gr.Tab("Placement") as tab:
                    placement_tab(backend, described.model_path, config, tab)
                with gr.Tab("Settings", elem_id="settings"):
                    form = settings_form(path, longest, is_chat)
        chat.connect(page, form)
    page.state_session_capacity = MAX_VISITORS
    return page


def _bar(model_name: str, described: SystemConfig, paths: Mapping[str, str]) -> gr.HTML:
    """The bar: model, mode, device, buttons, and links to other models' pages."""
    cores = described.num_threads
    device = f"CPU, {cores} thread{'s' if cores > 1 else ''}"
    if described.device != "cpu":
        device = f"GPU and {device}"
    is_alone = len(paths) < 2
    facts = [model_name] * is_alone + [described.mode, device]
    models = (
        f'<option value="{escape(path)}" {"selected" * (name == model_name)}>'
        f"{escape(name)}</option>"
        for name, path in paths.items()
    )
    bar = asset("bar.html").format(
        facts=escape(" · ".join(facts)), models="".join(models), hidden="hidden" * is_alone
    )
    return gr.HTML(bar, elem_id="bar", apply_default_css=False)


def mount_page(app: Any, page: gr.Blocks, path: str = "/") -> Any:
    """Add the page to a FastAPI app, with its theme and all of Gradio's routes."""
    mono = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"]
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": mono}
    return gr.mount_gradio_app(
        app,
        page,
        path,
        theme=gr.themes.Base(primary_hue="orange", neutral_hue="gray", **fonts),
        head=styles(),
        footer_links=[],
        ssr_mode=False,
        pwa=False,
        enable_monitoring=False,
        mcp_server=False,
        run_history=False,
    )


def live_panel(backend: Backend, config: ModelConfig) -> gr.HTML:
    """The live panel; its script polls only while the page is visible and requests run.

    `config` is in the formats that weights are loaded in.
    """
    rows = RowBytes.of(config)
    weights = {"attention": attention_bytes(config), "head": head_bytes(config)}

    def telemetry(_: Any = None) -> dict[str, Any]:
        try:
            found = backend.call("telemetry")
        except HotcoldError as error:
            return {"error": str(error)}
        gates, computed = found.speed.gates_computed, found.speed.neurons_computed
        ffn = int(config.num_neurons * rows.read(gates, computed, computed))
        queried, cached = backend.metrics.prefix_cache
        more = {"bytes": {**weights, "ffn": ffn}, "prompt_tokens": queried, "cached_tokens": cached}
        return _with_sizes(telemetry_json(found) | more)

    return gr.HTML(
        "", html_template=asset("live.html"), js_on_load=asset("live.js"), elem_id="live",
        server_functions=[telemetry], apply_default_css=False,
    )  # fmt: skip


def _with_sizes(told: dict[str, Any]) -> dict[str, Any]:
    """What the panel is told, with its numbers of bytes as people read them."""
    used, whole = told["host_memory_used_bytes"], told["host_memory_bytes"]
    reads = told["reads"]
    return told | {
        "sizes": {part: size_text(num_bytes) for part, num_bytes in told["bytes"].items()},
        "reads": reads and {**reads, "size": size_text(reads["bytes_read"])},
        "actors": [
            {**actor, "memory": binary_text(actor["memory_bytes"])} for actor in told["actors"]
        ],
        "memory": f"{binary_text(used)} of {binary_text(whole)}",
    }
