"""A system of a GGUF file whose kinds of matrices are in different formats."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.preflight import prepare_system
from hotcold.actors.setup.shards import service_specs
from hotcold.actors.system import System
from hotcold.model.sampling import SamplingParams
from hotcold.numba_kernels.decode.activations import Thresholds
from tests.actors.batching import Background
from tests.actors.in_process import InProcessSystem
from tests.actors.test_threshold_mode import written
from tests.reference import reference_logits
from tests.unit.test_down_outputs import MIXED
from tests.unit.test_gguf_model import IDS as IDS_OF_LOGITS
from tests.unit.test_gguf_model import file_of, logits_of, tiny

IDS = np.array([3, 7, 1, 90, 55, 20, 3, 3, 64, 17])
MODEL_IDS = np.array(IDS_OF_LOGITS)  # of `logits_of`


@pytest.mark.parametrize(
    ("kinds", "num_services"),
    [
        (MIXED, 2),
        pytest.param({"blk.1.ffn_down": "Q6_K", "ffn_down": "Q4_0"}, 1, marks=pytest.mark.thorough),
    ],
)
def test_formats_by_layers(kinds: dict[str, str], num_services: int, tmp_path: Path) -> None:
    """Values and down projections in six bits in one layer, in four in the other."""
    path, model = tmp_path / "tiny.gguf", tiny()
    held = file_of(model, path, kinds)
    options = SystemOptions(context_length=128, num_cpu_actors=num_services)
    system, config = prepare_system(path, options)
    assert system.down_transposed and dict(config.mean_row_bytes)
    ids = np.random.default_rng(2).integers(0, 101, 48)
    wanted = logits_of(model, held)  # of transformers, for the module's own ids
    with InProcessSystem(path, num_threads=2, specs=service_specs(system, config)) as running:
        one_by_one = running.logits("dense", MODEL_IDS, (1,))
        for size in (4, 10):
            assert np.array_equal(one_by_one, running.logits("dense", MODEL_IDS, (size,)))
        by_kernels, by_products = (running.logits("dense", ids, (size,)) for size in (16, 48))
        # FFNs of float weights; for others there are compiled loops.
        in_python = set() if kinds is MIXED else {"cpu0", f"cpu{num_services - 1}"}
        assert set(running.python_answers) == in_python
    spread = float(np.abs(wanted).max())
    assert np.abs(one_by_one - wanted).max() < 0.03 * spread
    assert np.abs(by_kernels - by_products).max() < 0.03 * spread


def test_thresholds_beside_rows_of_outputs(tmp_path: Path) -> None:
    """Neurons that add little are left out, as the reference leaves them out."""
    path = tmp_path / "tiny.gguf"
    file_of(tiny(), path, MIXED)
    thresholds = [Thresholds(np.float32(20), np.float32(20000))] * 2
    told = [(float(each.gate), float(each.product)) for each in thresholds]
    file = written(path, 2, thresholds)
    options = SystemOptions(context_length=128, mode="threshold", thresholds=file)
    system, config = prepare_system(path, options)
    assert system.down_transposed and system.has_down_norms
    dense = reference_logits(path, MODEL_IDS)
    wanted = reference_logits(path, MODEL_IDS, thresholds=told)
    with InProcessSystem(path, num_threads=2, specs=service_specs(system, config)) as running:
        engine = running.engine("threshold", thresholds=thresholds)
        for at, token in enumerate(MODEL_IDS.tolist()):
            engine.step([token], [at], [0])
        times = engine.times
        assert 0.2 * times.num_gates < times.num_neurons < times.num_ups < 0.9 * times.num_gates
        found = running.logits("threshold", MODEL_IDS, (1,), thresholds=thresholds)
        for size in (3, 10):
            together = running.logits("threshold", MODEL_IDS, (size,), thresholds=thresholds)
            assert np.array_equal(found, together)
    # A number beside a threshold may fall to its other side: vectors have 8 bits here.
    left_out = np.abs(wanted - dense).max()
    assert left_out > 0.02 * np.abs(dense).max()
    assert np.abs(found - wanted).max() < 0.5 * left_out


@pytest.mark.thorough
def test_formats_by_layers_among_faults(local_ray: None, tmp_path: Path) -> None:
    """A killed service comes back with its stripes; with fewer the answers are the same."""
    path = tmp_path / "tiny.gguf"
    file_of(tiny(max_position_embeddings=1024), path, MIXED)
    system, _ = prepare_system(path, SystemOptions(context_length=512, num_cpu_actors=2))
    assert system.down_transposed
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompts = [np.random.default_rng(size).integers(0, 101, size).tolist() for size in (5, 20, 300)]
    requests = [GenerateRequest(sampling, prompt_ids=ids) for ids in prompts]
    with System.start(system) as running:
        alone = [running.complete(request).ids for request in requests]
        asked = [Background(partial(running.complete, request)) for request in requests]
        os.kill(running.call("processes")["cpu1"], signal.SIGKILL)
        assert [one.end().ids for one in asked] == alone
        assert running.call("scale", 1).num_cpu_actors == 1
        assert [running.complete(request).ids for request in requests] == alone
        asked = [Background(partial(running.complete, request)) for request in requests]
        os.kill(running.call("processes")["cpu0"], signal.SIGKILL)
        assert [one.end().ids for one in asked] == alone
