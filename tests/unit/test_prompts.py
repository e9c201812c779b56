"""What a model's texts open with."""

from pathlib import Path

import pytest

from hotcold.actors.driver.prompts import Prompts
from hotcold.model.config.build import read_config
from tests.e2e.word_model import add_tokenizer
from tests.tiny_models import make_tiny


@pytest.mark.parametrize(
    ("tokenizer", "expected"), [("none", 1), ("plain", None), ("w1", 1), ("w2", None)]
)
def test_opening_id(tokenizer: str, expected: int | None, tmp_path: Path) -> None:
    """The model's bos, 1, unless there is a tokenizer and it does otherwise."""
    model = make_tiny("llama-relu", tmp_path)
    if tokenizer != "none":
        add_tokenizer(model, None if tokenizer == "plain" else tokenizer)
    prompts = Prompts(model, read_config(model), 16)
    assert prompts.bos_id == expected
