"""The placement tab: which device holds which share of the neurons, and of their activations."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

import gradio as gr
import numpy as np

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.setup.placement_choice import own_profile
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import HotcoldError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.artifact_places import artifacts_like
from hotcold.placement.plan import PlacementPlan, load_plan
from hotcold.ui.api.backend import Backend


@dataclass(frozen=True)
class DeviceShare:
    """A device's share of all neurons, and of all activations if there is a profile."""

    name: str
    num_neurons: int
    neurons: float
    activations: float | None


@dataclass(frozen=True, eq=False)
class Placement:
    """What the tab shows: devices in the plan's order, GPUs first."""

    devices: list[DeviceShare]
    num_profiled_tokens: int  # 0: there is no profile
    plan: PlacementPlan | None


def placement_tab(backend: Backend, model_path: str, config: ModelConfig, tab: gr.Tab) -> None:
    """Shares, told when `tab` is opened, of the running system or of plans beside the model."""
    plans = artifacts_like(model_path, "plan-*.safetensors")
    choices = [("what runs now", ""), *((file.stem, str(file)) for file in plans)]
    allowed = {file for _, file in choices}
    chosen = gr.Dropdown(
        choices, value="", label="Placement", visible=len(choices) > 1, elem_id="plan"
    )
    shares = gr.HTML(elem_id="placement", apply_default_css=False)

    def tell(file: str) -> str:
        try:
            owners, plan_file = backend.call("neuron_owners"), file if file in allowed else ""
            return placement_html(placement_of(backend.described, config, owners, plan_file))
        except HotcoldError as error:
            return f"<p>{escape(str(error))}</p>"

    options = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    gr.on([tab.select, chosen.change], tell, chosen, shares, **options)


def placement_of(
    system: SystemConfig,
    config: ModelConfig,
    owners: tuple[list[str], np.ndarray],
    plan_file: str = "",
) -> Placement:
    """The placement by `plan_file`, or of `system` as it runs.

    `owners`: those of the running system, from its `neuron_owners`.
    Errors:  ArtifactError where a file is not of this model
    """
    path = Path(system.model_path)
    identity = ModelIdentity.of(path)
    chosen = plan_file or system.plan_path
    plan = load_plan(Path(chosen), identity, config) if chosen else None
    names, owner = owners
    if plan is not None and plan_file:
        names, owner = list(plan.device_names), plan.neuron_device
    profile = own_profile(path, config)
    counts = None if profile is None or not profile.counts.any() else profile.counts
    num_tokens = 0 if profile is None or counts is None else profile.num_tokens
    return Placement(device_shares(names, owner, counts), num_tokens, plan)


def device_shares(
    names: list[str], owner: np.ndarray, counts: np.ndarray | None
) -> list[DeviceShare]:
    """Shares of each device.

    Shapes:  owner (L, N) indices into names, -1 where there is no neuron; counts (L, N) or None
    """
    all_neurons = owner >= 0
    found = []
    for index, name in enumerate(names):
        own = owner == index
        fired = None if counts is None else float(counts[own].sum() / counts[all_neurons].sum())
        number = int(own.sum())
        found.append(DeviceShare(name, number, number / int(all_neurons.sum()), fired))
    return found


def placement_html(placement: Placement) -> str:
    """The placement as a sentence, and a table with a bar below each share."""
    heads = ("device", "neurons", "of all neurons", "of all activations")
    head = "".join(f"<th>{text}</th>" for text in heads)
    rows = "".join(
        f"<tr><td>{escape(one.name)}</td><td>{one.num_neurons:,}</td>"
        f"{_share(one.neurons)}{_share(one.activations)}</tr>"
        for one in placement.devices
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<p>{_sentence(placement)}</p>{table}"


def _share(share: float | None) -> str:
    return "<td>–</td>" if share is None else f'<td style="--share:{share:.1%}">{share:.1%}</td>'


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
