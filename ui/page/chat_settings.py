"""What a visitor may set: the system prompt and how tokens are drawn."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from hotcold.model.parameters import Number, Whole
from hotcold.model.sampling import PARAMETERS, SamplingParams

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
            temperature = _number("temperature", defaults, "0: always the likeliest", 0.1)
            max_tokens = gr.Number(
                longest, label="Max tokens", info="longest answer", minimum=1, maximum=longest,
                step=1, precision=0, min_width=130, elem_id="max-tokens",
            )  # fmt: skip
        with gr.Row():
            top_k = _number("top_k", defaults, "0: all", 1)
            top_p = _number("top_p", defaults, "of the probability", 0.01)
        with gr.Row():
            min_p = _number("min_p", defaults, "of the likeliest", 0.01)
            seed = gr.Textbox(
                label="Seed", info="the same, the same text", placeholder="random",
                min_width=130, elem_id="seed",
            )  # fmt: skip
    return ChatSettings([system_prompt, temperature, top_k, top_p, min_p, seed, max_tokens])


def _number(name: str, defaults: SamplingParams, info: str, step: float) -> gr.Number:
    """The component of a parameter, within its bounds."""
    kind, word = PARAMETERS[name].kind, name.replace("_", "-")
    assert isinstance(kind, (Whole, Number))
    is_whole = isinstance(kind, Whole)
    return gr.Number(
        getattr(defaults, name), label=word.capitalize(), info=info, minimum=kind.low,
        maximum=None if is_whole else kind.high, step=step, precision=0 if is_whole else None,
        min_width=130, elem_id=word,
    )  # fmt: skip


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
