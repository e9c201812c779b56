"""Predictors that were fitted, through a driver; and `--mode auto`, which may take another mode."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver.driver import Driver
from hotcold.actors.driver.modes import ModeTrial, compare_modes, saved_trial
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.setup.modes import trial_key
from hotcold.model.config.build import read_config
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.predictors.fitting.fit_lowrank import fit_lowrank
from hotcold.predictors.fitting.fit_sign import fit_sign
from hotcold.predictors.fitting.layer_data import LayerData
from hotcold.predictors.predictor_file import Predictors, Quality, write_predictors
from hotcold.predictors.stacked import AnyLayer
from tests.actors.batching import complete, greedy
from tests.actors.in_process import InProcessSystem
from tests.actors.test_predicted_modes import ffn_inputs
from tests.tiny_checkpoint import GREEDY_TOKENS, Tiny, TinyCheckpoint
from tests.tiny_models import VOCAB_SIZE


@pytest.fixture(scope="module")
def fitted(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of predictors of llama-relu, fitted to what goes into its FFNs on random tokens."""
    path, folder = tiny("llama-relu").path, tmp_path_factory.mktemp("predictors")
    config, identity = read_config(path), ModelIdentity.of(path)
    checkpoint = TinyCheckpoint(path)
    parts: list[list[np.ndarray]] = []
    for seed in range(8):
        checkpoint.__dict__["ids"] = np.random.default_rng(seed).integers(0, VOCAB_SIZE, 120)
        parts.append(ffn_inputs(checkpoint, "ffn_input"))
    inputs = [np.concatenate(layer).astype(np.float16) for layer in zip(*parts, strict=True)]
    files = {}
    fits: dict[str, Callable[[LayerData, float], tuple[AnyLayer, Quality]]] = {
        "sign": fit_sign, "lowrank": fit_lowrank,
    }  # fmt: skip
    for kind, fit in fits.items():
        layers = [
            fit(LayerData.load(Checkpoint(path), config, i, x.view(np.uint16)), 0.97)[0]
            for i, x in enumerate(inputs)
        ]
        files[kind] = folder / kind
        write_predictors(files[kind], identity, Predictors(layers, "ffn_input"))
    return files


@pytest.mark.parametrize("kind", ["sign", "lowrank"])
def test_fitted_predictors_through_the_driver(
    tiny: Tiny, fitted: dict[str, Path], kind: str
) -> None:
    """A recall of 0.97 keeps near the dense model, with fewer neurons' gates than all."""
    checkpoint = tiny("llama-relu")
    with InProcessSystem(checkpoint.path, 2, 2) as system:
        settings = SystemConfig(
            str(checkpoint.path), kind, context_length=120, kv_dtype="float32",
            predictors_path=str(fitted[kind]),
        )  # fmt: skip
        driver = Driver(settings, system.exchange, system.topology)
        scores = driver.score_window(checkpoint.ids.tolist(), 8, True)
        counts = scores.counts
        assert scores.predicts and counts is not None and scores.kld is not None
        recall = counts.num_fired_listed.sum() / counts.num_fired.sum()
        precision = counts.num_fired_listed.sum() / counts.num_listed.sum()
        everyone = counts.num_tokens * system.config.num_neurons
        assert recall > 0.93
        assert precision > counts.num_fired.sum() / everyone + 0.05
        assert counts.num_listed.sum() < 0.95 * everyone
        assert scores.kld.mean() < 0.05
        result = complete(driver, greedy(checkpoint.ids[:10]))
        assert len(result.ids) == GREEDY_TOKENS
        assert 0 < result.neurons_computed < result.gates_computed < 0.95
        driver.close()


