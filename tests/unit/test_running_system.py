"""How a job's options are compared with the system that runs already."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import click
import pytest

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.setup.preflight import SystemOptions, prepare_system
from hotcold.jobs.cluster_system import _difference
from hotcold.jobs.support.options import system_options
from hotcold.model.weights.quantized_checkpoint import write_quantized
from tests.quantized_models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("q-llama", tmp_path_factory.mktemp("running") / "model")


def started(path: Path, **options: object) -> SystemConfig:
    return prepare_system(path, SystemOptions(**options))[0]  # type: ignore[arg-type]


def test_each_option_is_compared_as_commands_spell_it(model: Path) -> None:
    command, running = click.command()(system_options(lambda **values: None)), started(model)
    spelled = {str(option.name): option.opts[0] for option in command.params}
    shared = {field.name for field in fields(SystemConfig)} & set(vars(SystemOptions()))
    assert len(shared) > 10 and _difference(running, str(model), SystemOptions()) == ""
    # Memory limits count where a system starts; what is stored has a --dtype, too.
    for name in shared - {"weight_dtype", "gpu_memory_bytes"}:
        given = SystemOptions(**{name: "another"})  # type: ignore[arg-type]
        assert _difference(running, None, given).startswith(f"has {spelled[name]} ")


def test_other_dtypes_and_models(model: Path, tmp_path: Path) -> None:
    late = started(model, weight_dtype="q4")
    assert _difference(late, None, SystemOptions(weight_dtype="q4")) == ""
    assert _difference(late, None, SystemOptions()) == ""
    text = "has --dtype q4, not q8"
    assert _difference(late, None, SystemOptions(weight_dtype="q8")) == text
    write_quantized(model, tmp_path / "q8", "q8")
    for running in (started(tmp_path / "q8"), started(tmp_path / "q8", weight_dtype="q8")):
        assert _difference(running, None, SystemOptions(weight_dtype="q8")) == ""
    text = "has the weights as stored (q8), not --dtype q4"
    assert _difference(started(tmp_path / "q8"), None, SystemOptions(weight_dtype="q4")) == text
    other = replace(late, model_path="/elsewhere")
    assert _difference(other, str(model), SystemOptions()) == "has the model /elsewhere"
