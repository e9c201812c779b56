"""Figures: how few neurons make most of the activations; what neurons on storage cost."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.jobs.support.offload_plan import OffloadPlan
from hotcold.model.errors import UsageError
from hotcold.model.files.atomic_write import write_atomic
from hotcold.model.sparsity import ACTIVATION_SHARE, hot_share
from hotcold.placement.profile import ActivationProfile

_MAX_POINTS = 1000
_MAX_IN_LEGEND = 8


def cumulative_share(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Share of neurons, hottest first, and the share of activations that they make, from 0 to 1.

    Shapes:  counts (N,) of which some are above 0; both results (P,), P <= 1001
    """
    cumulative = np.concatenate([[0], np.sort(counts)[::-1].cumsum()])
    points = np.unique(np.linspace(0, counts.size, min(counts.size, _MAX_POINTS) + 1).astype(int))
    return points / counts.size, cumulative[points] / cumulative[-1]


def plot_profile(
    path: Path, profile: ActivationProfile, layers: list[np.ndarray], model_name: str
) -> None:
    """Draw the share of activations against the share of neurons, as PowerInfer's figure 5.

    A thin line a layer, coloured by depth, and a thick one over all neurons of the model.
    `layers`: the counts of each layer's neurons
    Errors:  UsageError where the file cannot be written
    """
    figure, axes = new_figure(4.6)
    _draw_layers(figure, axes, layers)
    counts = np.concatenate(layers)
    if counts.any():
        x, y = cumulative_share(counts)
        axes.plot(x, y, color="black", linewidth=2.4, label="whole model")
        _mark(axes, hot_share(counts))
        axes.legend(loc="lower right", frameon=False)
    axes.set(xlim=(0, 1), ylim=(0, 1.01))
    axes.set_xlabel("share of neurons, hottest first")
    axes.set_ylabel("share of activations")
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_title(f"{model_name}: activations over {profile.num_tokens:,} tokens", loc="left")
    save_figure(path, figure)


def plot_offload(path: Path, plans: list[OffloadPlan], model_name: str) -> None:
    """Draw tokens a second, expected and allowed by the disk, against --cpu-memory.

    Errors:  UsageError where the file cannot be written
    """
    figure, axes = new_figure(4.0)
    sizes = [plan.cpu_memory_bytes / (1 << 30) for plan in plans]
    allowed = [plan.most_tokens_per_s for plan in plans]
    axes.plot(sizes, [plan.tokens_per_s for plan in plans], "o-", color="black", label="expected")
    axes.plot(sizes, allowed, "o:", color="0.5", label="that the disk allows")
    axes.set(xlabel="--cpu-memory, GiB", ylabel="tokens/s", yscale="log")
    axes.legend(frameon=False)
    axes.set_title(f"{model_name}: neurons on storage", loc="left")
    save_figure(path, figure)


def new_figure(height: float) -> tuple[Any, Any]:
    """An empty figure, and its axes with a grid."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, height), layout="constrained")
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(path: Path, figure: Any) -> None:
    """Write the figure, whole or not at all, in the format that its name ends in."""
    from matplotlib import pyplot

    image = io.BytesIO()
    figure.savefig(image, format=path.suffix[1:].lower(), dpi=160)
    pyplot.close(figure)
    try:
        write_atomic(path, image.getvalue())
    except OSError as problem:
        raise UsageError(
            f"{path}: cannot be written ({problem.strerror}); give another place with --plot"
        ) from None


def _draw_layers(figure: Any, axes: Any, layers: list[np.ndarray]) -> None:
    from matplotlib import cm, colormaps, colors

    # Without the map's light end, which is hard to see on white.
    shades = colors.ListedColormap(colormaps["viridis"](np.linspace(0, 0.88, 256)))
    scale = colors.Normalize(0, max(len(layers) - 1, 1))
    has_legend = len(layers) <= _MAX_IN_LEGEND
    for layer, fired in enumerate(layers):
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
