"""Random-weight checkpoints: transformers reads them, and their neurons fire as asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hotcold.model.errors import HotcoldError, UsageError
from hotcold.model.files.safetensors_writer import SafetensorsWriter, TensorSpec
from hotcold.model.synthetic.make import SyntheticReport, make_model
from hotcold.model.synthetic.shape import SHAPES, SyntheticShape, config_json, resolve_shape
from hotcold.numba_kernels.formats import WeightDtype
from tests.full_disk import files_of_at_most
from tests.patched_models import load_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-silu": {"activation": "silu", "kv_heads": 1, "head_dim": 8},
    "qwen3": {"family": "qwen3", "kv_heads": 2, "head_dim": 20},
    "arcee": {"family": "arcee"},
    "bamboo": {"family": "bamboo"},
    "opt": {"family": "opt"},
    "falcon-7b": {"family": "falcon"},
    "falcon-40b": {"family": "falcon", "kv_heads": 2, "activation": "gelu"},
    **{name: {"family": name, "experts": 8, "chosen": 3} for name in ("qwen3_moe", "olmoe")},
    **{name: {"family": name, "experts": 8, "chosen": 2} for name in ("mixtral", "gpt_oss")},
    **{
        name: {"family": name, "experts": 8, "chosen": 2}
        for name in ("smallthinker", "turbosparsemixtral")
    },
}
PATCHED = ("bamboo", "smallthinker", "turbosparsemixtral")
SMALL = {"hidden": 256, "ffn": 1024, "heads": 8, "layers": 3, "vocab": 1000}
# Arcee's first matrix is called up_proj, and Llama's second one too.
GATE_ENDINGS = (".mlp.gate_proj", ".fc1", ".mlp.dense_h_to_4h")
ARCEE_ENDINGS = (".mlp.up_proj",)


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    if json.loads((path / "config.json").read_text())["model_type"] in PATCHED:
        return load_model(path, dtype)
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def gate_endings(model: Any) -> tuple[str, ...]:
    """How the names of the first matrices end."""
    return ARCEE_ENDINGS if model.config.model_type == "arcee" else GATE_ENDINGS


def firing_rates(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return, per layer, how often each neuron's pre-activation is positive."""
    rates: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(
            lambda _module, _inputs, output: rates.append(
                (output.reshape(-1, output.shape[-1]) > 0).float().mean(dim=0)
            )
        )
        for name, module in model.named_modules()
        if name.endswith(gate_endings(model))
    ]
    with torch.inference_mode():
        model(ids)
    for hook in hooks:
        hook.remove()
    return rates


@pytest.fixture(scope="module", params=["llama", "arcee", "opt", "falcon-7b", "falcon-40b"])
def small_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, SyntheticReport]:
    shape = resolve_shape("tiny", {**SMALL, **TINY[request.param], "activation": "relu"})
    path = tmp_path_factory.mktemp("small") / request.param
    report = make_model(path, shape, density=0.1, dtype="float16", seed=3)
    return load(path), report


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_transformers_reads_every_family(tmp_path: Path, name: str, dtype: WeightDtype) -> None:
    shape = resolve_shape("tiny", TINY[name])
    report = make_model(tmp_path, shape, dtype=dtype)
    model = load(tmp_path, getattr(torch, dtype))
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        logits = model(ids).logits.float()
    assert logits.isfinite().all()
    assert 0.5 < logits.std() < 20
    if name not in PATCHED[1:]:  # whose experts are no modules there
        assert model.num_parameters() == report.num_parameters


def test_density_of_drelu_is_of_gate_and_up(tmp_path: Path) -> None:
    shape = resolve_shape("tiny", {**SMALL, **TINY["bamboo"]})
    report = make_model(tmp_path, shape, density=0.1, dtype="float16", seed=3)
    model, found = load(tmp_path), list[float]()
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(
            lambda module, inputs: found.append(float((inputs[0] != 0).float().mean()))
        )
    with torch.inference_mode():
        model(torch.randint(1000, (8, 48), generator=torch.Generator().manual_seed(5)))
    assert found == pytest.approx([0.1] * 3, rel=0.25)
    assert found == pytest.approx([layer.density for layer in report.layers], rel=0.2)


def test_density_is_met_on_greedy_text(small_model: tuple[Any, SyntheticReport]) -> None:
    model, _report = small_model
    ids = torch.randint(1000, (8, 4), generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        text = model.generate(ids, max_new_tokens=60, do_sample=False)
        assert model(text).logits.isfinite().all()
    assert text.shape == (8, 64)
    assert all(len(set(row.tolist())) > 4 for row in text)  # not one token again and again
    for rates in firing_rates(model, text):
        assert float(rates.mean()) == pytest.approx(0.1, rel=0.2)


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_model(tmp_path / name, SHAPES["tiny"], seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_writer_refuses_a_wrong_order_and_leaves_nothing(tmp_path: Path) -> None:
    specs = [TensorSpec("a", (2,)), TensorSpec("b", (2,))]
    with (
        pytest.raises(ValueError, match="expected"),
        SafetensorsWriter(tmp_path, specs, "float32") as writer,
    ):
        writer.write("b", torch.zeros(2))
    with (
        pytest.raises(ValueError, match="missing"),
        SafetensorsWriter(tmp_path, specs, "float32") as writer,
    ):
        writer.write("a", torch.zeros(2))
    assert not (tmp_path / "model.safetensors").exists()


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
    ("name", "changes", "text"),
    [
        ("llama-8b", {}, "unknown shape"),
        ("tiny", {"layers": 0}, "--layers must be at least 1"),
        ("tiny", {"heads": 6, "kv_heads": 4}, "cannot share"),
        ("tiny", {"family": "opt", "head_dim": 8}, "heads \\* head-dim"),
        ("tiny", {"family": "opt", "kv_heads": 2}, "grouped"),
        ("tiny", {"head_dim": 7}, "odd"),
        ("tiny", {"family": "mixtral"}, "mixtral has experts, but --experts is 0"),
        ("tiny-moe", {"chosen": 17}, "--chosen is 17, but there are 16 experts"),
        ("tiny-moe", {"skew": 0.4}, "--skew must be between 0.5 and 1"),
        ("tiny-moe", {"kept": 1.1}, "--kept must be between 0 and 1"),
    ],
)
def test_impossible_shapes(name: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        resolve_shape(name, changes)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_named_shapes_are_what_transformers_takes(shape: SyntheticShape) -> None:
    from transformers import AutoConfig

    config = config_json(shape, "float16")
    like = {"bamboo": "mistral", "smallthinker": "smollm3"}  # which their own code resembles
    like["turbosparsemixtral"] = "mixtral"
    known = like.get(shape.family, shape.family)
    loaded = AutoConfig.for_model(**(config | {"model_type": known}))
    assert loaded.hidden_size == shape.hidden
    assert loaded.num_hidden_layers == shape.layers
    if shape.family != "opt":
        assert loaded.head_dim == shape.head_dim
