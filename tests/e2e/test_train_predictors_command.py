"""`hotcold train-predictors` and the modes that use what it writes, as a user runs them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.setup.preflight import SystemOptions, prepare_system
from hotcold.jobs.cli import main
from hotcold.model.config.build import read_config
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.artifact_places import artifact_path
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.predictors.fitting.inputs import LayerInputs, write_inputs
from hotcold.predictors.fitting.read_prices import ReadPrices
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.predictor_file import predictors_path, read_predictors
from hotcold.predictors.sign import SignLayer
from tests.conftest import TinyCheckpoint
from tests.e2e.commands import run_here, run_main
from tests.e2e.word_model import add_tokenizer
from tests.tiny_models import make_tiny
from tests.unit.test_powerinfer_import import write_folder

HELD_OUT = DEMO_DIRECTORY / "heldout.txt"
MEASURE = "hotcold.predictors.fitting.read_prices.measure_prices"
KINDS = {"sign": (SignLayer,), "lowrank": (LowRankLayer,), "best": (SignLayer, LowRankLayer)}


@pytest.fixture(scope="module")
def demo(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the embedded model, profiled on a part of its text."""
    path = tmp_path_factory.mktemp("models") / "demo"
    shutil.copytree(DEMO_DIRECTORY, path, ignore=shutil.ignore_patterns("hotcold", "__pycache__"))
    arguments = ["profile", path, "--text", HELD_OUT, "--max-tokens", "1500", "--window", "128"]
    assert main([*map(str, arguments), "--inputs", "1200"]) == 0
    return path


@pytest.fixture(scope="module")
def trained(demo: Path) -> dict[str, dict[str, Any]]:
    """What is said of predictors of each kind, beside the model; costs are bytes here.

    And no layer is left without a predictor.
    """
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MEASURE, lambda *_: ReadPrices(gates=100.0))
        for kind in KINDS:
            line = ["train-predictors", demo, "--kind", kind, "--recall", "0.95", "--json"]
            found[kind] = run_main(*line).report
    return found


def test_what_is_said_is_what_is_written(demo: Path, trained: dict[str, dict[str, Any]]) -> None:
    """And `best` takes the cheaper one for each layer."""
    config, costs = read_config(demo), {}
    for kind, found in trained.items():
        assert found["seconds"] > 0 and found["target_recall"] == 0.95
        written = read_predictors(Path(found["path"]), ModelIdentity.of(demo), config)
        assert written.target_recall == 0.95 and written.input_name == "ffn_input"
        assert written.qualities is not None and len(written.text_digest) == 64
        names = ("recall", "precision", "computed", "active")
        for name in names:
            assert found[name] == [getattr(quality, name) for quality in written.qualities]
        layers = [layer for layer in written.layers if layer is not None]
        assert found["bytes"] == [layer.num_bytes for layer in layers] and len(layers) == 4
        assert all(isinstance(layer, KINDS[kind]) for layer in layers)
        for layer, size in zip(layers, found["hidden_size"], strict=True):
            assert size == (layer.hidden_size if isinstance(layer, LowRankLayer) else None)
        for recall, precision, computed, active in zip(*map(found.get, names), strict=True):
            assert recall == pytest.approx(0.95, abs=0.03)
            assert precision > active and active < computed < 1
        gate_bytes = config.ffn_size * config.hidden_size * 2
        costs[kind] = np.array(found["bytes"]) + np.array(found["computed"]) * gate_bytes
    np.testing.assert_allclose(costs["best"], np.minimum(costs["sign"], costs["lowrank"]))


