"""Predictors: how they are fitted, their file, and how they are arranged for services' shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor

from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError
from hotcold.model.files.artifact import ModelIdentity, read_artifact, write_artifact
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.predictors.fitting.fit_lowrank import fit_lowrank
from hotcold.predictors.fitting.fit_sign import fit_sign
from hotcold.predictors.fitting.layer_data import LayerData, Split
from hotcold.predictors.fitting.read_prices import IN_BYTES, ReadPrices
from hotcold.predictors.fitting.thresholds import MarginFit, least_margin
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.predictor_file import (
    Predictors,
    Quality,
    read_predictors,
    write_predictors,
)
from hotcold.predictors.sign import SignLayer
from hotcold.predictors.stacked import AnyLayer
from tests.kernels.reference import narrowed
from tests.patched_models import load_model
from tests.predictor_layers import chosen_by, scores_of
from tests.tiny_models import make_tiny

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


def recorded(path: Path, num_tokens: int = 100) -> tuple[LayerData, torch.Tensor]:
    """What is read of the second layer for random inputs, and these (T, d)."""
    config = read_config(path)
    x = np.random.default_rng(0).standard_normal((100, config.hidden_size)).astype(np.float16)
    data = LayerData.load(Checkpoint(path), config, 1, x.view(np.uint16)[:num_tokens])
    return data, torch.from_numpy(x.astype(np.float32))


def test_layer_data_is_what_the_checkpoint_says(tmp_path: Path) -> None:
    path = make_tiny("opt-prenorm", tmp_path, dtype="float16")
    data, x = recorded(path)
    first = load_model(path, torch.float32).model.decoder.layers[1].fc1
    with torch.no_grad():
        expected = first(x)
    at = torch.arange(100) % 20
    places = [at < 14, (at == 14) | (at == 15) | (at == 16), at > 16]
    for split, place in zip((data.fit, data.calibrate, data.check), places, strict=True):
        torch.testing.assert_close(split.pre_activations, expected[place], rtol=1e-4, atol=1e-4)
        assert torch.equal(split.inputs, x[place])
        assert torch.equal(split.fires, split.pre_activations > 0)
    torch.testing.assert_close(data.gate, first.weight.detach(), rtol=0, atol=0)
    assert data.gate_bytes == data.gate.numel() * 2
    with pytest.raises(ArtifactError, match=r"63 tokens were recorded, .* at least 64"):
        recorded(path, 63)


@pytest.mark.parametrize("variant", ["bamboo", "nemotron"])
def test_pre_activations_are_above_zero_where_neurons_fire(variant: str, tmp_path: Path) -> None:
    """By the family's own rule: what comes into the last matrix is not zero."""
    data, x = recorded(make_tiny(variant, tmp_path))
    mlp = load_model(tmp_path, torch.float32).model.layers[1].mlp
    found: list[torch.Tensor] = []
    mlp.down_proj.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0]))
    with torch.no_grad():
        mlp(x)
    fires = found[0] != 0
    is_fit = torch.arange(100) % 20 < 14
    assert 0.05 < float(fires.float().mean()) < 0.7
    assert float((data.fit.fires != fires[is_fit]).float().mean()) < 1e-3  # rounding at zero
    for kind in FITS:
        _, quality = FITS[kind](data, 0.9)
        assert quality.recall > 0.5


