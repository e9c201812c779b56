"""Counts of experts for Prometheus."""

from __future__ import annotations

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from hotcold.actors.protocol.messages import DriverLoad
from hotcold.actors.telemetry.experts import ExpertCounts
from hotcold.ui.api.metrics import Metrics, metrics_text

_QUOTED = 'a "quoted" \\ name'


def test_each_expert_has_its_counts() -> None:
    """Of layer 1's two experts and shared one, and of layer 2's three; layer 0 is dense."""
    chosen = np.array([[0, 0, 0], [5, 2, 7], [1, 0, 13]])
    read = np.minimum(chosen, 4)
    missed = np.array([[0, 0, 0], [1, 2, 0], [0, 0, 3]])
    counts = ExpertCounts(np.array([0, 2, 3]), 1, chosen, read, missed)
    assert counts.hit_rate == 1 - 6 / (4 + 2 + 1 + 0 + 4)
    both = Metrics("one"), Metrics(_QUOTED)
    for metrics in both:
        metrics.show(DriverLoad(0, 0, 0.0, experts=counts))
        metrics.show(None)  # a driver that does not answer takes no count away
    families = {
        family.name: family
        for family in text_string_to_metric_families(metrics_text(both).decode())
    }
    routed = [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    for name, wanted in {
        "hotcold:expert_tokens": chosen,
        "hotcold:expert_reads": read,
        "hotcold:expert_misses": missed,
    }.items():
        assert families[name].type == "counter"
        found = {
            (sample.labels["model_name"], sample.labels["layer"], sample.labels["expert"]): (
                sample.value
            )
            for sample in families[name].samples
        }
        assert found == {
            (model, str(layer), str(expert)): wanted[layer, expert]
            for model in ("one", _QUOTED)
            for layer, expert in routed
        }


def test_other_models_have_none() -> None:
    metrics = Metrics("words")
    metrics.show(DriverLoad(0, 0, 0.0))
    assert b"expert" not in metrics_text([metrics])
    zeros = np.zeros((1, 2), np.int64)
    in_memory = ExpertCounts(np.array([2]), 1, zeros, zeros)
    assert in_memory.hit_rate is None
    metrics.show(DriverLoad(0, 0, 0.0, experts=in_memory))
    assert b"expert_misses" not in metrics_text([metrics])
