"""The file of predictors, and predictors arranged for the services' shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError
from hotcold.model.files.artifact import ModelIdentity, read_artifact, write_artifact
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
from tests.predictor_layers import chosen_by, scores_of
from tests.tiny_models import make_tiny

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
