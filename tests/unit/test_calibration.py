"""How a calibration spends what thresholds may cost, on a system whose cost a test makes up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.preflight import prepare_system, read_model
from hotcold.jobs.profile.calibration import Calibration, Windows
from hotcold.jobs.support.text_file import TextIds
from hotcold.model.config.model_config import ModelConfig
from hotcold.placement.solver.cost import RowBytes
from hotcold.predictors.magnitude_thresholds import Calibrated, LayerThresholds
from tests.unit.test_gguf_model import file_of, tiny

TARGET = 0.02


class MadeUpSystem:
    """FFN inputs at random, and a divergence that grows with the squares of all thresholds."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._random = np.random.default_rng(1)

    def call(self, name: str, ids: list[int], *given: Any) -> Any:
        if name == "profile_window":
            shape = self._config.num_layers, len(ids), self._config.hidden_size
            return self._random.standard_normal(shape).astype(np.float16).view(np.uint16)
        assert name == "try_thresholds"
        found: LayerThresholds = given[1]
        return [float((found.gate**2).sum() + (found.product**2).sum())]


def calibrated(path: Path, served: RowBytes) -> Calibrated:
    config = read_model(path)
    ids = np.random.default_rng(2).integers(0, config.vocab_size, 64).tolist()
    running: Any = MadeUpSystem(config)
    windows = Windows([ids], 0)
    run = Calibration(running, path, config, windows, lambda: None, served)
    return run.run(TARGET, TextIds(np.array(ids), "0" * 64, "a text"))[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    file_of(tiny(), path, {"ffn_": "Q8_0"})
    return path


def test_where_all_of_down_is_read_its_threshold_costs_nothing(model: Path) -> None:
    _, config = prepare_system(model, SystemOptions(context_length=64))
    served = RowBytes.of(config)
    assert served.reads_all_down
    found = calibrated(model, served)
    assert (found.thresholds.product == 0).all() and (found.thresholds.gate > 0).all()
    both = calibrated(model, replace(served, reads_all_down=False))
    assert (both.thresholds.product > 0).all()
    assert found.up_share.mean() < both.up_share.mean()
    for each in (found, both):
        assert 0.5 * TARGET < each.mean_kld <= TARGET