@pytest.mark.thorough
def test_predictors_for_quantized_weights(demo: Path, trained: dict[str, Any]) -> None:
    """They lie beside the others, and serve that format alone."""
    arguments = ["train-predictors", demo, "--kind", "sign", "--recall", "0.95"]
    assert run_main(*arguments, "--dtype", "q4").status == 0
    own, other = predictors_path(demo, "sign", "q4"), Path(trained["sign"]["path"])
    for dtype, expected in (("q4", own), ("q8", other), (None, other)):
        options = SystemOptions(mode="sign", weight_dtype=dtype)
        assert prepare_system(demo, options)[0].predictors_path == str(expected.resolve())


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize("kind", ["sign", "lowrank"])
def test_generate_and_perplexity(
    trained: dict[str, Any], demo: Path, tmp_path: Path, kind: str
) -> None:
    """Near the dense model, with the recall that was asked for, and fewer gates than all.

    With a file of one's own, too: the one beside the model is not looked at then.
    """
    words = ["--prompt", "The small boat", "--max-tokens", "24", "--mode", kind, "--temperature"]
    words += ["0", "--ignore-eos", "--json"]
    found = run_main("generate", demo, *words).report
    assert len(found["ids"]) == 24
    assert 0 < found["neurons_computed"] < found["gates_computed"] < 0.9
    bare = shutil.copytree(demo, tmp_path / "bare", ignore=shutil.ignore_patterns("hotcold"))
    refusal = run_here("generate", bare, *words).refusal
    assert f"predictors-{kind}.safetensors" in refusal and "`hotcold train-predictors`" in refusal
    own = shutil.copy(trained[kind]["path"], tmp_path / "mine")
    assert run_main("generate", bare, *words, "--predictors", own).report["ids"] == found["ids"]
    text = ["perplexity", demo, "--text", HELD_OUT, "--context-window", "96", "--json"]
    report = run_main(*text, "--mode", kind, "--max-windows", "2").report
    assert report["mode"] == kind
    assert len(report["recall"]) == 4 and min(report["recall"]) > 0.85
    assert np.mean(report["recall"]) == pytest.approx(0.95, abs=0.04)
    assert all(0 < share < 1 for share in report["precision"])
    assert report["ppl"] < 1.2 * report["ppl_dense"] and report["mean_kld"] < 0.2


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with recorded inputs that are random."""
    path = make_tiny("llama-relu", tmp_path_factory.mktemp("small") / "model")
    add_tokenizer(path)
    write_random_inputs(path, artifact_path(path, "inputs.safetensors"))
    return path


def write_random_inputs(model: Path, file: Path, num_tokens: int = 400) -> None:
    config = read_config(model)
    shape = (config.num_layers, num_tokens, config.hidden_size)
    inputs = np.random.default_rng(0).standard_normal(shape).astype(np.float16).view(np.uint16)
    write_inputs(file, ModelIdentity.of(model), LayerInputs(inputs, num_tokens, "0" * 64))


def test_best_leaves_layers_out_where_gates_cost_less(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MEASURE, lambda *_: ReadPrices(gates=1e-3))
    out = tmp_path / "predictors"
    found = run_main("train-predictors", small, "--kind", "best", "--out", out, "--json").report
    written = read_predictors(out, ModelIdentity.of(small), read_config(small))
    assert all(layer is None for layer in written.layers)
    assert found["time_of_gates"] == 1 and set(found["computed"]) == {1.0}
    assert set(found["recall"]) == {1.0} and found["precision"] == found["active"]


def test_plain_output(small: Path, tmp_path: Path) -> None:
    """What gates cost is measured on this machine."""
    done = run_main("train-predictors", small, "--out", tmp_path / "p")
    assert (done.status, done.err, len(done.out.splitlines())) == (0, "", 6)
    assert "recall" in done.out and "lowrank" in done.out
    assert "of the time of all gates here" in done.out
    assert done.out.splitlines()[-1].startswith(f"{tmp_path / 'p'}:") and "MB a token" in done.out


def test_mistakes_end_in_one_line(small: Path, tmp_path: Path) -> None:
    """And write nothing."""
    bare = make_tiny("llama-relu", tmp_path / "bare")
    write_random_inputs(small, tmp_path / "few", 63)
    (tmp_path / "file").write_text("")
    out = ["--out", tmp_path / "p"]
    for arguments, says in (
        ([bare], f"{bare / 'hotcold' / 'inputs.safetensors'}: there is no inputs file"),
        ([small, "--inputs", tmp_path / "x", *out], f"{tmp_path / 'x'}: there"),
        ([small, "--inputs", tmp_path / "few", *out], "at least 64"),
        ([small, "--recall", "1", *out], "--recall is 1.0; give a share from 0.5 to below 1"),
        ([small, "--recall", "nan", *out], "--recall is nan"),
        ([small, "--dtype", "q4", *out], "--dtype q4 takes weights in groups of 32"),
        ([small, "--out", tmp_path / "file" / "p"], "cannot be written"),
    ):
        assert says in run_main("train-predictors", *arguments).refusal
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "few", "file"]


def test_worse_predictors_displace_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that came with the model stay in use until there are better ones."""
    model, own = make_tiny("llama-relu", tmp_path / "model"), tmp_path / "own"
    add_tokenizer(model)
    write_random_inputs(model, artifact_path(model, "inputs.safetensors"))
    words = "train-predictors", model, "--kind", "sign"
    assert run_main(*words, "--json").report["target_recall"] == 0.98
    shipped = predictors_path(model, "sign")
    monkeypatch.setenv("HOTCOLD_ARTIFACTS", str(own))
    for recall in ("0.9", "0.98"):
        done = run_main(*words, "--recall", recall)
        assert done.out.splitlines()[-1].startswith(f"{shipped}: stays in use")
        (made,) = own.glob("*/*")
        assert f"--predictors {made}" in done.out
        shutil.copy(made, made.with_name("predictors-sign-q8.safetensors"))
        is_equal = recall == "0.98"
        assert (predictors_path(model, "sign", "q8") != shipped) == is_equal
        made.with_name("predictors-sign-q8.safetensors").unlink()
        system = prepare_system(model, SystemOptions(mode="sign"))[0]
        assert system.predictors_path == str(shipped.resolve())
    done = run_main(*words, "--recall", "0.99")
    last = f"used from now on in place of {shipped}; remove the new file to go back"
    assert done.out.splitlines()[-1] == last
    better = predictors_path(model, "sign")
    assert own in better.parents
    found = run_main(*words, "--json").report
    assert found["target_recall"] == 0.99 and found["path"] == str(better)
    better.write_bytes(b"damaged")
    assert predictors_path(model, "sign") == shipped
    better.unlink()
    assert predictors_path(model, "sign") == shipped


