"""What needs zeros says so at once of a model whose activations are never exactly zero."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotcold.actors.setup.modes import no_predictors_note
from hotcold.actors.setup.preflight import SystemOptions, prepare_system, read_model
from tests.e2e.commands import run_main
from tests.tiny_models import make_tiny

CIRCLE = ("hotcold train-predictors` makes", "with `hotcold train-predictors`", "hotcold profile`;")


@pytest.mark.parametrize(
    "command",
    [
        ("train-predictors", "MODEL"),
        ("generate", "MODEL", "--mode", "sign", "--prompt", "x"),
        ("generate", "MODEL", "--draft", "predicted", "--prompt", "x"),
        ("profile", "MODEL", "--inputs", "8"),
        ("plan", "MODEL", "--mode", "sign"),
        ("plan", "--config", "MODEL", "--mode", "sign"),
    ],
)
def test_no_command_sends_to_another_that_cannot_help(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    path = make_tiny("llama-silu", tmp_path / "model")
    told = run_main(*(path if word == "MODEL" else word for word in command)).refusal
    assert "(silu)" in told and not any(words in told for words in CIRCLE)
    if command[0] != "profile":
        assert "no activation of this model" in told and "--dtype q8 or q4" in told
        assert "--mode threshold" in told


@pytest.mark.parametrize("variant", ["llama-silu", "mixtral"])
def test_the_mode_that_chooses_names_no_predictors_where_there_can_be_none(
    variant: str, tmp_path: Path
) -> None:
    path = make_tiny(variant, tmp_path)
    system, _ = prepare_system(path, SystemOptions(mode="auto"))
    note = no_predictors_note(read_model(path), system.mode)
    assert "train-predictors" not in note and note.startswith("mode dense: --mode auto ")
