"""The placement tab: which device holds what, as a picture and a table."""

from __future__ import annotations

from html import escape

import gradio as gr

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import HotcoldError
from hotcold.ui.api.backend import Backend
from hotcold.ui.page.placement_picture import DeviceShare, Placement, placement_of, plans_beside

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM, _TOP = 640, 420, 92, 610, 354, 14
# Distinct to the colour-blind, on white and on black: GPUs are warm, CPUs cool.
_GPU_COLOURS = ("#d55e00", "#e69f00", "#cc79a7")
_CPU_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#7f7fd5")
_RUNNING = "what runs now"


def placement_tab(backend: Backend, model_path: str, config: ModelConfig, tab: gr.Tab) -> None:
    """A picture, drawn when `tab` is opened, of the running system or of plans beside the model."""
    choices = [
        (_RUNNING, ""),
        *((file.stem, str(file)) for file in plans_beside(model_path)),
    ]
    allowed = {file for _, file in choices}
    chosen = gr.Dropdown(
        choices, value="", label="Placement", visible=len(choices) > 1, elem_id="plan"
    )
    picture = gr.HTML(elem_id="placement", apply_default_css=False)

    def draw(file: str) -> str:
        try:
            owners, plan_file = backend.call("neuron_owners"), file if file in allowed else ""
            return placement_html(placement_of(backend.described, config, owners, plan_file))
        except HotcoldError as error:
            return f"<p>{escape(str(error))}</p>"

    options = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    gr.on([tab.select, chosen.change], draw, chosen, picture, **options)


def placement_html(placement: Placement) -> str:
    """The placement as a sentence, an SVG and a table."""
    colours = _colours(placement.devices)
    has_curve = placement.num_profiled_tokens > 0
    picture = _svg(placement.devices, colours) if has_curve else ""
    table = _table(placement.devices, colours)
    return f"<p>{_sentence(placement)}</p>{picture}{table}"


def _sentence(placement: Placement) -> str:
    plan = placement.plan
    if plan is None:
        text = (
            "No plan was made for this system, so neurons are assigned to the devices in turn; "
            "<code>hotcold plan</code> makes one."
        )
    else:
        speed = plan.report.get("tokens_per_s")
        expected = f", which expects {speed:.0f} tokens/s" if isinstance(speed, float) else ""
        text = f"A plan for mode {escape(plan.request.mode)}{expected}."
    if placement.num_profiled_tokens:
        tokens = f"{placement.num_profiled_tokens:,}"
        return f"{text} Activations were counted over {tokens} tokens."
    remedy = "<code>hotcold profile</code> makes one"
    return f"{text} There is no activation profile beside the model; {remedy}."


def _colours(devices: list[DeviceShare]) -> list[str]:
    kinds = {True: iter(_CPU_COLOURS * len(devices)), False: iter(_GPU_COLOURS * len(devices))}
    return [next(kinds[device.name.startswith("cpu")]) for device in devices]


def _x(share: float) -> float:
    return round(_LEFT + share * (_RIGHT - _LEFT), 1)


def _y(share: float) -> float:
    return round(_BOTTOM - share * (_BOTTOM - _TOP), 1)


def _svg(devices: list[DeviceShare], colours: list[str]) -> str:
    parts = [
        f'<line x1="{_LEFT}" y1="{_y(share)}" x2="{_RIGHT}" y2="{_y(share)}" class="grid"/>'
        f'<text x="{_LEFT - 8}" y="{_y(share) + 7}" text-anchor="end">{share:.0%}</text>'
        f'<text x="{_x(share)}" y="{_BOTTOM + 26}" text-anchor="middle">{share:.0%}</text>'
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    for device, colour in zip(devices, colours, strict=True):
        if device.num_neurons:
            line = " ".join(f"{_x(across)},{_y(up)}" for across, up in device.curve)
            first, last = device.curve[[0, -1], 0]
            parts.append(
                f'<polygon points="{line} {_x(last)},{_BOTTOM} {_x(first)},{_BOTTOM}"'
                f' fill="{colour}" opacity="0.25"/>'
                f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="3"/>'
            )
    label = "Share of activations against share of neurons, device by device"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}'
        f'<text x="{_x(0.5)}" y="{_HEIGHT - 6}" text-anchor="middle">share of neurons, each '
        "device's most frequent first</text>"
        f'<text transform="translate(20 {_y(0.5)}) rotate(-90)" text-anchor="middle">'
        "share of activations</text></svg>"
    )


def _table(devices: list[DeviceShare], colours: list[str]) -> str:
    rows = []
    for device, colour in zip(devices, colours, strict=True):
        fired = "–" if device.activations is None else f"{device.activations:.1%}"
        rows.append(
            f'<tr><td><i style="background:{colour}"></i>{escape(device.name)}</td>'
            f"<td>{device.num_neurons:,}</td><td>{device.neurons:.1%}</td><td>{fired}</td></tr>"
        )
    heads = ("device", "neurons", "of all neurons", "of all activations")
    head = "".join(f"<th>{text}</th>" for text in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
