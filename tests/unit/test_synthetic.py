"""Random-weight checkpoints: transformers reads them, and their neurons fire as asked."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hotcold.model.errors import HotcoldError, UsageError
from hotcold.model.synthetic.make import SyntheticReport, make_model
from hotcold.model.synthetic.shape import SHAPES, resolve_shape
from hotcold.numba_kernels.formats import QUANT_GROUP
from tests import reference_experts
from tests.e2e.commands import run_main
from tests.full_disk import files_of_at_most
from tests.patched_models import load_model
from tests.reference import reference_logits

MIXTURES = ("olmoe", "mixtral", "gpt_oss", "smallthinker", "turbosparsemixtral")
TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-silu": {"activation": "silu", "kv_heads": 1, "head_dim": 8},
    "qwen3": {"family": "qwen3", "kv_heads": 2, "head_dim": 20},
    "arcee": {"family": "arcee"},
    "bamboo": {"family": "bamboo"},
    "cohere": {"family": "cohere"},
    "cohere2": {"family": "cohere2", "kv_heads": 2, "head_dim": 20},
    "starcoder2": {"family": "starcoder2", "kv_heads": 2},
    "opt": {"family": "opt"},
    "falcon-7b": {"family": "falcon"},
    "falcon-40b": {"family": "falcon", "kv_heads": 2, "activation": "gelu"},
    "qwen3_moe": {"family": "qwen3_moe", "experts": 8, "chosen": 3},
    **{name: {"family": name, "experts": 8, "chosen": 2} for name in MIXTURES},
}
PATCHED = ("bamboo", "smallthinker", "turbosparsemixtral")
SMALL = {"hidden": 256, "ffn": 1024, "heads": 8, "layers": 6, "vocab": 1000}
DOWN_ENDINGS = (".mlp.down_proj", ".mlp.c_proj", ".fc2", ".mlp.dense_4h_to_h")
MIXTURE: dict[str, Any] = SMALL | {"ffn": 64, "kv_heads": 2, "layers": 2, "vocab": 16384}
MIXTURE |= {"context": 512, "experts": 32, "chosen": 4}
REQUESTS, TOKENS = 8, 80


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    if json.loads((path / "config.json").read_text())["model_type"] in PATCHED:
        return load_model(path, dtype)
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.mark.sweep(keep=8)
@pytest.mark.parametrize("name", TINY)
def test_transformers_reads_every_family(tmp_path: Path, name: str) -> None:
    shape = resolve_shape("tiny", TINY[name])
    report = make_model(tmp_path, shape, dtype="bfloat16")
    model = load(tmp_path, torch.bfloat16)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        logits = model(ids).logits.float()
    assert logits.isfinite().all()
    assert 0.5 < logits.std() < 20
    if name not in PATCHED[1:]:  # whose experts are no modules there
        assert model.num_parameters() == report.num_parameters


@pytest.mark.sweep(keep=3)
@pytest.mark.parametrize(
    "name", ["llama", "bamboo", "arcee", "cohere2", "starcoder2", "opt", "falcon-40b"]
)
def test_density_is_met_on_greedy_text(tmp_path: Path, name: str) -> None:
    changes = {} if name == "bamboo" else {"activation": "relu"}
    shape = resolve_shape("tiny", {**SMALL, **TINY[name], **changes, "density": 0.1})
    make_model(tmp_path, shape, dtype="float16", seed=3)
    model, found = load(tmp_path), list[float]()
    ids = torch.randint(1000, (8, 4), generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        text = model.generate(ids, max_new_tokens=60, do_sample=False)
    assert text.shape == (8, 64)
    assert all(len(set(row.tolist())) > 4 for row in text)  # not one token again and again
    for module in (each for n, each in model.named_modules() if n.endswith(DOWN_ENDINGS)):
        module.register_forward_pre_hook(
            lambda module, inputs: found.append(float((inputs[0] != 0).float().mean()))
        )
    with torch.inference_mode():
        assert model(text).logits.isfinite().all()
    assert found == pytest.approx([0.1] * 6, rel=0.15)


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_model(tmp_path / name, SHAPES["tiny"], seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_a_directory_in_use_is_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        make_model(tmp_path, SHAPES["tiny"])
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    make_model(tmp_path, SHAPES["tiny"], force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "notes.txt",
    ]


@pytest.mark.parametrize("last", [False, True])
def test_a_disk_that_fills_is_one_line_and_leaves_nothing(tmp_path: Path, last: bool) -> None:
    make_model(tmp_path / "whole", SHAPES["tiny"])
    size = (tmp_path / "whole" / "model.safetensors").stat().st_size
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    for out, left in ((tmp_path / "new", None), (tmp_path / "used", ["notes.txt"])):
        with (
            pytest.raises(HotcoldError, match=r"cannot be written \(File too large\)") as caught,
            files_of_at_most(size - 1 if last else 10),  # the last byte is written when it closes
        ):
            make_model(out, SHAPES["tiny"], force=True)
        assert str(out) in str(caught.value) and "\n" not in str(caught.value)
        assert (sorted(file.name for file in out.iterdir()) if out.exists() else None) == left


def test_a_run_that_ends_early_leaves_no_finished_file_either(tmp_path: Path) -> None:
    def stop(written: int, total: int) -> None:
        if written == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_model(tmp_path / "new", SHAPES["tiny"], on_bytes=stop)
    assert not (tmp_path / "new").exists()


def test_a_model_that_is_to_be_replaced_stays_where_the_new_one_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path, SHAPES["tiny"])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
        with pytest.raises(HotcoldError, match="kB free"):
            make_model(tmp_path, SHAPES["tiny"], seed=1, force=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 64 << 20}))
    make_model(tmp_path, SHAPES["tiny"], seed=1, force=True)  # in the place of the old one
    assert (tmp_path / "model.safetensors").read_bytes() != before["model.safetensors"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--shape llama-8b", "unknown shape 'llama-8b'; known are tiny"),
        ("--layers 0", "0 is not in the range x>=1"),
        ("--heads 6 --kv-heads 4", "num_key_value_heads is 4, which does not divide"),
        (
            "--family opt --hidden 60 --heads 7",
            "hidden_size is 60, not a multiple of num_attention_heads 7",
        ),
        ("--family opt --head-dim 8", "--head-dim is 8, but opt of this shape has 16"),
        ("--family opt --kv-heads 2", "--kv-heads is 2, but opt of this shape has 4"),
        ("--head-dim 7", "head_dim is 7; rotary positions need an even number"),
        ("--family mixtral", "num_local_experts is 0; give a whole number"),
        ("--experts 8", "--experts is 8, but llama of this shape has 0"),
        ("--shape tiny-moe --chosen 17", "num_experts_per_tok is 17"),
        ("--shape tiny-moe --skew 0.4", "0.4 is not in the range 0.5<=x<=1"),
        ("--shape tiny-moe --kept 1.1", "1.1 is not in the range 0<=x<=1"),
        ("--density 0.99", "--density must be between 0.002 and 0.95"),
        ("--family bamboo --density 0.6", "--density must be between 0.002 and 0.475"),
    ],
)
def test_impossible_shapes(tmp_path: Path, line: str, text: str) -> None:
    refusal = run_main("make-model", tmp_path / "new", *line.split()).refusal
    assert text in refusal and len(refusal.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def made(path: Path, **changes: Any) -> SyntheticReport:
    shape = resolve_shape("tiny-moe", MIXTURE | changes)
    return make_model(path, shape, dtype="float32", seed=4)


def written_text(model: Any) -> torch.Tensor:
    """What the model says, drawn at temperature 1 after a few random tokens."""
    torch.manual_seed(7)
    prompts = torch.randint(MIXTURE["vocab"], (REQUESTS, 4))
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
    made(tmp_path, family=family, density=density)
    fired = list[tuple[float, int]]()
    plain = reference_experts.activated

    def watched(name: str, x: torch.Tensor, threshold: float) -> torch.Tensor:
        fired.append((float((x > 0).sum()), x.numel()))
        return plain(name, x, threshold)

    monkeypatch.setattr(reference_experts, "activated", watched)
    ids = np.random.default_rng(3).integers(MIXTURE["vocab"], size=100)
    assert np.isfinite(reference_logits(tmp_path, ids)).all()
    positive, computed = np.sum(fired, axis=0)
    assert computed == 100 * 4 * 64 * 2
    assert positive / computed == pytest.approx(density, rel=0.2)


def test_predictors_of_turbosparse_leave_few_out(tmp_path: Path) -> None:
    """Beside a count by hand of what gate, up and predictor of its first layer say."""
    made(tmp_path, family="turbosparsemixtral", density=0.1, experts=8, chosen=2)
    model, inputs = load_model(tmp_path, torch.float32), list[torch.Tensor]()
    layer, tensors = model.model.layers[0], load_file(tmp_path / "model.safetensors")
    layer.post_attention_layernorm.register_forward_hook(lambda _m, _i, out: inputs.append(out[0]))
    with torch.inference_mode():
        model(torch.randint(MIXTURE["vocab"], (1, 100)))
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