def test_the_faster_mode_is_taken(
    tiny: Tiny, fitted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny("llama-relu")
    monkeypatch.setattr("hotcold.actors.driver.modes._SECONDS", 0.0)
    monkeypatch.setattr(
        "hotcold.actors.driver.driver.saved_trial", lambda modes, key, found: found()
    )
    request = greedy(checkpoint.ids[:10], 6)
    with InProcessSystem(checkpoint.path) as system:
        settings = SystemConfig(
            str(checkpoint.path), "sign", context_length=120, kv_dtype="float32",
            predictors_path=str(fitted["sign"]), auto_mode=True,
        )  # fmt: skip
        plain = Driver(replace(settings, mode="exact"), system.exchange, system.topology)
        expected = complete(plain, request)
        plain.close()
        for faster in ("sign", "exact"):
            speeds = {"sign": 2.0, "exact": 1.0 if faster == "sign" else 3.0}

            def trial(*given: Any, speeds: dict[str, float] = speeds) -> ModeTrial:
                found = compare_modes(*given)
                assert list(found.tokens_per_s) == ["sign", "exact"]
                assert min(found.tokens_per_s.values()) > 0
                assert found.fastest in found.line
                return ModeTrial(speeds)

            monkeypatch.setattr("hotcold.actors.driver.driver.compare_modes", trial)
            driver = Driver(settings, system.exchange, system.topology)
            assert driver.choose_mode().fastest == faster
            found = complete(driver, request)
            assert driver.telemetry().mode == faster
            assert (found.gates_computed < 1) == (faster == "sign")
            if faster == "exact":
                assert found.ids == expected.ids
            driver.close()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where trials are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hotcold" / "modes"


MODES = ("sign", "exact")


def found_now(sign: float, exact: float) -> Callable[[], ModeTrial]:
    return lambda: ModeTrial({"sign": sign, "exact": exact})


def test_later_starts_take_what_the_first_found(own_cache: Path) -> None:
    """Unless it is damaged."""
    first = saved_trial(MODES, {"model": "a"}, found_now(5.0, 4.0))
    again = saved_trial(MODES, {"model": "a"}, found_now(4.0, 5.0))
    other = saved_trial(MODES, {"model": "b"}, found_now(4.0, 5.0))
    assert [trial.fastest for trial in (first, again, other)] == ["sign", "sign", "exact"]
    path = Path(first.path)
    assert again.path == first.path and path.parent == own_cache
    assert f"now and at later starts; remove {path} to" in first.line
    assert f"as an earlier start found; remove {path} to" in again.line
    for damage in ("", "[1.0, 2.0]", "{}", '{"sign": 1.0, "exact": "2"}', "3"):
        path.write_text(damage)
        assert saved_trial(MODES, {"model": "a"}, found_now(4.0, 5.0)).fastest == "exact"


def test_nothing_is_kept_where_others_may_write(
    own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_cache.mkdir(parents=True)
    own_cache.chmod(0o777)
    for speeds, faster in (((5.0, 4.0), "sign"), ((4.0, 5.0), "exact")):
        found = saved_trial(MODES, {}, found_now(*speeds))
        assert found.fastest == faster and not found.path
        assert found.line.endswith("the faster")


def test_what_a_trial_is_kept_for(tiny: Tiny, fitted: dict[str, Path], tmp_path: Path) -> None:
    """Another model, other options or predictors are another trial; another place is not."""
    path = tmp_path / "sign"
    path.write_bytes(fitted["sign"].read_bytes())
    system = SystemConfig(str(tiny("llama-relu").path), "sign", predictors_path=str(path))
    key = trial_key(system)
    assert json.loads(json.dumps(key)) == json.loads(json.dumps(trial_key(replace(system))))
    moved = path.rename(tmp_path / "moved")
    assert trial_key(replace(system, predictors_path=str(moved), home="a node")) == key
    os.utime(moved, (0, 0))
    assert trial_key(replace(system, predictors_path=str(moved))) == key
    content = moved.read_bytes()
    moved.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(moved, (0, 0))
    others = [
        replace(system, predictors_path=str(moved)),
        replace(system, model_path=str(tiny("llama-gqa").path), predictors_path=""),
        replace(system, predictors_path="", num_threads=2),
        replace(system, predictors_path="", weight_dtype="q8"),
    ]
    keys = [key, *map(trial_key, others)]
    assert len({json.dumps(each) for each in keys}) == len(keys)
