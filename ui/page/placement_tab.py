"""The placement tab: which device holds which share of the neurons, and of their activations."""

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

_HEAD = "<th>device<th>neurons<th>of all neurons<th>of all activations"


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
            return placement_of(backend.described, config, owners, plan_file)
        except HotcoldError as error:
            return f"<p>{escape(str(error))}</p>"

    options = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    gr.on([tab.select, chosen.change], tell, chosen, shares, **options)


def placement_of(
    system: SystemConfig,
    config: ModelConfig,
    owners: tuple[list[str], np.ndarray],
    plan_file: str = "",
) -> str:
    """The placement by `plan_file`, or of `system` as it runs: a sentence and a table.

    `owners`: those of the running system, from its `neuron_owners`.
    Errors:  ArtifactError where a file is not of this model
    """
    path = Path(system.model_path)
    chosen = plan_file or system.plan_path
    plan = load_plan(Path(chosen), ModelIdentity.of(path), config) if chosen else None
    names, owner = owners
    if plan is not None and plan_file:
        names, owner = list(plan.device_names), plan.neuron_device
    profile = own_profile(path, config)
    if profile is None or not profile.counts.any():
        told = "There is no activation profile beside the model; "
        told += "<code>hotcold profile</code> makes one."
        counts = None
    else:
        told = f"Activations were counted over {profile.num_tokens:,} tokens."
        counts = profile.counts
    return f"<p>{sentence(plan)} {told}</p>{shares_table(names, owner, counts)}"


def shares_table(names: list[str], owner: np.ndarray, counts: np.ndarray | None) -> str:
    """Each device's share of all neurons, and of all activations if these were counted.

    Shapes:  owner (L, N) indices into names, -1 where there is no neuron; counts (L, N) or None
    """
    is_neuron = owner >= 0
    rows = ""
    for index, name in enumerate(names):
        own = owner == index
        fired = "" if counts is None else _share(counts[own].sum() / counts[is_neuron].sum())
        neurons = _share(own.sum() / is_neuron.sum())
        rows += f"<tr><td>{escape(name)}<td>{own.sum():,}{neurons}{fired or '<td>–'}"
    return f"<table><thead><tr>{_HEAD}<tbody>{rows}</table>"


def sentence(plan: PlacementPlan | None) -> str:
    """Where a placement comes from."""
    if plan is None:
        return (
            "No plan was made for this system, so neurons are assigned to the devices in turn; "
            "<code>hotcold plan</code> makes one."
        )
    speed = plan.report.get("tokens_per_s")
    expected = f", which expects {speed:.0f} tokens/s" if isinstance(speed, float) else ""
    return f"A plan for mode {escape(plan.request.mode)}{expected}."


def _share(share: float) -> str:
    """A share with its bar."""
    return f'<td style="--share:{share:.1%}">{share:.1%}'
