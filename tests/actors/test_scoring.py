"""Windows scored by the services, against transformers and against counts made neuron by neuron."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from hotcold.actors.driver.scoring import score_window
from hotcold.actors.protocol.failures import RequestError
from hotcold.jobs.commands.perplexity import summary
from hotcold.numba_kernels.loops.mailbox import HEAD, OPERATION
from tests.actors.batching import batching
from tests.actors.in_process import InProcessSystem, PythonExchange
from tests.actors.test_predicted_modes import for_services
from tests.predictor_layers import constant_layer
from tests.tiny_checkpoint import Tiny
from tests.tiny_models import VOCAB_SIZE

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel

pytestmark = pytest.mark.sweep

SIZE = 37
FIRST = SIZE // 2
WINDOWS = np.random.default_rng(5).integers(0, VOCAB_SIZE, (2, SIZE)).tolist()
NUM_SERVICES, NUM_THREADS = 2, 2


@pytest.fixture(params=["llama-silu", "opt-prenorm", "falcon-relu"])
def system(request: pytest.FixtureRequest, tiny: Tiny) -> Iterator[InProcessSystem]:
    path = tiny(request.param).path
    with InProcessSystem(path, NUM_SERVICES, NUM_THREADS) as running:
        yield running


def reference_model(path: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def log_probabilities(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """Of each scored position, (n, V) float64."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().numpy()
    return log_softmax(logits, axis=-1)[FIRST : SIZE - 1]


def reference_nll(log_p: np.ndarray, ids: list[int]) -> np.ndarray:
    return -log_p[np.arange(len(log_p)), ids[FIRST + 1 :]]


@pytest.mark.parametrize(("mode", "audit"), [("dense", False), ("exact", True)])
def test_perplexity_equals_transformers(system: InProcessSystem, mode: str, audit: bool) -> None:
    model = reference_model(system.path)
    nll = np.concatenate([reference_nll(log_probabilities(model, ids), ids) for ids in WINDOWS])
    engine = system.engine(mode)
    scores = [score_window(engine, ids, FIRST, audit) for ids in WINDOWS]
    assert system.python_answers == []  # all through kernels
    np.testing.assert_allclose(np.concatenate([s.nll for s in scores]), nll, rtol=1e-4, atol=1e-4)
    report = summary(scores, system.config.num_neurons, mode)
    mean, mean_of_squares, count = np.mean(nll), np.mean(nll**2), nll.size
    ppl = math.exp(mean)
    assert count == 2 * (SIZE - 1 - FIRST) == report["tokens"]
    assert report["ppl"] == pytest.approx(ppl, rel=1e-4)
    stderr = ppl * math.sqrt((mean_of_squares - mean**2) / (count - 1))
    assert report["ppl_stderr"] == pytest.approx(stderr, rel=1e-4)
    if mode == "dense":
        assert report["mean_kld"] is None and report["same_top_p"] is None
        assert report["neurons_computed"] == 1
        return
    assert report["ppl_dense"] == pytest.approx(ppl, rel=1e-4)
    assert 0 <= report["kld_max"] + 1e-12 < 1e-9
    assert report["same_top_p"] == 1 and report["same_top_p_stderr"] == 0
    assert report["recall"] is None and report["precision"] is None
    assert (report["neurons_computed"] is None) != audit


def test_recall_and_precision_equal_a_count_neuron_by_neuron(tiny: Tiny) -> None:
    """Of transformers' neurons those are silenced that no predictor chooses; layer 1 has none."""
    path = tiny("llama-relu").path
    with InProcessSystem(path, NUM_SERVICES, NUM_THREADS) as llama:
        config, order = llama.config, np.concatenate(llama.shards())
        neurons, width = np.arange(config.ffn_size), config.hidden_size
        chosen = np.stack([neurons % 3 == 0, neurons >= 0, neurons % 2 == 0])
        layers = [None if mask.all() else constant_layer(mask[order], width) for mask in chosen]
        engine = llama.engine("sign", for_services(llama, layers))
        scores = [score_window(engine, ids, FIRST, audit=True) for ids in WINDOWS]
    model, fired = reference_model(path), np.zeros_like(chosen, int)

    def silence(layer: int, h: torch.Tensor) -> torch.Tensor:
        fired[layer] += (h[0, : SIZE - 1] != 0).sum(0).numpy()
        return h * torch.from_numpy(chosen[layer])

    for i, layer in enumerate(model.model.layers):
        layer.mlp.act_fn.register_forward_hook(lambda _, inputs, h, i=i: silence(i, h))
    for ids in WINDOWS:
        log_probabilities(model, ids)
    report = summary(scores, config.num_neurons, "sign")
    both, num_tokens = (fired * chosen).sum(axis=1), len(WINDOWS) * (SIZE - 1)
    assert report["recall"] == (both / fired.sum(axis=1)).tolist()
    assert report["precision"] == (both / (num_tokens * chosen.sum(axis=1))).tolist()
    assert report["recall"][1] == 1
    assert 0.1 < report["recall"][0] < 0.9 and 0.1 < report["recall"][2] < 0.9
    assert report["neurons_computed"] == pytest.approx(chosen.mean(), rel=1e-12)


class SpoilingExchange(PythonExchange):
    """One logit of each head is NaN."""

    def request(self, services: Sequence[int]) -> int:
        waited = super().request(services)
        if list(services) == [0] and self.buffers.requests[0, OPERATION] == HEAD:
            self.buffers.logits[0, 3] = np.nan
        return waited


def test_the_driver_scores_between_requests(tiny: Tiny) -> None:
    with batching(tiny("llama-relu"), context=SIZE) as (system, driver):
        expected = score_window(system.engine("exact"), WINDOWS[0], FIRST, True)
        found = driver.score_window(WINDOWS[0], FIRST, True)
        np.testing.assert_array_equal(found.nll, expected.nll)
        with pytest.raises(RequestError, match="does not fit"):
            driver.score_window([1] * (SIZE + 1), FIRST, True)
        with pytest.raises(RequestError, match="none to score"):
            driver.score_window(WINDOWS[0], SIZE - 1, True)
        engine, whole = driver.engine, driver.engine.exchange
        engine.exchange = SpoilingExchange(whole)
        with pytest.raises(RequestError, match="not finite in its logits"):
            driver.score_window(WINDOWS[0], FIRST, False)
        engine.exchange = whole
        again = driver.score_window(WINDOWS[0], FIRST, True)
        np.testing.assert_array_equal(again.nll, expected.nll)
