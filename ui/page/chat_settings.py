"""What a visitor may set: the system prompt and how tokens are drawn."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from hotcold.model.parameters import Number, Whole
from hotcold.model.sampling import PARAMETERS, SamplingParams

# Fields by name; those below a heading are folded.
_FIRST = ("temperature", "max_tokens", "top_k", "top_p", "min_p", "seed")
_FOLDED = {
    "Repetition": (
        "repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty",
        "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    ),
    "Other ways to choose": (
        "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold",
        "mirostat", "mirostat_tau", "mirostat_eta", "min_tokens", "stop",
        "thinking_token_budget",
    ),
}  # fmt: skip
_NAMES = (*_FIRST, *(name for names in _FOLDED.values() for name in names))
_WORDS = {
    "stop": "End before one of these texts, one a line.",
    "min_tokens": "Shortest answer: no end before so many tokens.",
    "max_tokens": "Longest answer; empty: to the end of the context.",
}
_STEPS = {"temperature": 0.1, "top_p": 0.01, "min_p": 0.01, "typical_p": 0.01}


@dataclass(frozen=True)
class ChatSettings:
    """The form: a system prompt, then fields by _NAMES, at what `defaults` says."""

    inputs: list[gr.components.Component]
    defaults: SamplingParams

    def read(self, values: tuple[Any, ...]) -> tuple[str, SamplingParams]:
        """The system prompt and the sampling, of the values of `inputs`; empty: the default.

        Errors:  UsageError for a value out of range
        """
        given = dict(zip(_NAMES, values[1:], strict=True))
        given["stop"] = tuple(filter(None, str(given["stop"] or "").split("\n"))) or None
        seed = str(given["seed"] or "").strip()
        given["seed"] = int(seed) if seed.isascii() and seed.isdigit() else seed or None
        changed = {
            name: value for name, value in given.items() if value != getattr(self.defaults, name)
        }
        return str(values[0] or "").strip(), SamplingParams.of_given(changed, self.defaults)


def settings_form(path: Path, longest: int, is_chat: bool) -> ChatSettings:
    """Settings at what the model's own files recommend; answers have at most `longest` tokens."""
    defaults, longest = SamplingParams.defaults(path), max(1, longest)
    system_prompt = gr.Textbox(
        label="System prompt",
        placeholder="What the model is told before the conversation",
        lines=2,
        visible=is_chat,
        elem_id="system-prompt",
    )
    with gr.Row():
        fields = [_field(name, defaults, longest) for name in _FIRST]
    for heading, names in _FOLDED.items():
        with gr.Accordion(heading, open=False), gr.Row():
            fields += [_field(name, defaults, longest) for name in names]
    return ChatSettings([system_prompt, *fields], defaults)


def _field(name: str, defaults: SamplingParams, longest: int) -> gr.components.Component:
    """The component of a parameter, within its bounds."""
    kind, word = PARAMETERS[name].kind, name.replace("_", "-")
    options: dict[str, Any] = {
        "label": word.replace("-", " ").capitalize() if len(word) > 5 else word.capitalize(),
        "info": _WORDS.get(name) or PARAMETERS[name].about.removeprefix("DRY: ").capitalize(),
        "min_width": 130,
        "elem_id": "stop-texts" if name == "stop" else word,  # `stop` is a button
    }
    if name == "stop":
        return gr.Textbox("\n".join(defaults.stop), lines=2, **options)
    if name == "seed":
        return gr.Textbox(placeholder="random", **options)
    assert isinstance(kind, (Whole, Number))
    is_whole = isinstance(kind, Whole)
    highest = longest if name == "max_tokens" else None if is_whole else kind.high
    return gr.Number(
        longest if name == "max_tokens" else getattr(defaults, name),
        minimum=kind.low, maximum=highest, precision=0 if is_whole else None,
        step=1 if is_whole else _STEPS.get(name, 0.05), **options,
    )  # fmt: skip
