"""The summary of a profile: silent neurons, and the share that makes most activations.

Of experts: how many of them tokens choose most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
import numpy as np

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.sparsity import ACTIVATION_SHARE, hot_share
from hotcold.placement.expert_reuse import missed_share
from hotcold.placement.profile import ActivationProfile, rates_of

if TYPE_CHECKING:
    from rich.table import Table

_MAX_ROWS = 16
_SHARES = 0.25, 0.5, 0.75  # of all experts, in memory


@dataclass(frozen=True)
class LayerSummary:
    """One layer, or some. The first two are None without an FFN, the last two without experts."""

    sparsity: float | None  # share of (token, neuron) pairs of chosen experts that are silent
    hot_share: float | None  # the least share of neurons that makes ACTIVATION_SHARE
    num_silent: int  # neurons that never fired
    hot_experts: float | None = None  # the least share that is ACTIVATION_SHARE of what was chosen
    num_unchosen: int | None = None  # experts that were never chosen

    @classmethod
    def of(cls, fired: np.ndarray, num_computed: float, chosen: np.ndarray) -> LayerSummary:
        """Summarise the counts of some neurons, and of a router's experts.

        num_computed: pairs of a token and one of these neurons in a block that it has chosen
        Shapes:  fired (N,), chosen (E,), of a layer without a router (0,)
        """
        has_neurons, has_experts = fired.size > 0, chosen.size > 0
        return cls(
            sparsity=float(1 - fired.sum() / max(num_computed, 1)) if has_neurons else None,
            hot_share=hot_share(fired) if has_neurons else None,
            num_silent=int((fired == 0).sum()),
            hot_experts=hot_share(chosen) if has_experts else None,
            num_unchosen=int((chosen == 0).sum()) if has_experts else None,
        )


def summaries(
    config: ModelConfig, profile: ActivationProfile
) -> tuple[list[LayerSummary], LayerSummary]:
    """Each layer, and the whole model."""
    fired = profile.layers(config)
    computed = rates_of(config, profile).chosen.sum(axis=1) * profile.num_tokens
    chosen = [_of_router(config, profile, layer) for layer in range(config.num_layers)]
    layers = [LayerSummary.of(*of_layer) for of_layer in zip(fired, computed, chosen, strict=True)]
    whole = LayerSummary.of(np.concatenate(fired), computed.sum(), np.concatenate(chosen))
    return layers, whole


def _of_router(config: ModelConfig, profile: ActivationProfile, layer: int) -> np.ndarray:
    """How often each of a layer's experts was chosen, without a shared one: (E,), or (0,)."""
    router = config.layers[layer].ffn.router
    if router is None or profile.chosen is None:
        return np.zeros(0, np.int64)
    return profile.chosen[layer, : router.num_experts]


def expected_misses(profile: ActivationProfile) -> dict[str, float]:
    """Of a token's experts, what is not in memory with shares of all there; {} if not known."""
    distances = profile.known_distances
    if distances is None:
        return {}
    return {f"{share:.0%}": missed_share(distances, share * distances.size) for share in _SHARES}


def print_misses(misses: dict[str, float]) -> None:
    """Print `expected_misses` of a mixture in a line."""
    if not misses:
        click.echo(
            "how soon experts are chosen again is not known: the answers were too few tokens; "
            "give a longer text or --window",
            err=True,
        )
        return
    found = ", ".join(f"{missed:.1%} with {share} there" for share, missed in misses.items())
    click.echo(f"of the experts that a token chooses are missing in memory: {found}")


def print_summary(layers: list[LayerSummary], whole: LayerSummary) -> None:
    """Print a table; of many layers, a row for each few neighbours."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 1))  # 80 columns hold it
    table.add_column("layer", style="cyan", justify="right", no_wrap=True)
    titles = ["silent", f"{ACTIVATION_SHARE:.0%} made by", "never fired"]
    if whole.hot_experts is not None:
        titles += [f"{ACTIVATION_SHARE:.0%} chosen of", "never chosen"]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    size = -(-len(layers) // _MAX_ROWS)
    for first in range(0, len(layers), size):
        group = layers[first : first + size]
        last = first + len(group) - 1
        _add_row(table, f"{first}" if first == last else f"{first}-{last}", LayerSummary(
            sparsity=_mean([layer.sparsity for layer in group]),
            hot_share=_mean([layer.hot_share for layer in group]),
            num_silent=sum(layer.num_silent for layer in group),
            hot_experts=_mean([layer.hot_experts for layer in group]),
            num_unchosen=sum(layer.num_unchosen or 0 for layer in group),
        ))  # fmt: skip
    table.add_section()
    _add_row(table, "all", whole)
    Console(highlight=False).print(table)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _add_row(table: Table, name: str, layer: LayerSummary) -> None:
    if layer.sparsity is None:
        table.add_row(name, "no FFN")
        return
    cells = [f"{layer.sparsity:.1%}", f"{layer.hot_share:.1%} of neurons", f"{layer.num_silent}"]
    if layer.hot_experts is not None:
        cells += [f"{layer.hot_experts:.1%} of experts", f"{layer.num_unchosen}"]
    table.add_row(name, *cells)
