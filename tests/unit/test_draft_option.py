"""--draft: what it chooses, the memory that it takes, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.account import account, loaded_bytes
from hotcold.actors.setup.choose import choose_system
from hotcold.actors.setup.drafting import draft_note
from hotcold.actors.setup.preflight import prepare_system, read_model
from hotcold.model.config.build import read_config
from hotcold.model.errors import MemoryBudgetError, UsageError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.weights.sizes import kv_cache_bytes
from hotcold.model.weights.sizes import weight_bytes as config_bytes
from hotcold.predictors.predictor_file import Predictors, predictors_path, write_predictors
from tests.draft_layer_models import DraftedModel
from tests.predictor_layers import constant_layer
from tests.quantized_models import make_model

Q4 = SystemOptions(draft="q4", device="cpu", num_threads=1, context_length=64)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("q-llama", tmp_path_factory.mktemp("q-llama") / "m")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"speculate": "off"}, "--draft q4 is for --speculate, which is off"),
        ({"weight_dtype": "q4"}, "the draft takes .* so it would hardly be faster"),
        ({"weight_dtype": "q4_1"}, "so it would hardly be faster"),
        ({"hosts": ("10.0.0.1",)}, "--draft q4 is for systems of one host"),
        ({"draft": "mtp"}, "--draft mtp: the model's files have no layer that drafts"),
        ({"draft": "predicted"}, "takes predictors, and none lie beside the model"),
        ({"draft": "predicted", "mode": "auto"}, "not for --mode auto"),
    ],
)
def test_refusals(path: Path, given: dict[str, Any], words: str) -> None:
    options = replace(Q4, **given)
    with pytest.raises(UsageError, match=words) as found:
        choose_system(path, read_model(path, options.weight_dtype), options)
    assert "\n" not in str(found.value)


def test_its_memory_is_counted(path: Path) -> None:
    options = replace(Q4, draft="auto")
    plain, config = prepare_system(path, options)
    assert plain.draft_system is None and draft_note(plain) == ""
    system, _ = prepare_system(path, Q4)
    quantized, q4_config = prepare_system(path, replace(options, weight_dtype="q4"))
    needs = [account(one, config) for one in (plain, system)]
    weights = config_bytes(q4_config)
    assert needs[1] == replace(needs[0], draft_bytes=weights)
    assert loaded_bytes(system, config) == config_bytes(config) + weights
    assert draft_note(system).startswith("the draft, the model's weights in q4, takes 59.8 kB")
    assert quantized.draft_system is None
    spare = needs[0].total_bytes + weights // 2
    with pytest.raises(MemoryBudgetError, match="KiB of the draft"):
        prepare_system(path, replace(Q4, cpu_memory_bytes=spare))
    assert prepare_system(path, replace(options, cpu_memory_bytes=spare))[0].storage is None


def test_predictors_that_draft(path: Path, tmp_path: Path) -> None:
    config = read_config(path)
    layers = [
        constant_layer(np.arange(config.ffn_size) % 2 == 0, config.hidden_size)
    ] * config.num_layers
    named = tmp_path / "named"
    write_predictors(named, ModelIdentity.of(path), Predictors(layers, "ffn_input"))
    options = replace(Q4, draft="predicted")
    found = choose_system(path, read_model(path), replace(options, predictors=named))
    assert (found.draft_predictors_path, found.predictors_path) == (str(named), "")
    file = predictors_path(path, "lowrank")
    write_predictors(file, ModelIdentity.of(path), Predictors(layers, "ffn_input"))
    found = choose_system(path, read_model(path), options)
    assert found.draft_predictors_path == str(file.resolve()) and found.mode == "exact"
    assert account(found, read_model(path)).predictor_bytes == file.stat().st_size
    file.unlink()


def test_too_little_memory_is_said_with_a_draft(path: Path) -> None:
    """Another --dtype may be named, but for those that cannot have that draft."""
    with pytest.raises(MemoryBudgetError, match=r"KiB of the draft.*are allowed") as found:
        prepare_system(path, replace(Q4, cpu_memory_bytes=100 << 20))
    assert "--dtype" not in str(found.value)


def test_a_layer_that_drafts(tmp_path: Path) -> None:
    """It is taken where all is in memory and speculation is on, and its memory is counted."""
    path = DraftedModel("qwen3.5-moe", tmp_path / "m").path
    options = replace(Q4, draft="auto")
    system, config = prepare_system(path, options)
    plain, same = prepare_system(path, replace(options, draft="ngram"))
    assert (system.draft, plain.draft, config) == ("mtp", "ngram", same)
    needs = account(plain, config), account(system, config)
    file = load_file(path / "model.safetensors")
    written = sum(t.nbytes for name, t in file.items() if name.startswith("mtp."))
    assert needs[1].draft_bytes == pytest.approx(written, rel=0.02)
    more = needs[1].kv_cache_bytes - needs[0].kv_cache_bytes
    assert more == kv_cache_bytes(config, 64, "float32")  # of four layers one has attention
    fits = needs[0].total_bytes
    for changed in ({"speculate": "off"}, {"cpu_memory_bytes": fits}):
        assert prepare_system(path, replace(options, **changed))[0].draft == "ngram"
    with pytest.raises(UsageError, match="--draft mtp is for models in memory"):
        prepare_system(path, replace(options, draft="mtp", cpu_memory_bytes=fits))
    quantized = prepare_system(path, replace(options, weight_dtype="f16"))[0]
    assert quantized.draft_system is not None and quantized.draft_system.weight_dtype == "f16"
