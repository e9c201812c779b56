"""Windows scored by the services, against transformers and against counts made neuron by neuron."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from hotcold.actors.driver.driver import Driver
from hotcold.actors.driver.engine import Engine
from hotcold.actors.driver.modes import step_mode
from hotcold.actors.driver.scoring import score_window
from hotcold.actors.protocol.failures import RequestError
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.jobs.commands.perplexity import summary
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.embedding import load_embedding
from hotcold.numba_kernels.loops.mailbox import HEAD, OPERATION
from hotcold.predictors.predictor import NeuronPredictor
from hotcold.predictors.stacked import AnyLayer
from tests.actors.in_process import InProcessSystem, PythonExchange
from tests.conftest import TinyCheckpoint
from tests.predictor_layers import column_layer
from tests.tiny_models import VOCAB_SIZE

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel

pytestmark = pytest.mark.sweep

Tiny = Callable[..., TinyCheckpoint]
SIZE = 37
FIRST = SIZE // 2
WINDOWS = np.random.default_rng(5).integers(0, VOCAB_SIZE, (2, SIZE)).tolist()
NUM_SERVICES, NUM_THREADS = 2, 2


@pytest.fixture(params=["llama-silu", "opt-prenorm", "falcon-relu"])
def system(request: pytest.FixtureRequest, tiny: Tiny) -> Iterator[InProcessSystem]:
    path = tiny(request.param).path
    with InProcessSystem(path, NUM_SERVICES, NUM_THREADS) as running:
        yield running


@pytest.fixture
def llama(tiny: Tiny) -> Iterator[InProcessSystem]:
    with InProcessSystem(tiny("llama-relu").path, NUM_SERVICES, NUM_THREADS) as running:
        yield running


def reference_model(system: InProcessSystem) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(system.path, dtype=torch.float32).eval()


def log_probabilities(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """Of each scored position, (n, V) float64."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().numpy()
    return log_softmax(logits, axis=-1)[FIRST : SIZE - 1]


def reference_nll(log_p: np.ndarray, ids: list[int]) -> np.ndarray:
    return -log_p[np.arange(len(log_p)), ids[FIRST + 1 :]]


@pytest.mark.parametrize(("mode", "audit"), [("dense", False), ("exact", True)])
def test_perplexity_equals_transformers(system: InProcessSystem, mode: str, audit: bool) -> None:
    model = reference_model(system)
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


FFN_SIZE, ALL_LAYER = 88, 1  # of llama-relu; layer 1 has no predictor


def chosen_neurons(layer: int, x: np.ndarray) -> np.ndarray | None:
    """A neuron is, where a number of the input, another one a layer, is not small."""
    if layer == ALL_LAYER:
        return None
    return x[:, columns_of(np.arange(FFN_SIZE), layer, x.shape[1])] + np.float32(0.4 * layer) > 0


def columns_of(neuron_ids: np.ndarray, layer: int, width: int) -> np.ndarray:
    columns: np.ndarray = (neuron_ids * 7 + layer) % width
    return columns


def masked_model(
    system: InProcessSystem, choose: Callable[[int, np.ndarray], np.ndarray | None]
) -> tuple[PreTrainedModel, list[np.ndarray], list[np.ndarray]]:
    """transformers' model, its neurons silenced except for the chosen; who fired and was chosen."""
    model = reference_model(system)
    layers = model.model.layers
    empty = np.empty((0, FFN_SIZE), bool)
    fired, chosen, inputs = [empty] * len(layers), [empty] * len(layers), [empty] * len(layers)

    def remember(layer: int, _: torch.nn.Module, arguments: tuple[torch.Tensor]) -> None:
        inputs[layer] = arguments[0][0].numpy()

    def silence(layer: int, h: torch.Tensor) -> torch.Tensor:
        fired[layer] = (h[0] != 0).numpy()
        wanted = choose(layer, inputs[layer])
        chosen[layer] = np.ones_like(fired[layer]) if wanted is None else wanted
        return h * torch.from_numpy(chosen[layer])

    for i, layer in enumerate(layers):
        layer.mlp.register_forward_pre_hook(partial(remember, i))
        layer.mlp.act_fn = HookedRelu(partial(silence, i))
    return model, fired, chosen


class HookedRelu(torch.nn.Module):
    """relu, then a function of its result."""

    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._then = then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._then(torch.relu(x))


def predicting_engine(system: InProcessSystem) -> Engine:
    config = system.config
    shards = system.shards()
    order = np.concatenate(shards)
    layers: list[AnyLayer | None] = [
        None
        if layer == ALL_LAYER
        else column_layer(
            columns_of(order, layer, config.hidden_size), config.hidden_size, 0.4 * layer
        )
        for layer in range(config.num_layers)
    ]
    sizes = np.array([[len(ids) for ids in shards]] * config.num_layers)
    embedding = load_embedding(Checkpoint(system.path), config)
    predictor = NeuronPredictor(layers, sizes, "ffn_input")
    mode = step_mode(config, "sign", predictor)
    return Engine(config, embedding, system.exchange, system.topology, mode)


def test_recall_and_precision_equal_a_count_neuron_by_neuron(llama: InProcessSystem) -> None:
    engine = predicting_engine(llama)
    scores = [score_window(engine, ids, FIRST, audit=True) for ids in WINDOWS]
    sums = np.zeros((3, llama.config.num_layers), np.int64)  # listed, fired and listed, fired
    for ids in WINDOWS:
        model, fired, chosen = masked_model(llama, chosen_neurons)
        log_probabilities(model, ids)
        for layer, (f, c) in enumerate(zip(fired, chosen, strict=True)):
            f, c = f[: SIZE - 1], c[: SIZE - 1]
            sums[:, layer] += (c.sum(), (f & c).sum(), f.sum())
    report = summary(scores, llama.config.num_neurons, "sign")
    listed, both, fired_sums = sums
    assert report["recall"] == (both / fired_sums).tolist()
    assert report["precision"] == (both / listed).tolist()
    assert report["recall"][ALL_LAYER] == 1
    assert 0.1 < report["recall"][0] < 0.9 and 0.1 < report["recall"][2] < 0.9
    num_all = 2 * (SIZE - 1) * listed.size * FFN_SIZE
    assert report["neurons_computed"] == pytest.approx(listed.sum() / num_all, rel=1e-12)


class SpoilingExchange(PythonExchange):
    """One logit of each head is NaN."""

    def request(self, services: Sequence[int]) -> int:
        waited = super().request(services)
        if list(services) == [0] and self.buffers.requests[0, OPERATION] == HEAD:
            self.buffers.logits[0, 3] = np.nan
        return waited


def test_the_driver_scores_between_requests(llama: InProcessSystem) -> None:
    config = SystemConfig(str(llama.path), "exact", context_length=SIZE, kv_dtype="float32")
    driver = Driver(config, llama.exchange, llama.topology)
    expected = score_window(llama.engine("exact"), WINDOWS[0], FIRST, True)
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
    driver.close()
