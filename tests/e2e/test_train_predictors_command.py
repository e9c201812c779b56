"""`hotcold train-predictors` and the modes that use what it writes, as a user runs them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
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
from tests.e2e.word_model import add_tokenizer
from tests.tiny_models import make_tiny
from tests.unit.test_powerinfer_import import write_folder

pytestmark = pytest.mark.usefixtures("one_torch_thread")
HELD_OUT = DEMO_DIRECTORY / "heldout.txt"
Outcome = tuple[int, str, str]
Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process: exit status, standard output and standard error."""

    def command(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        status = main([*map(str, arguments)])
        out, err = capsys.readouterr()
        return status, out, err

    return command


def last_line(outcome: Outcome) -> dict[str, Any]:
    status, out, err = outcome
    assert status == 0, err
    return json.loads(out.splitlines()[-1])


def refused(outcome: Outcome, *says: str) -> None:
    """A command ended with one line that says so, and printed nothing else."""
    status, out, err = outcome
    assert status == 1 and out == "" and len(err.splitlines()) == 1, outcome
    for part in says:
        assert part in err


@pytest.fixture(scope="module")
def demo(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the embedded model, profiled on a part of its text."""
    path = tmp_path_factory.mktemp("models") / "demo"
    shutil.copytree(DEMO_DIRECTORY, path, ignore=shutil.ignore_patterns("hotcold", "__pycache__"))
    arguments = ["profile", path, "--text", HELD_OUT, "--max-tokens", "1500", "--window", "128"]
    assert main([*map(str, arguments), "--inputs", "1200"]) == 0
    return path


@pytest.fixture(scope="module")
def trained(demo: Path) -> dict[str, Path]:
    """Predictors of both kinds, beside the model."""
    for kind in ("sign", "lowrank"):
        assert main(["train-predictors", str(demo), "--kind", kind, "--recall", "0.95"]) == 0
    return {kind: predictors_path(demo, kind) for kind in ("sign", "lowrank")}


@pytest.mark.thorough
def test_predictors_for_quantized_weights(demo: Path, trained: dict[str, Path]) -> None:
    """They lie beside the others, and serve that format alone."""
    arguments = ["train-predictors", str(demo), "--kind", "sign", "--recall", "0.95"]
    assert main([*arguments, "--dtype", "q4"]) == 0
    own = predictors_path(demo, "sign", "q4")
    for dtype, expected in (("q4", own), ("q8", trained["sign"]), (None, trained["sign"])):
        options = SystemOptions(mode="sign", weight_dtype=dtype)
        assert prepare_system(demo, options)[0].predictors_path == str(expected.resolve())


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


@pytest.mark.parametrize("kind", ["sign", "lowrank", "best"])
def test_what_is_said_is_what_is_written(
    run: Run, demo: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    costly_gates(monkeypatch)
    out = tmp_path / "new" / "predictors"
    found = last_line(
        run("train-predictors", demo, "--kind", kind, "--recall", "0.95", "--out", out, "--json")
    )
    assert found["path"] == str(out) and found["seconds"] > 0 and found["target_recall"] == 0.95
    config = read_config(demo)
    written = read_predictors(out, ModelIdentity.of(demo), config)
    assert written.target_recall == 0.95 and written.input_name == "ffn_input"
    assert written.qualities is not None and len(written.text_digest) == 64
    for name in ("recall", "precision", "computed", "active"):
        assert found[name] == [getattr(quality, name) for quality in written.qualities]
    layers = [layer for layer in written.layers if layer is not None]
    assert found["bytes"] == [layer.num_bytes for layer in layers] and len(layers) == 4
    kinds = {"sign": (SignLayer,), "lowrank": (LowRankLayer,), "best": (SignLayer, LowRankLayer)}
    assert all(isinstance(layer, kinds[kind]) for layer in layers)
    for layer, size in zip(layers, found["hidden_size"], strict=True):
        assert size == (layer.hidden_size if isinstance(layer, LowRankLayer) else None)
    for recall, precision, computed, active in zip(
        *(found[name] for name in ("recall", "precision", "computed", "active")), strict=True
    ):
        assert recall == pytest.approx(0.95, abs=0.03)
        assert precision > active and active < computed < 1


def test_best_leaves_layers_out_where_gates_cost_less(
    run: Run, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prices = ReadPrices(gates=1e-3)
    monkeypatch.setattr("hotcold.predictors.fitting.read_prices.measure_prices", lambda *_: prices)
    out = tmp_path / "predictors"
    found = last_line(run("train-predictors", small, "--kind", "best", "--out", out, "--json"))
    written = read_predictors(out, ModelIdentity.of(small), read_config(small))
    assert all(layer is None for layer in written.layers)
    assert found["time_of_gates"] == 1 and set(found["computed"]) == {1.0}
    assert set(found["recall"]) == {1.0} and found["precision"] == found["active"]


def test_prices_are_measured_here(run: Run, small: Path, tmp_path: Path) -> None:
    """What they are is this machine's; that each work is done is what can be said."""
    out = run("train-predictors", small, "--kind", "sign", "--out", tmp_path / "p")[1]
    assert float(re.search(r"takes ([\d.]+) of the time of all gates here", out)[1]) > 0  # type: ignore[index]


def costly_gates(patch: pytest.MonkeyPatch) -> None:
    """Costs are bytes then, and no layer is left without a predictor."""
    prices = ReadPrices(gates=100.0)
    patch.setattr("hotcold.predictors.fitting.read_prices.measure_prices", lambda *_: prices)


def test_best_takes_the_cheaper_one(
    run: Run, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costly_gates(monkeypatch)
    reports = {
        kind: last_line(
            run("train-predictors", demo, "--kind", kind, "--out", tmp_path / kind, "--json")
        )
        for kind in ("sign", "lowrank", "best")
    }
    config = read_config(demo)
    gate_bytes = config.ffn_size * config.hidden_size * 2

    def costs(kind: str) -> np.ndarray:
        report = reports[kind]
        return np.array(report["bytes"]) + np.array(report["computed"]) * gate_bytes

    np.testing.assert_allclose(costs("best"), np.minimum(costs("sign"), costs("lowrank")))


def test_plain_output(run: Run, small: Path, tmp_path: Path) -> None:
    status, out, err = run("train-predictors", small, "--out", tmp_path / "p")
    assert (status, err) == (0, "")
    assert "recall" in out and "lowrank" in out
    assert "MB a token" in out and len(out.splitlines()) == 6
    assert out.splitlines()[-1].startswith(f"{tmp_path / 'p'}:")


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize("kind", ["sign", "lowrank"])
def test_generate_and_perplexity(run: Run, trained: dict[str, Path], demo: Path, kind: str) -> None:
    """Near the dense model, with the recall that was asked for, and fewer gates than all."""
    words = ["generate", demo, "--prompt", "The small boat", "--max-tokens", "24", "--json"]
    found = last_line(run(*words, "--mode", kind, "--temperature", "0", "--ignore-eos"))
    assert len(found["ids"]) == 24
    assert 0 < found["neurons_computed"] < found["gates_computed"] < 0.9
    text = ["perplexity", demo, "--text", HELD_OUT, "--context-window", "96", "--json"]
    report = last_line(run(*text, "--mode", kind, "--max-windows", "2"))
    assert report["mode"] == kind
    assert len(report["recall"]) == 4 and min(report["recall"]) > 0.85
    assert np.mean(report["recall"]) == pytest.approx(0.95, abs=0.04)
    assert all(0 < share < 1 for share in report["precision"])
    assert report["ppl"] < 1.2 * report["ppl_dense"] and report["mean_kld"] < 0.2


def test_a_file_of_ones_own(run: Run, trained: dict[str, Path], demo: Path, tmp_path: Path) -> None:
    """--predictors names the file; the one beside the model is not looked at."""
    moved = tmp_path / "mine"
    shutil.copy(trained["sign"], moved)
    bare = shutil.copytree(demo, tmp_path / "bare", ignore=shutil.ignore_patterns("hotcold"))
    words = ["generate", bare, "--prompt", "The", "--max-tokens", "2", "--mode", "sign", "--json"]
    refused(run(*words), "predictors-sign.safetensors", "`hotcold train-predictors`")
    assert last_line(run(*words, "--predictors", moved))["gates_computed"] < 1


def test_missing_inputs(run: Run, tmp_path: Path) -> None:
    model = make_tiny("llama-relu", tmp_path / "model")
    refused(
        run("train-predictors", model),
        str(model / "hotcold" / "inputs.safetensors"), "there is no inputs file",
        "`hotcold profile`",
    )  # fmt: skip
    refused(run("train-predictors", model, "--inputs", tmp_path / "x"), f"{tmp_path / 'x'}: there")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_too_few_inputs(run: Run, small: Path, tmp_path: Path) -> None:
    write_random_inputs(small, tmp_path / "few", 63)
    found = run("train-predictors", small, "--inputs", tmp_path / "few", "--out", tmp_path / "p")
    refused(found, "at least 64", "longer text or more --inputs")
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("recall", ["1.5", "1", "0.4", "0", "-1", "nan"])
def test_recall_out_of_range(run: Run, small: Path, tmp_path: Path, recall: str) -> None:
    found = run("train-predictors", small, "--recall", recall, "--out", tmp_path / "p")
    refused(found, f"--recall is {float(recall)}", "from 0.5 to below 1")
    assert not (tmp_path / "p").exists()


def test_an_unknown_kind(run: Run, small: Path) -> None:
    status, out, err = run("train-predictors", small, "--kind", "oracle")
    assert status == 2 and out == "" and "'oracle' is not one of" in err


def test_rows_of_no_whole_groups(run: Run, small: Path, tmp_path: Path) -> None:
    found = run("train-predictors", small, "--dtype", "q4", "--out", tmp_path / "p")
    refused(found, "--dtype q4 takes weights in groups of 32", "rows of 48")
    assert not (tmp_path / "p").exists()


def test_an_unwritable_place(run: Run, small: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = run("train-predictors", small, "--kind", "sign", "--out", tmp_path / "file" / "p")
    assert found[0] == 1 and "cannot be written" in found[2] and len(found[2].splitlines()) == 1


def test_worse_predictors_displace_none(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that came with the model stay in use until there are better ones."""
    model, own = make_tiny("llama-relu", tmp_path / "model"), tmp_path / "own"
    add_tokenizer(model)
    write_random_inputs(model, artifact_path(model, "inputs.safetensors"))
    words = "train-predictors", model, "--kind", "sign"
    assert last_line(run(*words, "--json"))["target_recall"] == 0.98
    shipped = predictors_path(model, "sign")
    monkeypatch.setenv("HOTCOLD_ARTIFACTS", str(own))
    for recall in ("0.9", "0.98"):
        status, out, _ = run(*words, "--recall", recall)
        assert status == 0 and out.splitlines()[-1].startswith(f"{shipped}: stays in use")
        (made,) = own.glob("*/*")
        assert f"--predictors {made}" in out
        shutil.copy(made, made.with_name("predictors-sign-q8.safetensors"))
        is_equal = recall == "0.98"
        assert (predictors_path(model, "sign", "q8") != shipped) == is_equal
        made.with_name("predictors-sign-q8.safetensors").unlink()
        system = prepare_system(model, SystemOptions(mode="sign"))[0]
        assert system.predictors_path == str(shipped.resolve())
    status, out, _ = run(*words, "--recall", "0.99")
    last = f"used from now on in place of {shipped}; remove the new file to go back"
    assert status == 0 and out.splitlines()[-1] == last
    better = predictors_path(model, "sign")
    assert own in better.parents
    found = last_line(run(*words, "--json"))
    assert found["target_recall"] == 0.99 and found["path"] == str(better)
    better.write_bytes(b"damaged")
    assert predictors_path(model, "sign") == shipped
    better.unlink()
    assert predictors_path(model, "sign") == shipped


@pytest.fixture(scope="module")
def small_predictors(small: Path) -> Path:
    assert main(["train-predictors", str(small), "--kind", "sign"]) == 0
    return predictors_path(small, "sign")


def test_predictors_that_do_not_fit_cost_no_waiting(
    run: Run, small: Path, small_predictors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is refused before a system is started."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("a system was started")

    monkeypatch.setattr("hotcold.actors.system.System.__init__", start)
    other = make_tiny("llama-gqa", tmp_path / "other")
    add_tokenizer(other)
    words = ["generate", "--prompt", "w1 w2", "--mode", "sign", "--predictors"]
    refused(
        run(*words, small_predictors, other), "belongs to the model 'model'", "not to 'other'",
        "`hotcold train-predictors`",
    )  # fmt: skip
    content = small_predictors.read_bytes()
    for length in (0, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "cut").write_bytes(content[:length])
        refused(run(*words, tmp_path / "cut", small), f"{tmp_path / 'cut'}: ", "damaged")
    refused(run(*words, tmp_path / "none", small), "there is no predictors file")
    inputs = artifact_path(small, "inputs.safetensors")
    refused(run(*words, inputs, small), "is a 'inputs' file, not a predictors file")
    for mode in ("exact", "dense"):
        words[words.index("--mode") + 1] = mode
        refused(
            run(*words, small_predictors, small),
            f"--predictors go with --mode sign or lowrank, not with {mode}",
        )


def test_without_a_mode_predictors_are_refused(
    run: Run, small: Path, small_predictors: Path
) -> None:
    found = run("generate", small, "--prompt", "w1", "--predictors", small_predictors)
    refused(found, "not with exact")


def test_import(local_ray: None, run: Run, tmp_path: Path) -> None:
    model = make_tiny("llama-relu", tmp_path / "model")
    add_tokenizer(model)
    config = read_config(model)
    folder = write_folder(tmp_path / "pt", config)
    found = last_line(run("train-predictors", model, "--import", folder, "--json"))
    assert found["path"] == str(predictors_path(model, "lowrank"))
    assert found["recall"] is None and found["target_recall"] is None
    assert found["hidden_size"] == [24] * 3 and min(found["bytes"]) > 2 * 24 * (48 + 88)
    checkpoint = TinyCheckpoint(model)
    prompt = " ".join(f"w{i}" for i in checkpoint.ids[:5])
    words = ["generate", model, "--prompt", prompt, "--mode", "lowrank", "--max-tokens", "4"]
    answer = last_line(run(*words, "--ignore-eos", "--json"))
    assert 0.2 < answer["gates_computed"] < 0.9
    (folder / "model_1.pt").unlink()
    refused(run("train-predictors", model, "--import", folder), "model_1.pt: is missing")
    for option in (["--kind", "sign"], ["--recall", "0.9"], ["--inputs", "x"]):
        ended = run("train-predictors", model, "--import", folder, *option)
        refused(ended, f"{option[0]} says how to fit, and --import fits nothing")
    status, _, err = run("train-predictors", model, "--import", tmp_path / "nowhere")
    assert status == 2 and "does not exist" in err
