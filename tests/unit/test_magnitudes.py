"""Thresholds allocated to layers: what they leave out, compared with brute force."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hotcold.model.config import neurons
from hotcold.model.config.build import read_config
from hotcold.model.errors import ArtifactError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.ffn import load_ffn
from hotcold.numba_kernels.decode.activations import Thresholds
from hotcold.predictors.fitting.magnitudes import (
    LayerCurve,
    Magnitudes,
    allocate,
    layer_magnitudes,
)
from hotcold.predictors.magnitude_thresholds import (
    Calibrated,
    LayerThresholds,
    read_thresholds,
    write_thresholds,
)
from tests.conftest import TinyCheckpoint
from tests.patched_models import load_model


def some_magnitudes(seed: int, scale: float = 1.0) -> Magnitudes:
    random = np.random.default_rng(seed)
    gates = np.abs(random.standard_normal((20, 60))).astype(np.float32)
    ups = np.abs(random.standard_normal((20, 60))).astype(np.float32)
    return Magnitudes(gates, gates * ups * np.float32(scale))


def test_no_other_pairs_read_less_at_that_cost() -> None:
    """Of all pairs of two layers, on a coarse grid of the same curves."""
    curves = [coarse(LayerCurve.of(some_magnitudes(seed, seed))) for seed in (1, 3)]
    sensitivities, up_weight = [1.0, 0.2], 0.5
    pairs = list(itertools.product(range(24), repeat=2))
    for budget in (0.01, 1.0, 20.0):
        choices = allocate(curves, sensitivities, up_weight, budget)
        cost = sum(s * c.error for s, c in zip(sensitivities, choices, strict=True))
        read = sum(up_weight * c.up_share + (1 - up_weight) * c.down_share for c in choices)
        assert cost <= budget
        best = min(
            sum(reads)
            for reads in (
                [up_weight * c.up_shares[i] + (1 - up_weight) * c.down_shares[i, j]
                 for c, (i, j) in zip(curves, chosen, strict=True)]
                for chosen in itertools.product(pairs[::5], repeat=2)
                if sum(s * c.errors[place] for s, c, place
                       in zip(sensitivities, curves, chosen, strict=True)) <= cost
            )
        )  # fmt: skip
        assert read <= best + 1e-9


def coarse(curve: LayerCurve) -> LayerCurve:
    few = np.linspace(150, 319, 24).astype(int)
    return LayerCurve(
        curve.gate_thresholds[few], curve.product_thresholds[few], curve.up_shares[few],
        curve.down_shares[np.ix_(few, few)], curve.errors[np.ix_(few, few)],
    )  # fmt: skip


def test_magnitudes_are_those_of_transformers(tiny: Callable[..., TinyCheckpoint]) -> None:
    path = tiny("gemma3").path
    model, config = load_model(path, torch.float32), read_config(path)
    random = np.random.default_rng(2)
    inputs = random.standard_normal((config.num_layers, 9, config.hidden_size)).astype(np.float16)
    found = layer_magnitudes(Checkpoint(path), config, inputs.view(np.uint16))
    for layer, magnitudes in enumerate(found):
        mlp = model.model.layers[layer].mlp
        x = torch.from_numpy(inputs[layer].astype(np.float32))
        with torch.no_grad():
            gates = mlp.act_fn(mlp.gate_proj(x))
            h = gates * mlp.up_proj(x)
            lengths = (h[:, :, None] * mlp.down_proj.weight.T).norm(dim=2)
        np.testing.assert_allclose(magnitudes.gates, gates.abs().numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(magnitudes.contributions, lengths.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "wrong"), [("gate", -1.0), ("down_share", np.nan)])
def test_wrong_numbers_are_refused(
    name: str, wrong: float, tmp_path: Path, tiny: Callable[..., TinyCheckpoint]
) -> None:
    config = read_config(tiny("llama-silu").path)
    layers, identity = config.num_layers, ModelIdentity("any", "0" * 64)
    numbers = LayerThresholds(*np.ones((2, layers), np.float32))
    good = Calibrated(numbers, 0.02, 0.03, np.ones(layers), np.ones(layers), "0" * 64)
    write_thresholds(tmp_path / "t", identity, good)
    found = read_thresholds(tmp_path / "t", identity, config)
    one = Thresholds(np.float32(1), np.float32(1))
    assert found.thresholds.of_layers() == [one] * layers
    spoiled: Any = {"gate": numbers.gate, "product": numbers.product}
    spoiled |= {"up_share": good.up_share, "down_share": good.down_share}
    spoiled[name] = np.full_like(spoiled[name], wrong)
    numbers = LayerThresholds(spoiled.pop("gate"), spoiled.pop("product"))
    bad = replace(good, thresholds=numbers, **spoiled)
    write_thresholds(tmp_path / "t", identity, bad)
    with pytest.raises(ArtifactError, match=f"its {name} is wrong"):
        read_thresholds(tmp_path / "t", identity, config)
    other = replace(config, num_layers=layers + 1)
    with pytest.raises(ArtifactError, match="make it again"):
        read_thresholds(tmp_path / "t", identity, other)


def test_magnitudes_of_chosen_experts(tiny: Callable[..., TinyCheckpoint]) -> None:
    """Of the tokens that chose each expert, by its weight."""
    path = tiny("qwen2-moe").path
    checkpoint, config = Checkpoint(path), read_config(path)
    random = np.random.default_rng(2)
    inputs = random.standard_normal((config.num_layers, 9, config.hidden_size)).astype(np.float16)
    weights = np.zeros((config.num_layers, 9, neurons.most_blocks(config)), np.float32)
    weights[:, :, 7] = 1  # the shared expert
    for row in weights.reshape(-1, 8):
        row[random.choice(7, 3, replace=False)] = random.uniform(0.1, 2, 3)
    every = [np.arange(size, dtype=np.int32) for size in config.ffn_sizes]
    held = load_ffn(checkpoint, config, every, include_down_bias=False)
    found = layer_magnitudes(checkpoint, config, inputs.view(np.uint16), weights)
    for at, magnitudes in enumerate(found):
        x, part = torch.from_numpy(inputs[at].astype(np.float32)), held.part(at)
        gate, up, down = (torch.from_numpy(rows[part]) for rows in (held.gate, held.up, held.down))
        sizes = config.layers[at].ffn.block_sizes
        every_gate = torch.nn.functional.silu(x @ gate.T).abs()
        every_length = every_gate * (x @ up.T).abs() * down.norm(dim=1)
        every_length *= torch.from_numpy(np.repeat(weights[at], sizes, axis=1))
        ends = np.append(0, np.cumsum(sizes))
        pairs = [
            (token, neuron)
            for block in range(len(sizes))
            for token in np.flatnonzero(weights[at, :, block])
            for neuron in range(ends[block], ends[block + 1])
        ]
        tokens, ids = np.array(pairs).T
        assert magnitudes.ids is not None and magnitudes.ids.tolist() == ids.tolist()
        assert (magnitudes.num_tokens, magnitudes.num_neurons) == (9, sum(sizes))
        for own, expected in (
            (magnitudes.gates, every_gate),
            (magnitudes.contributions, every_length),
        ):
            np.testing.assert_allclose(own, expected.numpy()[tokens, ids], rtol=1e-4, atol=1e-5)
        ups, downs = magnitudes.rows_read(0.3, 0.2)
        passed = magnitudes.gates > 0.3
        assert ups.tolist() == [int(passed[magnitudes.ids == n].sum()) for n in range(sum(sizes))]
        assert downs.sum() == (passed & (magnitudes.contributions > 0.2)).sum()
        curve = LayerCurve.of(magnitudes)
        squares = magnitudes.contributions.astype(np.float64) ** 2
        assert curve.errors[-1, -1] == pytest.approx(squares.sum() / 9, rel=0.2)
