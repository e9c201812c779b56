"""What a running system shows of itself, as JSON."""

from typing import Any

import numpy as np

from hotcold.actors.telemetry.experts import ExpertCounts
from hotcold.actors.telemetry.snapshot import NeuronMap, Telemetry

_SPEED = (
    "tokens_per_s", "neurons_computed", "gates_computed", "per_step_ms", "tokens_per_step",
    "drafts", "reads",
)  # fmt: skip
_ACTOR = ("name", "state", "pid", "memory_bytes", "device")


def map_json(neurons: NeuronMap) -> dict[str, Any]:
    """Counts by layer and bucket, as lists of numbers; in a mixture buckets are experts."""
    return {
        "steps": neurons.num_steps,
        "neurons": neurons.num_neurons.tolist(),
        "hot": neurons.num_hot.tolist() if neurons.num_hot.any() else None,
        "last": {
            "computed": neurons.last_computed.tolist(),
            "gates": neurons.last_gates.tolist(),
        },
        "mean": {
            "computed": np.round(neurons.mean_computed, 2).tolist(),
            "gates": np.round(neurons.mean_gates, 2).tolist(),
        },
        "experts": None if neurons.experts is None else _experts_json(neurons.experts),
    }


def _experts_json(experts: ExpertCounts) -> dict[str, Any]:
    """Of each layer how many experts its router chooses from, and the share of tokens of each."""
    return {
        "count": experts.num_experts.tolist(),
        "per_token": experts.num_chosen,
        "chosen": np.round(experts.rates, 4).tolist(),
        "hit_rate": experts.hit_rate,
    }


def telemetry_json(telemetry: Telemetry) -> dict[str, Any]:
    """What the page's panel and `hotcold top` show."""
    return {
        "mode": telemetry.mode,
        "uptime_s": telemetry.uptime_s,
        "draft": telemetry.draft,
        "running": telemetry.num_running,
        "waiting": telemetry.num_waiting,
        "kv_pages_used": telemetry.kv_pages_used,
        "kv_pages": telemetry.kv_pages,
        **{name: getattr(telemetry.speed, name) for name in _SPEED},
        "num_drafted": sum(counts[0] for counts in telemetry.speed.drafts.values()),
        "num_accepted": sum(counts[1] for counts in telemetry.speed.drafts.values()),
        "map": map_json(telemetry.neurons),
        "host_memory_bytes": telemetry.host_memory_bytes,
        "host_memory_used_bytes": telemetry.host_memory_used_bytes,
        "actors": [{name: getattr(actor, name) for name in _ACTOR} for actor in telemetry.actors],
    }
