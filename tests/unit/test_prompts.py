"""What a model's texts open with."""

from dataclasses import replace
from pathlib import Path

import pytest

from hotcold.actors.driver.prompts import Prompts
from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.model.config.build import read_config
from hotcold.model.sampling import SamplingParams
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


def test_variables_of_a_request_reach_the_template(tmp_path: Path) -> None:
    model = make_tiny("llama-relu", tmp_path)
    add_tokenizer(model, "w1")
    (model / "chat_template.jinja").write_text("{{ 'w5 w6' if thinks else 'w7' }}")
    prompts = Prompts(model, read_config(model), 16)
    request = GenerateRequest(SamplingParams(), messages=[{"role": "user", "content": "w2"}])
    assert prompts.ids(request) == [7]
    told = replace(request, template_variables={"thinks": True})
    assert prompts.ids(told) == [5, 6]
    assert prompts.checked(told) == replace(
        told, messages=None, template_variables=None, prompt_ids=[5, 6], is_chat=True
    )
