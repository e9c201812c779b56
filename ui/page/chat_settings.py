"""What a visitor may set: the system prompt and how tokens are drawn."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from hotcold.model.sampling import SamplingParams

_HEADING = (
    "<h2>Settings</h2>"
    '<button type="button" class="close" aria-label="Close the settings" title="Close"></button>'
)


@dataclass(frozen=True)
class ChatSettings:
    """The components; `inputs` in the order in which `read_settings` takes their values."""

    inputs: list[gr.components.Component]


def settings_form(path: Path, longest: int, is_chat: bool) -> ChatSettings:
    """Settings at what the model's own files recommend; answers have at most `longest` tokens."""
    defaults = SamplingParams.defaults(path)
    longest = max(1, longest)
    with gr.Column(elem_id="settings"):
        gr.HTML(_HEADING, elem_id="settings-heading", apply_default_css=False)
        system_prompt = gr.Textbox(
            label="System prompt",
            placeholder="What the model is told before the conversation",
            lines=2,
            visible=is_chat,
            elem_id="system-prompt",
        )
        with gr.Row():
            temperature = gr.Number(
                defaults.temperature, label="Temperature", info="0: always the likeliest",
                minimum=0, maximum=100, step=0.1, min_width=130, elem_id="temperature",
            )  # fmt: skip
            max_tokens = gr.Number(
                longest, label="Max tokens", info="longest answer", minimum=1, maximum=longest,
                step=1, precision=0, min_width=130, elem_id="max-tokens",
            )  # fmt: skip
        with gr.Row():
            top_k = gr.Number(
                defaults.top_k, label="Top-k", info="0: all", minimum=0, step=1, precision=0,
                min_width=130, elem_id="top-k",
            )  # fmt: skip
            top_p = gr.Number(
                defaults.top_p, label="Top-p", info="of the probability", minimum=0, maximum=1,
                step=0.01, min_width=130, elem_id="top-p",
            )  # fmt: skip
        with gr.Row():
            min_p = gr.Number(
                defaults.min_p, label="Min-p", info="of the likeliest", minimum=0, maximum=1,
                step=0.01, min_width=130, elem_id="min-p",
            )  # fmt: skip
            seed = gr.Textbox(
                label="Seed", info="the same, the same text", placeholder="random",
                min_width=130, elem_id="seed",
            )  # fmt: skip
    return ChatSettings([system_prompt, temperature, top_k, top_p, min_p, seed, max_tokens])


def read_settings(values: tuple[Any, ...]) -> tuple[str, SamplingParams]:
    """The system prompt and the sampling. Errors: UsageError for a value out of range."""
    system_prompt, temperature, top_k, top_p, min_p, seed, max_tokens = values
    text = str(seed or "").strip()
    number = int(text) if text.isascii() and text.isdigit() else text or None
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=number,  # type: ignore[arg-type]  # SamplingParams says what is wrong with a word
    )
    return str(system_prompt or "").strip(), sampling
