"""Predictors fitted to layers of known structure, on tokens that they never saw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hotcold.model.config.build import read_config
from hotcold.model.errors import ArtifactError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.predictors.fitting.fit_lowrank import fit_lowrank
from hotcold.predictors.fitting.fit_sign import fit_sign
from hotcold.predictors.fitting.layer_data import LayerData, Split
from hotcold.predictors.fitting.read_prices import IN_BYTES, ReadPrices
from hotcold.predictors.predictor_file import Quality
from hotcold.predictors.stacked import AnyLayer
from tests.patched_models import load_model
from tests.predictor_layers import scores_of
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread")
WIDTH, NUM_NEURONS, TARGET = 128, 512, 0.95
Fit = Callable[[LayerData, float], tuple[AnyLayer, Quality]]
FITS: dict[str, Fit] = {"sign": fit_sign, "lowrank": fit_lowrank}


class SyntheticLayer:
    """Gate rows of low rank plus noise; a tenth of the neurons fire, some far more than others.

    Inputs are normal around a mean, along which rows point away; without a mean a bias does that.
    """

    def __init__(self, rank: int = 12, mean: float = 3.0, noise: float = 0.1) -> None:
        self._source = torch.Generator().manual_seed(rank)
        rows = self._normal(NUM_NEURONS, rank) @ self._normal(rank, WIDTH) / rank**0.5
        rows = (1 - noise) * rows + noise * self._normal(NUM_NEURONS, WIDTH)
        direction = torch.nn.functional.normalize(self._normal(WIDTH), dim=0)
        self._mean = mean * WIDTH**0.5 * direction
        rows -= torch.outer(rows @ direction, direction)
        below = rows.norm(dim=1) * (1.5 + 0.8 * self._normal(NUM_NEURONS))
        self.bias = torch.zeros(NUM_NEURONS) if mean else -below
        self.gate = rows - torch.outer(below, direction) / (mean * WIDTH**0.5) if mean else rows

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._source)

    def draw(self, num_tokens: int) -> Split:
        """New tokens."""
        x = self._normal(num_tokens, WIDTH) + self._mean
        return Split(x, x @ self.gate.T + self.bias)

    def data(self, num_tokens: int = 1500, bits_a_weight: float = 16) -> LayerData:
        """What a predictor is fitted to."""
        gate_bytes = round(self.gate.numel() * bits_a_weight / 8)
        splits = (self.draw(num_tokens), self.draw(800), self.draw(800))
        return LayerData(self.gate, self.gate, gate_bytes, *splits)


def computed_by(layer: AnyLayer, inputs: Tensor) -> Tensor:
    """Which neurons the compiled predictor chooses, (T, N)."""
    return torch.from_numpy(scores_of(layer, np.ascontiguousarray(inputs.numpy())) > 0)


@pytest.fixture(scope="module", params=["mean", "no mean"])
def synthetic(request: pytest.FixtureRequest) -> SyntheticLayer:
    """Without a mean, hidden units have twins."""
    return SyntheticLayer(mean=3.0 if request.param == "mean" else 0.0)


@pytest.mark.parametrize("kind", FITS)
def test_fitted_predictors_on_new_tokens(synthetic: SyntheticLayer, kind: str) -> None:
    layer, told = FITS[kind](synthetic.data(), TARGET)
    fresh = synthetic.draw(3000)
    found = Quality.of(computed_by(layer, fresh.inputs), fresh.fires)
    assert 0.05 < found.active < 0.2
    assert found.recall >= TARGET - 0.02
    assert found.precision > 2.5 * found.active
    assert found.computed < 0.4
    for name, share in vars(told).items():
        assert getattr(found, name) == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("kind", FITS)
def test_dead_layers_and_constant_neurons(kind: str) -> None:
    synthetic = SyntheticLayer()
    synthetic.gate[:3] = 0
    synthetic.bias = synthetic.bias.clone()
    synthetic.bias[1] = 1
    layer, _ = FITS[kind](synthetic.data(), TARGET)
    shares = computed_by(layer, synthetic.draw(500).inputs).float().mean(dim=0)
    assert shares[:3].tolist() == [0, 1, 0]
    synthetic.bias[:] = -1e4
    layer, quality = FITS[kind](synthetic.data(), TARGET)
    assert not computed_by(layer, synthetic.draw(500).inputs).any()
    assert quality.recall == 1 and quality.computed == quality.active == 0


def test_layer_data_is_what_the_checkpoint_says(tmp_path: Path) -> None:
    path = make_tiny("opt-prenorm", tmp_path, dtype="float16")
    config, checkpoint = read_config(path), Checkpoint(path)
    x = np.random.default_rng(0).standard_normal((100, config.hidden_size)).astype(np.float16)
    data = LayerData.load(checkpoint, config, 1, x.view(np.uint16))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    first = model.model.decoder.layers[1].fc1
    with torch.no_grad():
        expected = first(torch.from_numpy(x.astype(np.float32)))
    places = [torch.arange(100) % 20 < 14, (torch.arange(100) % 20 - 15).abs() < 2]
    places = [places[0], places[1] & ~places[0], ~places[0] & ~places[1]]
    for split, place in zip((data.fit, data.calibrate, data.check), places, strict=True):
        torch.testing.assert_close(split.pre_activations, expected[place], rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(split.inputs.numpy(), x[place.numpy()].astype(np.float32))
        assert torch.equal(split.fires, split.pre_activations > 0)
    torch.testing.assert_close(data.gate, first.weight.detach(), rtol=0, atol=0)
    assert data.gate_bytes == data.gate.numel() * 2
    with pytest.raises(ArtifactError, match=r"63 tokens were recorded, .* at least 64"):
        LayerData.load(checkpoint, config, 1, x.view(np.uint16)[:63])


@pytest.mark.parametrize("variant", ["bamboo", "nemotron"])
def test_pre_activations_are_above_zero_where_neurons_fire(variant: str, tmp_path: Path) -> None:
    """By the family's own rule: what comes into the last matrix is not zero."""
    path = make_tiny(variant, tmp_path)
    config = read_config(path)
    x = np.random.default_rng(0).standard_normal((100, config.hidden_size)).astype(np.float16)
    data = LayerData.load(Checkpoint(path), config, 1, x.view(np.uint16))
    mlp = load_model(path, torch.float32).model.layers[1].mlp
    found: list[torch.Tensor] = []
    mlp.down_proj.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0]))
    with torch.no_grad():
        mlp(torch.from_numpy(x.astype(np.float32)))
    fires = found[0] != 0
    is_fit = torch.arange(100) % 20 < 14
    assert 0.05 < float(fires.float().mean()) < 0.7
    assert float((data.fit.fires != fires[is_fit]).float().mean()) < 1e-3  # rounding at zero
    for kind in FITS:
        _, quality = FITS[kind](data, 0.9)
        assert quality.recall > 0.5


def test_prices_choose_the_size() -> None:
    """What two bits save of gates is worth it where gates cost much, not where bits do."""
    data = SyntheticLayer().data()
    prices = {
        "bytes": IN_BYTES,
        "bits cost": ReadPrices(signs=(1.0, 50.0)),
        "gates cost": ReadPrices(listed=50.0),
    }
    found = {
        name: fit_sign(replace(data, prices=each), TARGET)[0].num_weight_planes
        for name, each in prices.items()
    }
    assert found["bits cost"] == 1 and found["gates cost"] == 2
    sizes = [
        fit_lowrank(replace(data, prices=ReadPrices(lowrank=each)), TARGET)[0]
        for each in ((1e-3, 1e-3), (1e-3, 1.0), (30.0, 30.0))
    ]
    assert sizes[1].down.dtype == np.uint16
    assert sizes[2].hidden_size < sizes[0].hidden_size