def test_predictors_that_do_not_fit_cost_no_waiting(small: Path, tmp_path: Path) -> None:
    """Each is refused before a system is started."""
    assert run_main("train-predictors", small, "--kind", "sign").status == 0
    made, cut = predictors_path(small, "sign"), tmp_path / "cut"
    other = make_tiny("llama-gqa", tmp_path / "other")
    add_tokenizer(other)

    def refusal(model: Path, predictors: Path, *mode: str) -> str:
        words = ["generate", model, "--prompt", "w1 w2", *mode, "--predictors", predictors]
        return run_here(*words).refusal

    sign = ("--mode", "sign")
    told = refusal(other, made, *sign)
    assert "belongs to the model 'model', not to 'other'" in told
    assert "`hotcold train-predictors`" in told
    content = made.read_bytes()
    for length in (0, 100, len(content) - 1):
        cut.write_bytes(content[:length])
        told = refusal(small, cut, *sign)
        assert f"{cut}: " in told and "damaged" in told
    assert "there is no predictors file" in refusal(small, tmp_path / "none", *sign)
    inputs = artifact_path(small, "inputs.safetensors")
    assert "is a 'inputs' file, not a predictors file" in refusal(small, inputs, *sign)
    for mode in ([], ["--mode", "exact"], ["--mode", "dense"]):
        told = refusal(small, made, *mode)
        asked = f"not with {mode[-1] if mode else 'exact'}"
        assert f"--predictors go with --mode sign or lowrank, {asked}" in told


def test_import(local_ray: None, tmp_path: Path) -> None:
    model = make_tiny("llama-relu", tmp_path / "model")
    add_tokenizer(model)
    config = read_config(model)
    folder = write_folder(tmp_path / "pt", config)
    found = run_main("train-predictors", model, "--import", folder, "--json").report
    assert found["path"] == str(predictors_path(model, "lowrank"))
    assert found["recall"] is None and found["target_recall"] is None
    assert found["hidden_size"] == [24] * 3 and min(found["bytes"]) > 2 * 24 * (48 + 88)
    checkpoint = TinyCheckpoint(model)
    prompt = " ".join(f"w{i}" for i in checkpoint.ids[:5])
    words = ["generate", model, "--prompt", prompt, "--mode", "lowrank", "--max-tokens", "4"]
    answer = run_main(*words, "--ignore-eos", "--json").report
    assert 0.2 < answer["gates_computed"] < 0.9
    (folder / "model_1.pt").unlink()
    line = ["train-predictors", model, "--import", folder]
    assert "model_1.pt: is missing" in run_main(*line).refusal
    for option in (["--kind", "sign"], ["--recall", "0.9"], ["--inputs", "x"]):
        told = run_main(*line, *option).refusal
        assert f"{option[0]} says how to fit, and --import fits nothing" in told
