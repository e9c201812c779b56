"""The small mixture: what is trained is what is written; its routes are measured rightly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from examples.train_demo.sparsity import RateControl, gate_functions
from examples.train_mixture import routes as routed
from examples.train_mixture.measure import recall_ahead, routes_of, watch
from examples.train_mixture.model import (
    MixtureForCausalLM,
    balance_loss,
    load_mixture,
    mixture_config,
    save_mixture,
)
from hotcold.model.config.build import read_config
from tests import reference_experts
from tests.reference import reference_logits

pytestmark = pytest.mark.usefixtures("one_torch_thread")
VOCAB, IDS = 200, np.arange(3, 43) * 7 % 200


@pytest.fixture
def model() -> MixtureForCausalLM:
    torch.manual_seed(2)
    config = mixture_config(VOCAB, 1, 2, 0)
    config.update({"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 24})
    config.update({"head_dim": 16, "num_attention_heads": 4, "num_experts": 8, "num_chosen": 3})
    made = MixtureForCausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
            parameter.copy_(parameter.half())
    return made.eval()


def test_what_is_written_is_a_smallthinker(model: MixtureForCausalLM, tmp_path: Path) -> None:
    save_mixture(model, tmp_path)
    config = read_config(tmp_path)
    assert (config.family, config.num_layers, config.tied_embeddings) == ("smallthinker", 2, True)
    with torch.inference_mode():
        expected = model(torch.from_numpy(IDS)[None], use_cache=False).logits[0].numpy()
        again = load_mixture(tmp_path)(torch.from_numpy(IDS)[None], use_cache=False).logits[0]
    np.testing.assert_array_equal(again.numpy(), expected)
    found = reference_logits(tmp_path, IDS)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_routes_are_those_of_the_reference(
    model: MixtureForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what fires in chosen experts is counted as the reference computes it."""
    save_mixture(model, tmp_path)
    chosen, fired = list[np.ndarray](), list[int]()
    weights_of, activated = reference_experts.expert_weights, reference_experts.activated

    def weights(*arguments: torch.Tensor) -> torch.Tensor:
        found = weights_of(*arguments)
        chosen.append(found.numpy() != 0)
        return found

    def active(name: str, x: torch.Tensor, limit: float) -> torch.Tensor:
        fired.append(int((x > 0).sum()))
        return activated(name, x, limit)

    monkeypatch.setattr(reference_experts, "expert_weights", weights)
    monkeypatch.setattr(reference_experts, "activated", active)
    reference_logits(tmp_path, IDS)
    watched = watch(model)
    with torch.inference_mode():
        model(torch.from_numpy(IDS)[None], use_cache=False)
        ahead = recall_ahead(model, watched.layer_inputs)
    routes = routes_of(model)
    for layer in range(2):
        listed = np.zeros((len(IDS), 8), bool)
        np.put_along_axis(listed, routes[:, layer].astype(int), True, axis=1)
        np.testing.assert_array_equal(listed, chosen[layer])
    assert int(watched.fired.sum()) == sum(fired)
    assert int(watched.chosen_times.sum()) == 2 * 3 * len(IDS)
    assert ahead.shape == (1,) and 0 <= ahead[0] <= 1


def test_the_penalty_is_of_the_experts_that_were_asked(model: MixtureForCausalLM) -> None:
    control = RateControl.watching(model, 0.3, 0.5)
    assert control.rates.shape == (2 * 8, 24) and len(gate_functions(model)) == 16
    control.prices += 1.0
    model(torch.tensor([[5]]), use_cache=False)
    chosen = {layer * 8 + e for layer in range(2) for e in routes_of(model)[0, layer].tolist()}
    control.penalty().backward()
    got = {
        layer * 8 + e
        for layer, module in enumerate(model.model.layers)
        for e, expert in enumerate(module.mlp.experts)
        if expert.gate.weight.grad is not None and expert.gate.weight.grad.any()
    }
    assert got == chosen and len(chosen) == 6
    control.update(1.0)
    changed = (control.rates != 0.5).any(1).nonzero()[:, 0].tolist()
    assert set(changed) == chosen


def test_balance_is_least_where_experts_are_used_alike(model: MixtureForCausalLM) -> None:
    block = model.model.layers[0].mlp
    block.chosen, block.logits = torch.arange(48).view(16, 3) % 8, torch.ones(16, 8)
    assert float(block.balance()) == pytest.approx(1)
    block.chosen = torch.tensor([[0, 1, 2]] * 16)
    block.logits = torch.tensor([[50.0] * 3 + [0.0] * 5] * 16)
    assert float(block.balance()) == pytest.approx(8 / 3)
    model(torch.from_numpy(IDS)[None], use_cache=False)
    balance_loss(model, 0.01).backward()
    assert block.primary_router.weight.grad.any()


def test_measures_of_routes_by_hand() -> None:
    routes = np.array([[[0, 1]], [[1, 2]], [[3, 0]], [[0, 3]]], np.int16)
    np.testing.assert_allclose(routed.kept(routes), [(1 + 0 + 2) / 6])
    np.testing.assert_allclose(routed.kept(routes, 2), [(1 + 2) / 4])
    counted = routed.counts(routes, 4)
    np.testing.assert_array_equal(counted, [[3, 2, 1, 2]])
    np.testing.assert_allclose(routed.busier_half(counted), [5 / 8])
    assert routed.lru_hits(routes, 4, 0.5) == 3 / 8  # 1 at the second token, both at the last
    assert routed.lru_hits(routes, 4, 1.0) == 4 / 8  # 0 at the third one, too
    assert routed.fixed_hits(routes, routes, 4, 0.5) == 5 / 8
