"""The summary of a profile: silent neurons, and the share that makes most activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hotcold.model.sparsity import ACTIVATION_SHARE, hot_share
from hotcold.placement.profile import ActivationProfile

if TYPE_CHECKING:
    from rich.table import Table

_MAX_ROWS = 16


@dataclass(frozen=True)
class LayerSummary:
    """One layer, or all."""

    sparsity: float  # share of (token, neuron) pairs that are silent
    hot_share: float  # the least share of neurons that makes ACTIVATION_SHARE of the activations
    num_silent: int  # neurons that never fired

    @classmethod
    def of(cls, counts: np.ndarray, num_tokens: int) -> LayerSummary:
        """Summarise the counts of some neurons. Shapes: counts (N,)."""
        return cls(
            sparsity=float(1 - counts.mean() / num_tokens),
            hot_share=hot_share(counts),
            num_silent=int((counts == 0).sum()),
        )


def print_summary(profile: ActivationProfile, layers: list[LayerSummary]) -> None:
    """Print a table; of many layers, a row for each few neighbours."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2))
    table.add_column("layer", style="cyan", justify="right", no_wrap=True)
    for title in ("silent", f"{ACTIVATION_SHARE:.0%} made by", "never fired"):
        table.add_column(title, justify="right", no_wrap=True)
    size = -(-len(layers) // _MAX_ROWS)
    for first in range(0, len(layers), size):
        group = layers[first : first + size]
        last = first + len(group) - 1
        _add_row(table, f"{first}" if first == last else f"{first}-{last}", LayerSummary(
            sparsity=sum(layer.sparsity for layer in group) / len(group),
            hot_share=sum(layer.hot_share for layer in group) / len(group),
            num_silent=sum(layer.num_silent for layer in group),
        ))  # fmt: skip
    table.add_section()
    _add_row(table, "all", LayerSummary.of(profile.counts.reshape(-1), profile.num_tokens))
    Console(highlight=False).print(table)


def _add_row(table: Table, name: str, layer: LayerSummary) -> None:
    table.add_row(
        name, f"{layer.sparsity:.1%}", f"{layer.hot_share:.1%} of neurons", f"{layer.num_silent}"
    )