class Known:
    """z = slope * e + shift + noise * normal, with numbers of each neuron's own."""

    def __init__(self, seed: int) -> None:
        self._source = torch.Generator().manual_seed(seed)
        self.slope = 0.2 + 3 * torch.rand(300, generator=self._source)
        self.shift = 3 * torch.randn(300, generator=self._source) - 3
        self.noise = 0.2 + 2 * torch.rand(300, generator=self._source)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Estimates and pre-activations of tokens never drawn before, (T, N) each."""
        shape = (6000, 300)
        e = 2 * torch.randn(shape, generator=self._source) + 1
        noise = self.noise * torch.randn(shape, generator=self._source)
        return e, self.slope * e + self.shift + noise

    def probability(self, e: Tensor) -> Tensor:
        """That the neuron fires, given its estimate."""
        return 0.5 * torch.erfc(-(self.slope * e + self.shift) / self.noise / math.sqrt(2))


@pytest.mark.parametrize("target", [0.9, 0.999])
def test_as_few_neurons_as_one_who_knows(target: float) -> None:
    known = Known(1)
    fit = MarginFit.of(*known.draw())
    e, z = known.draw()
    thresholds = fit.thresholds(least_margin(fit.margins(e), z > 0, target))
    e, z = known.draw()
    fires, computed = z > 0, e > thresholds
    quality = Quality.of(computed, fires)
    assert quality.recall == pytest.approx(target, abs=0.2 * (1 - target) + 0.001)
    # Who knows takes the likeliest first until these tokens' recall is reached.
    order = known.probability(e).flatten().argsort(descending=True)
    found = fires.flatten()[order].cumsum(0)
    num_best = int((found < quality.recall * found[-1]).sum()) + 1
    assert int(computed.sum()) <= 1.02 * num_best
    assert 0.1 < quality.active < quality.computed < 0.9 or target < 0.9


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


CONFIG_SIZES: dict[str, Any] = {"num_layers": 4, "hidden_size": 70, "ffn_size": 37}
IDENTITY = ModelIdentity("mine", "ab" * 32)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    tiny = read_config(make_tiny("llama-relu", tmp_path_factory.mktemp("tiny")))
    return replace(tiny, **CONFIG_SIZES)


def sign_layer(seed: int, num_planes: int) -> SignLayer:
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 63, (37, 2 * num_planes), np.uint64)
    bits[:, 1::2] &= np.uint64((1 << 6) - 1)  # of 70 items
    thresholds, center, scale = (
        rng.standard_normal(size, dtype=np.float32) for size in (37, 70, 70)
    )
    thresholds[:2] = np.inf, -np.inf
    return SignLayer(bits, thresholds, center, scale)


def lowrank_layer(seed: int, dtype: type) -> LowRankLayer:
    rng = np.random.default_rng(seed)
    wide = [rng.standard_normal(shape, dtype=np.float32) for shape in ((18, 70), (18, 37))]
    if dtype is np.int8:
        narrow = [np.clip(a * 40, -127, 127).astype(np.int8) for a in wide]
    else:
        narrow = [narrowed(a, np.uint16) for a in wide]
    down, up = narrow
    scales = np.exp(rng.standard_normal(18, dtype=np.float32))
    return LowRankLayer(down, scales, up, rng.standard_normal(37, dtype=np.float32))


def mixed() -> Predictors:
    """A layer of each kind, and one that has none."""
    layers = [sign_layer(1, 2), None, lowrank_layer(2, np.int8), sign_layer(3, 1)]
    qualities = [Quality(0.5, 0.25, 0.75, 0.125)] * 4
    return Predictors(layers, "ffn_input", qualities, 0.9, "cd" * 32)


def assert_same_layer(found: AnyLayer | None, expected: AnyLayer | None) -> None:
    assert type(found) is type(expected)
    for name, array in {} if expected is None else vars(expected).items():
        assert getattr(found, name).dtype == array.dtype
        np.testing.assert_array_equal(getattr(found, name), array)


def test_file_round_trip(config: ModelConfig, tmp_path: Path) -> None:
    written = mixed()
    write_predictors(tmp_path / "p", IDENTITY, written)
    found = read_predictors(tmp_path / "p", IDENTITY, config)
    for one, other in zip(found.layers, written.layers, strict=True):
        assert_same_layer(one, other)
    assert replace(found, layers=()) == replace(written, layers=())
    expected = sum(array.nbytes for array in load_file(tmp_path / "p").values())
    assert found.num_bytes == expected > 0
    plain = Predictors([None, lowrank_layer(0, np.uint16), None, None], "residual")
    write_predictors(tmp_path / "p", IDENTITY, plain)
    found = read_predictors(tmp_path / "p", IDENTITY, config)
    assert (found.qualities, found.target_recall, found.input_name) == (None, None, "residual")
    assert_same_layer(found.layers[1], plain.layers[1])


@pytest.mark.parametrize("num_services", [1, 3])
def test_arranged_for_shards_the_choice_is_the_same(num_services: int) -> None:
    predictors, num_tokens = mixed(), 5
    rng = np.random.default_rng(num_services)
    shards = []
    for _ in predictors.layers:  # another deal in every layer
        order = rng.permutation(37).astype(np.int32)
        shards.append(np.split(order, np.sort(rng.integers(0, 38, num_services - 1))))
    by_service = [[layer[s] for layer in shards] for s in range(num_services)]
    arranged = predictors.arranged(by_service)
    x = rng.standard_normal((num_tokens, 70), dtype=np.float32)
    layout = ArenaLayout(1 + num_services, num_tokens, 70, 37, 50, 1, 1, 1)
    buffers = layout.buffers(layout.new_arena())
    for i, layer in enumerate(predictors.layers):
        chosen = chosen_by(arranged, buffers, i, x)
        if layer is None:
            assert chosen is None
            continue
        assert chosen is not None and len(chosen) == num_services
        found = np.zeros((num_tokens, 37), bool)
        for s, rows in enumerate(chosen):
            for t in range(num_tokens):
                found[t, shards[i][s][rows[t]]] = True
        np.testing.assert_array_equal(found, scores_of(layer, x) > 0)
        assert 0 < found.mean() < 1


def nan(array: np.ndarray) -> np.ndarray:
    return np.full_like(array, np.nan)


QUALITY = {"recall": 1, "precision": 1, "computed": 1, "active": 1}
# A tensor's name and what becomes of it, or a fact and its value.
SPOILED: list[tuple[str, Any]] = [
    ("0.bits", None),
    ("2.scales", None),
    ("0.thresholds", nan),
    ("2.scales", nan),
    ("0.bits", lambda a: a[:-1]),
    ("2.up", lambda a: a[:-1]),
    ("2.down", lambda a: a.astype(np.float64)),
    ("0.bits", lambda a: a.reshape(-1)),
    ("kinds", ["sign"] * 3),
    ("kinds", [[], "none", "lowrank", "sign"]),
    ("kinds", ["lowrank", "none", "sign", "sign"]),
    ("input", "wrong"),
    ("text_digest", None),
    ("target_recall", "wrong"),
    ("qualities", [QUALITY | {"recall": "x"}]),
    ("qualities", [QUALITY]),
]


@pytest.mark.parametrize(("name", "change"), SPOILED)
def test_files_that_make_no_sense_are_refused(
    config: ModelConfig, tmp_path: Path, name: str, change: Any
) -> None:
    path = tmp_path / "p"
    write_predictors(path, IDENTITY, mixed())
    artifact = read_artifact(path, "predictors", IDENTITY)
    if name not in artifact.tensors:
        artifact.facts[name] = change
    elif change is None:
        del artifact.tensors[name]
    else:
        artifact.tensors[name] = change(artifact.tensors[name])
    write_artifact(path, "predictors", IDENTITY, artifact.tensors, artifact.facts)
    with pytest.raises(ArtifactError, match="make it again") as caught:
        read_predictors(path, IDENTITY, config)
    assert str(path) in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_predictors_of_other_sizes_are_refused(config: ModelConfig, tmp_path: Path) -> None:
    write_predictors(tmp_path / "p", IDENTITY, mixed())
    for name, size in CONFIG_SIZES.items():
        with pytest.raises(ArtifactError, match="make it again"):
            read_predictors(tmp_path / "p", IDENTITY, replace(config, **{name: size + 1}))
