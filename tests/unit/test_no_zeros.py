"""What needs zeros says so at once of a model whose activations are never exactly zero."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotcold.actors.setup.modes import no_predictors_note
from hotcold.actors.setup.preflight import SystemOptions, prepare_system, read_model
from hotcold.jobs.cli import main
from tests.tiny_models import make_tiny

CIRCLE = ("hotcold train-predictors` makes", "with `hotcold train-predictors`", "hotcold profile`;")


@pytest.mark.parametrize(("variant", "activation"), [("llama-silu", "silu")])
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
    variant: str,
    activation: str,
    command: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = make_tiny(variant, tmp_path / "model")
    capsys.readouterr()
    assert main([str(path) if word == "MODEL" else word for word in command]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"({activation})" in err and not any(words in err for words in CIRCLE)
    if command[0] != "profile" or variant != "llama-silu":
        assert "no activation of this model" in err and "--dtype q8 or q4" in err
        assert ("--mode threshold" in err) == (variant == "llama-silu")


@pytest.mark.parametrize("variant", ["llama-silu", "mixtral"])
def test_the_mode_that_chooses_names_no_predictors_where_there_can_be_none(
    variant: str, tmp_path: Path
) -> None:
    path = make_tiny(variant, tmp_path)
    system, _ = prepare_system(path, SystemOptions(mode="auto"))
    note = no_predictors_note(read_model(path), system.mode)
    assert "train-predictors" not in note and note.startswith("mode dense: --mode auto ")
