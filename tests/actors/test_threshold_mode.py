"""Threshold mode in services and driver, against the two stages written down in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from hotcold.actors.driver.scoring import ThresholdTrials, score_window
from hotcold.actors.protocol.messages import THRESHOLD
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.preflight import prepare_system
from hotcold.actors.setup.shards import service_specs
from hotcold.jobs.commands.perplexity import summary
from hotcold.model.files.artifact import ModelIdentity
from hotcold.numba_kernels.decode.activations import Thresholds
from hotcold.predictors.magnitude_thresholds import (
    Calibrated,
    LayerThresholds,
    thresholds_path,
    write_thresholds,
)
from tests import reference
from tests.actors.cuda_in_process import CudaInProcess, a_third
from tests.actors.in_process import InProcessSystem
from tests.reference import reference_logits, relative_difference
from tests.tiny_checkpoint import Tiny
from tests.unit.test_down_outputs import MIXED
from tests.unit.test_gguf_model import IDS as MODEL_IDS
from tests.unit.test_gguf_model import file_of
from tests.unit.test_gguf_model import tiny as tiny_gguf

VARIANTS = ["llama-silu", "gemma3", "gemma4-e"]
IDS = np.random.default_rng(7).integers(0, 101, 24)
GGUF_IDS = np.array(MODEL_IDS)


def same_everywhere(num_layers: int, gate: float, product: float) -> list[Thresholds]:
    return [Thresholds(np.float32(gate), np.float32(product))] * num_layers


class Margins:
    """Watches the reference compare: how near the nearest number comes to its threshold."""

    def __init__(self) -> None:
        self.least = np.inf
        self.shares: list[float] = []

    def __call__(self, values: torch.Tensor, threshold: float) -> torch.Tensor:
        near = (values.abs() / max(threshold, 1e-30) - 1).abs().min()
        self.least = min(self.least, float(near))
        passes = values.abs() > threshold
        self.shares.append(float(passes.double().mean()))
        return passes


def reference_of(
    path: Path, ids: np.ndarray, num_layers: int, gate: float, product: float
) -> tuple[np.ndarray, list[Thresholds], list[float]]:
    """Logits with thresholds next to those asked for, which no number comes near to rounding."""
    for _ in range(20):
        chosen, margins = same_everywhere(num_layers, gate, product), Margins()
        with mock.patch.object(reference, "_exceeds", margins):
            found = reference_logits(
                path, ids, thresholds=[(float(t.gate), float(t.product)) for t in chosen]
            )
        if margins.least > 1e-5:
            return found, chosen, margins.shares
        gate, product = gate * 1.003, product * 1.003
    raise AssertionError("every threshold is next to some number")


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_reference(tiny: Tiny, variant: str) -> None:
    path = tiny(variant).path
    with InProcessSystem(path, 2, 2, has_down_norms=True) as system:
        layers = system.config.num_layers
        expected, thresholds, shares = reference_of(path, IDS, layers, 0.12, 0.3)
        dense = system.logits("dense", IDS, [1])
        assert relative_difference(expected, dense) > 0.01
        assert min(shares) > 0.1 and max(shares) < 0.95
        for sizes in ([1], [2, 7, 5], [24]):
            found = system.logits(THRESHOLD, IDS, sizes, thresholds=thresholds)
            assert relative_difference(found, expected) < 1e-4
        zeros = same_everywhere(layers, 0, 0)
        for sizes in ([1], [5]):
            found = system.logits(THRESHOLD, IDS, sizes, thresholds=zeros)
            np.testing.assert_array_equal(found, system.logits("dense", IDS, sizes))


@pytest.mark.parametrize(
    ("kind", "variant"), [(InProcessSystem, "gemma3"), (CudaInProcess, "llama-silu")]
)
def test_hot_neurons_keep_to_thresholds(tiny: Tiny, variant: str, kind: Any) -> None:
    path = tiny(variant).path
    with kind(path, 2, 1, hot=a_third, has_down_norms=True) as system:
        expected, thresholds, _ = reference_of(path, IDS, system.config.num_layers, 0.12, 0.3)
        for sizes in ([1], [4]):
            found = system.logits(THRESHOLD, IDS, sizes, thresholds=thresholds)
            assert relative_difference(found, expected) < 1e-4


def test_rows_that_are_read_are_counted(tiny: Tiny) -> None:
    path = tiny("llama-silu").path
    with InProcessSystem(path, 2, 2, hot=a_third, has_down_norms=True) as system:
        config = system.config
        _, thresholds, shares = reference_of(path, IDS, config.num_layers, 0.12, 0.3)
        engine = system.engine(THRESHOLD, thresholds=thresholds)
        for at, token in enumerate(IDS.tolist()):
            engine.step([token], [at], [0])
        all_neurons = config.num_neurons * IDS.size
        up_share = np.mean(shares[::2])  # the reference compares gates, then products
        assert engine.times.num_ups == round(float(up_share) * all_neurons)
        assert engine.times.num_neurons < engine.times.num_ups < engine.times.num_gates
        assert engine.times.num_gates == all_neurons
        window = IDS.tolist()
        found = score_window(engine, window, 3, audit=True)
        report = summary([found], config.num_neurons, THRESHOLD)
        scored = (IDS.size - 1) / IDS.size
        assert report["ups_computed"] == pytest.approx(up_share, abs=1 - scored)
        assert 0 < report["neurons_computed"] < report["ups_computed"] < 1
        assert report["recall"] is None


def test_what_thresholds_cost_equals_the_reference(tiny: Tiny) -> None:
    path = tiny("qwen3").path
    with InProcessSystem(path, 1, 2, has_down_norms=True) as system:
        expected, thresholds, _ = reference_of(path, IDS, system.config.num_layers, 0.12, 0.3)
        log_p, log_q = (
            log_softmax(rows, axis=-1) for rows in (reference_logits(path, IDS), expected)
        )
        kld = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)[3:-1]
        trials = ThresholdTrials(system.engine("dense"))
        for _ in range(2):  # the second time dense logits are there
            found = trials.kld(IDS.tolist(), 3, thresholds)
            np.testing.assert_allclose(found, kld, rtol=1e-3, atol=1e-6)
        zeros = same_everywhere(system.config.num_layers, 0, 0)
        assert np.abs(trials.kld(IDS.tolist(), 3, zeros)).max() < 1e-12


def written(path: Path, num_layers: int, thresholds: Sequence[Thresholds]) -> Path:
    """A file of thresholds beside the model."""
    gate, product = np.array(thresholds, np.float32).T
    shares = np.full(num_layers, 0.5)
    found = Calibrated(LayerThresholds(gate, product), 0.02, 0.03, shares, shares / 2, "0" * 64)
    write_thresholds(thresholds_path(path), ModelIdentity.of(path), found)
    return thresholds_path(path)


def test_thresholds_beside_rows_of_outputs(tmp_path: Path) -> None:
    """Neurons that add little are left out, as the reference leaves them out."""
    path = tmp_path / "tiny.gguf"
    file_of(tiny_gguf(), path, MIXED)
    thresholds = [Thresholds(np.float32(0.3), np.float32(0.3))] * 2
    told = [(float(each.gate), float(each.product)) for each in thresholds]
    file = written(path, 2, thresholds)
    options = SystemOptions(context_length=128, mode="threshold", thresholds=file)
    system, config = prepare_system(path, options)
    assert system.down_transposed and system.has_down_norms
    dense = reference_logits(path, GGUF_IDS)
    wanted = reference_logits(path, GGUF_IDS, thresholds=told)
    with InProcessSystem(path, num_threads=2, specs=service_specs(system, config)) as running:
        engine = running.engine("threshold", thresholds=thresholds)
        for at, token in enumerate(GGUF_IDS.tolist()):
            engine.step([token], [at], [0])
        times = engine.times
        assert 0.2 * times.num_gates < times.num_neurons < times.num_ups < 0.9 * times.num_gates
        found = running.logits("threshold", GGUF_IDS, (1,), thresholds=thresholds)
        for size in (3, 10):
            together = running.logits("threshold", GGUF_IDS, (size,), thresholds=thresholds)
            assert np.array_equal(found, together)
    # A number beside a threshold may fall to its other side: vectors have 8 bits here.
    left_out = np.abs(wanted - dense).max()
    assert left_out > 0.02 * np.abs(dense).max()
    assert np.abs(found - wanted).max() < 0.5 * left_out
