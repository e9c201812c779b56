"""What a plan takes for granted, in words: whoever reads its figures should know."""

from __future__ import annotations

from collections.abc import Iterator

from hotcold.placement.machine.description import Machine
from hotcold.placement.plan import PlanRequest
from hotcold.placement.profile import ActivationProfile
from hotcold.placement.solver.cost import PredictorCost


def assumptions(
    machine: Machine,
    request: PlanRequest,
    profile: ActivationProfile | None,
    predictor: PredictorCost | None,
) -> Iterator[str]:
    """Yield one clause an assumption, the weightiest first."""
    if profile is None:
        yield "every neuron fires at every token (no profile; `hotcold profile` counts)"
    elif profile.is_stated:
        yield profile.text_name
    if predictor is not None and predictor.note:
        yield predictor.note
    if machine.was_busy:
        yield (
            f"{machine.name} reads no faster than it did on {machine.date} while other programs "
            f"took {machine.busy_cores:.1f} of its cores (`hotcold doctor --fresh` measures again)"
        )
    if not machine.date:
        yield f"{machine.name} is as fast as its description says"
    for gpu in machine.gpus:
        if machine.date and not gpu.measured:
            yield (
                f"{gpu.name} reads {gpu.read_gb_per_s:.0f} GB/s, and {gpu.link_gb_per_s:.0f} GB/s "
                "from the host (not measured)"
            )
    yield f"one request at a time, whose {request.context_length} positions are half full"
