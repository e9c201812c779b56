"""The placement tab: which device holds what, as a picture and a table."""

import gradio as gr

from actors.messages import SystemConfig
from model.config import ModelConfig


def placement_tab(system: SystemConfig, config: ModelConfig) -> None:
    """The picture, drawn when the tab is opened first."""
    gr.Markdown("soon")
