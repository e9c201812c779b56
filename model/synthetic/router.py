"""Random router rows that choose experts with a chosen skew, and keep some from token to token.

Row e is a_e * s + sum over topics m of b_em * g_m + n_e, with s what all inputs have in common, g_m
the topics' directions and n_e noise orthogonal to all of them. a_e makes some experts popular, b_em
has a topic's experts chosen while the text stays in it, and n_e decides for each token. How much
there is of each is found by bisection on the layer's own inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hotcold.model.config.layer_spec import RouterSpec
from hotcold.model.synthetic.random_source import NormalSource
from hotcold.model.synthetic.topics import STAYING, SampleText, Topics

_LOGITS_STD = 1.5  # among the experts of a token
_BISECTIONS = 10
_MAX_SPREAD = 4.0  # of what makes experts popular, against 1 of all else


@dataclass(frozen=True)
class RoutingStats:
    """How experts are chosen on the text that a router was fitted to."""

    skew: float  # share of all choices that the busier half of the experts has
    kept: float  # share of a token's experts that the one before it had


@dataclass(frozen=True)
class Router:
    """A router's rows (E, D), and what experts weigh for each token (T, E), 0: not chosen."""

    rows: torch.Tensor
    logits: torch.Tensor
    weights: torch.Tensor
    stats: RoutingStats


def make_router(
    inputs: torch.Tensor,
    topics: Topics,
    text: SampleText,
    spec: RouterSpec,
    wanted: RoutingStats,
    bias: torch.Tensor | None,
    source: NormalSource,
) -> Router:
    """Make a router whose choices on `inputs` are as `wanted`, as nearly as they can be.

    Skew alone keeps some experts; where `wanted` keeps fewer, they are what it keeps.
    Shapes:  inputs (T, D), bias (E,) or None, added to the logits
    Dtypes:  float32
    """
    popular, by_topic, noise = _parts(spec.num_experts, topics, inputs, source)
    parts = [inputs @ rows.T for rows in (popular, by_topic, noise)]
    scales = [1 / float(part.std()) for part in (parts[1], parts[2])]
    offset = 0.0 if bias is None else bias

    def mixed(spread: float, slow: float, of: list[torch.Tensor]) -> torch.Tensor:
        return (
            of[0] * spread
            + of[1] * (slow**0.5 * scales[0])
            + of[2] * ((1 - slow) ** 0.5 * scales[1])
        )

    def scale(logits: torch.Tensor) -> float:
        return _LOGITS_STD / float(logits.std(dim=1).mean())

    def choices(spread: float, slow: float) -> torch.Tensor:
        logits = mixed(spread, slow, parts)
        logits = logits * scale(logits) + offset
        return logits.topk(spec.num_chosen, dim=1).indices

    def fitting_spread(slow: float) -> float:
        return _bisect(
            lambda spread: skew_of(choices(spread, slow), spec.num_experts) < wanted.skew,
            _MAX_SPREAD,
        )

    slow = _bisect(
        lambda share: kept_of(choices(fitting_spread(share), share), text) < wanted.kept, 1.0
    )
    spread = fitting_spread(slow)
    factor = scale(mixed(spread, slow, parts))
    rows = mixed(spread, slow, [popular, by_topic, noise]) * factor
    logits = inputs @ rows.T + offset
    chosen = logits.topk(spec.num_chosen, dim=1).indices
    stats = RoutingStats(skew_of(chosen, spec.num_experts), kept_of(chosen, text))
    return Router(rows, logits, _weights(spec, logits, chosen), stats)


def skew_of(chosen: torch.Tensor, num_experts: int) -> float:
    """Return the share of choices (T, k) that the busier half of the experts has."""
    counts = torch.bincount(chosen.flatten(), minlength=num_experts).sort(descending=True).values
    return float(counts[: num_experts // 2].sum() / counts.sum())


def kept_of(chosen: torch.Tensor, text: SampleText) -> float:
    """Return the share of choices (T, k) that the token before had.

    Of tokens that keep the topic, and others, as if STAYING of all kept it.
    """
    assert text.topics is not None
    is_kept = (chosen[1:, :, None] == chosen[:-1, None, :]).any(dim=2).float().mean(dim=1)
    follows = torch.arange(1, len(chosen)) % text.sequence_tokens != 0
    stays = text.topics[1:] == text.topics[:-1]
    stayed, left = is_kept[follows & stays].mean(), is_kept[follows & ~stays].mean()
    return float(STAYING * stayed + (1 - STAYING) * left)


def _parts(
    num_experts: int, topics: Topics, inputs: torch.Tensor, source: NormalSource
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rows' parts, (E, D) each; of the first the logits have deviation 1."""
    along = float((inputs @ topics.common).mean())
    popular = torch.outer(source.normal((num_experts,)), topics.common / along)
    by_topic = source.normal((num_experts, topics.count)) @ topics.directions
    noise = source.normal((num_experts, inputs.shape[1]))
    topics.take_out_of(noise)
    return popular, by_topic, noise


def _bisect(is_low: Callable[[float], bool], high: float) -> float:
    """Return where `is_low` ends in 0..high."""
    low = 0.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_low(middle) else (low, middle)
    return (low + high) / 2


def _weights(spec: RouterSpec, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    scores = {
        "softmax": logits.softmax(dim=1),
        "sigmoid": logits.sigmoid(),
        "softmax_of_chosen": logits,
    }[spec.score].gather(1, chosen)
    if spec.score == "softmax_of_chosen":
        scores = scores.softmax(dim=1)
    if spec.norms_chosen:
        scores = scores / scores.sum(dim=1, keepdim=True)
    return torch.zeros_like(logits).scatter_(1, chosen, scores * spec.scale)
