"""A figure of a profile: how few neurons make most of the activations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from model.errors import UsageError
from model.hot_share import ACTIVATION_SHARE, hot_share
from placement.profile import ActivationProfile

_MOST_POINTS = 1000
_MOST_IN_LEGEND = 8


def cumulative_share(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Share of neurons, hottest first, and the share of activations that they make, from 0 to 1.

    Shapes:  counts (N,) of which some are above 0; both results (P,), P <= 1001
    """
    cumulative = np.concatenate([[0], np.sort(counts)[::-1].cumsum()])
    points = np.unique(np.linspace(0, counts.size, min(counts.size, _MOST_POINTS) + 1).astype(int))
    return points / counts.size, cumulative[points] / cumulative[-1]


def plot_profile(path: Path, profile: ActivationProfile, model_name: str) -> None:
    """Draw the share of activations against the share of neurons, as PowerInfer's figure 5.

    A thin line a layer, coloured by depth, and a thick one over all neurons of the model.
    Errors:  UsageError where the file cannot be written
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.6), layout="constrained")
    _draw_layers(figure, axes, profile.counts)
    if profile.counts.any():
        x, y = cumulative_share(profile.counts.reshape(-1))
        axes.plot(x, y, color="black", linewidth=2.4, label="whole model")
        _mark(axes, hot_share(profile.counts.reshape(-1)))
        axes.legend(loc="lower right", frameon=False)
    axes.set(xlim=(0, 1), ylim=(0, 1.01))
    axes.set_xlabel("share of neurons, hottest first")
    axes.set_ylabel("share of activations")
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{model_name}: activations over {profile.num_tokens:,} tokens", loc="left")
    try:
        figure.savefig(path, dpi=160)
    except OSError as problem:
        raise UsageError(f"{path}: cannot be written ({problem.strerror})") from None
    finally:
        pyplot.close(figure)


def _draw_layers(figure: Any, axes: Any, counts: np.ndarray) -> None:
    from matplotlib import cm, colormaps, colors

    # Without the map's light end, which is hard to see on white.
    shades = colors.ListedColormap(colormaps["viridis"](np.linspace(0, 0.88, 256)))
    scale = colors.Normalize(0, max(counts.shape[0] - 1, 1))
    has_legend = counts.shape[0] <= _MOST_IN_LEGEND
    for layer, fired in enumerate(counts):
        if fired.any():
            x, y = cumulative_share(fired)
            name = f"layer {layer}" if has_legend else None
            axes.plot(x, y, color=shades(scale(layer)), linewidth=0.9, label=name)
    if not has_legend:
        figure.colorbar(cm.ScalarMappable(scale, shades), ax=axes, label="layer", pad=0.02)


def _mark(axes: Any, share: float) -> None:
    """Show where the model reaches ACTIVATION_SHARE."""
    line = {"color": "black", "linewidth": 0.9, "linestyle": (0, (4, 3))}
    axes.plot([0, share, share], [ACTIVATION_SHARE, ACTIVATION_SHARE, 0], **line)
    axes.plot([share], [ACTIVATION_SHARE], "o", color="black", markersize=5)
    on_left = share > 0.45  # the legend is on the right
    axes.annotate(
        f"{share:.1%} of neurons:\n{ACTIVATION_SHARE:.0%} of activations",
        (share, 0),  # far below every curve: they all bend upwards
        xytext=(-7 if on_left else 7, 7),
        textcoords="offset points",
        ha="right" if on_left else "left",
        va="bottom",
    )
