"""Random mixtures: how experts repeat in text that the model writes, and what fires in them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hotcold.model.synthetic.make import SyntheticReport, make_model
from hotcold.model.synthetic.shape import resolve_shape
from hotcold.numba_kernels.formats import QUANT_GROUP
from tests import reference_experts
from tests.patched_models import load_model
from tests.reference import reference_logits

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SMALL: dict[str, Any] = {"hidden": 256, "ffn": 64, "heads": 8, "kv_heads": 2, "head_dim": 32}
SIZES: dict[str, Any] = {**SMALL, "layers": 2, "vocab": 16384, "context": 512}
REQUESTS, TOKENS = 6, 160


def made(path: Path, **changes: Any) -> SyntheticReport:
    shape = resolve_shape("tiny-moe", SIZES | {"experts": 32, "chosen": 4} | changes)
    return make_model(path, shape, dtype="float32", seed=4)


def written_text(model: Any) -> torch.Tensor:
    """What the model says, drawn at temperature 1 after a few random tokens."""
    torch.manual_seed(7)
    prompts = torch.randint(SIZES["vocab"], (REQUESTS, 4))
    with torch.inference_mode():
        text = model.generate(
            prompts, max_new_tokens=TOKENS, do_sample=True, temperature=1.0, top_k=0
        )
    return text[:, 4:]


def routes(path: Path, model: Any, text: torch.Tensor, chosen: int) -> list[torch.Tensor]:
    """Each layer's chosen experts (requests, tokens, k), from inputs that transformers computes."""
    is_early = (path / "config.json").read_text().count("moe_enable_early_router") > 0
    router = "block_sparse_moe.primary_router" if is_early else "mlp.gate"
    tensors = load_file(path / "model.safetensors")
    found = list[torch.Tensor]()
    for number, layer in enumerate(model.model.layers):
        module = layer if is_early else layer.mlp
        rows = tensors[f"model.layers.{number}.{router}.weight"]

        def choose(_module: Any, inputs: tuple[Any, ...], rows: torch.Tensor = rows) -> None:
            found.append((inputs[0] @ rows.T).topk(chosen, dim=-1).indices)

        module.register_forward_pre_hook(choose)
    with torch.inference_mode():
        model(text)
    return found


def kept_and_skew(chosen: torch.Tensor, experts: int) -> tuple[float, float]:
    """Of one layer, by counting sets."""
    kept, counts = list[float](), np.zeros(experts)
    for request in chosen.tolist():
        for before, now in pairwise(request):
            kept.append(len(set(before) & set(now)) / len(now))
            counts[now] += 1
    busier = np.sort(counts)[experts // 2 :]
    return float(np.mean(kept)), float(busier.sum() / counts.sum())


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {"kept": 0.7, "skew": 0.85}),
        ("smallthinker", {}),
    ],
)
def test_experts_repeat_as_asked_in_text_of_the_model(
    tmp_path: Path, family: str, changes: dict[str, float]
) -> None:
    report = made(tmp_path, family=family, **changes)
    asked = {"kept": 0.45, "skew": 0.77} | changes
    assert report.routing is not None
    assert report.routing.kept == pytest.approx(asked["kept"], abs=0.02)
    assert report.routing.skew == pytest.approx(asked["skew"], abs=0.02)
    model = load_model(tmp_path, torch.float32)
    text = written_text(model)
    assert all(len(set(row.tolist())) > TOKENS / 2 for row in text)
    for chosen in routes(tmp_path, model, text, 4):
        kept, skew = kept_and_skew(chosen, 32)
        assert kept == pytest.approx(asked["kept"], abs=0.08)
        assert skew == pytest.approx(asked["skew"], abs=0.07)


@pytest.mark.parametrize(("family", "density"), [("smallthinker", 0.4), ("gpt_oss", 0.3)])
def test_density_inside_chosen_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, density: float
) -> None:
    """By the float64 reference, which computes a token's chosen experts alone."""
    report = made(tmp_path, family=family, density=density)
    fired = list[tuple[float, int]]()
    plain = reference_experts.activated

    def watched(name: str, x: torch.Tensor, threshold: float) -> torch.Tensor:
        fired.append((float((x > 0).sum()), x.numel()))
        return plain(name, x, threshold)

    monkeypatch.setattr(reference_experts, "activated", watched)
    ids = np.random.default_rng(3).integers(SIZES["vocab"], size=100)
    assert np.isfinite(reference_logits(tmp_path, ids)).all()
    positive, computed = np.sum(fired, axis=0)
    assert computed == 100 * 4 * 64 * 2
    assert positive / computed == pytest.approx(density, rel=0.2)
    assert report.density == pytest.approx(density, rel=0.2)


def test_predictors_of_turbosparse_leave_few_out(tmp_path: Path) -> None:
    """Beside a count by hand of what gate, up and predictor of its first layer say."""
    report = made(tmp_path, family="turbosparsemixtral", density=0.1, experts=8, chosen=2)
    assert report.density == pytest.approx(0.1, rel=0.25)
    model, inputs = load_model(tmp_path, torch.float32), list[torch.Tensor]()
    layer, tensors = model.model.layers[0], load_file(tmp_path / "model.safetensors")
    layer.post_attention_layernorm.register_forward_hook(lambda _m, _i, out: inputs.append(out[0]))
    with torch.inference_mode():
        model(torch.randint(SIZES["vocab"], (1, 100)))
    block = "model.layers.0.block_sparse_moe."
    chosen = (inputs[0] @ tensors[f"{block}gate.weight"].T).topk(2, dim=-1).indices
    fired, counted, right = 0, 0, 0
    for expert in range(8):
        x = inputs[0][(chosen == expert).any(1)]
        names = ("w1", "w3", "predictor.fc1", "predictor.fc2")
        w1, w3, fc1, fc2 = (tensors[f"{block}experts.{expert}.{n}.weight"] for n in names)
        fires = (x @ w1.T > 0) & (x @ w3.T > 0)
        counts = (x @ fc1.T).relu() @ fc2.T > 0
        fired, counted = fired + int(fires.sum()), counted + int(counts.sum())
        right += int((fires & counts).sum())
    assert right > 0.9 * fired
    assert counted < 0.45 * 100 * 2 * 64
    assert right / (100 * 2 * 64) == pytest.approx(0.1, rel=0.3)
    rank, hidden = fc1.shape
    assert rank == hidden // 4
    assert rank % QUANT_GROUP == 0, "--dtype q4 takes whole groups"
