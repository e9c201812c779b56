"""Sampling settings from a model's files and from requests, and finding the model itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from hotcold.model.config.build import build_config
from hotcold.model.errors import ConfigError, UsageError
from hotcold.model.files.locate import DEMO_DIRECTORY, locate_model
from hotcold.model.sampling import SamplingParams, eos_ids, suppressed_ids
from tests.gguf_files import FLOAT32, small_llama
from tests.unit.family_configs import LLAMA


def write(path: Path, content: dict[str, Any]) -> Path:
    (path / "generation_config.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 1.0},
        {"temperature": float("nan")},
        {"temperature": True},
        {"top_k": -2},
        {"seed": 1 << 64},
        {"stop": [1]},
        {"stop": {"a": 1}},
        {"stop": "a" * 1001},
        {"dry_sequence_breakers": ["a"] * 65},
        {"ignore_eos": 1},
        {"repeat_penalty": 0},
        {"frequency_penalty": float("inf")},
        {"stop_token_ids": ["a"]},
        {"min_tokens": 1000, "max_tokens": 10},
        {"logit_bias": [(1, 2, 3)]},
        {"logit_bias": {1.5: 2}},
        {"logit_bias": {"5": 1, "05": 2}},
        {"mirostat": 1.0},
        {"max_token": 3},
        {"temperature": 10**400},
    ],
)
def test_bad_requests_name_the_option(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))) as caught:
        SamplingParams.of_given(values, SamplingParams())
    assert "\n" not in str(caught.value)


def test_defaults_of_a_model(tmp_path: Path) -> None:
    assert SamplingParams.defaults(tmp_path) == SamplingParams()
    write(tmp_path, {"do_sample": False, "temperature": 0.9})
    assert SamplingParams.defaults(tmp_path).temperature == 0
    write(tmp_path, {"do_sample": True, "top_p": 0.9})
    found = SamplingParams.defaults(tmp_path)
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (1.0, 50, 0.9, 0.0)
    write(tmp_path, {"do_sample": True, "typical_p": 0.9})
    assert SamplingParams.defaults(tmp_path).typical_p == 0.9
    write(tmp_path, {"temperature": 0.6, "bos_token_id": 1})
    assert SamplingParams.defaults(tmp_path) == SamplingParams(temperature=0.6)
    for bad in ({"top_k": "many"}, {"do_sample": 1}, {"top_p": 7}):
        with pytest.raises(ConfigError, match=r"generation_config\.json"):
            SamplingParams.defaults(write(tmp_path, bad))


def test_a_gguf_file_has_them_too(tmp_path: Path) -> None:
    """As llama.cpp's converter writes them; what is not there is llama.cpp's."""
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_sampling_temp(0.6)
    writer.add_sampling_top_k(-1)
    writer.add_sampling_penalty_repeat(1.05)
    writer.add_array("tokenizer.ggml.suppress_tokens", [3, 900])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = SamplingParams.defaults(tmp_path / "a.gguf")
    assert found == SamplingParams(temperature=0.6, top_k=0, repeat_penalty=1.05)
    assert suppressed_ids(tmp_path / "a.gguf", 10) == (3,)
    bad = small_llama().with_key("general.sampling.top_p", FLOAT32, 7.0)
    (tmp_path / "b.gguf").write_bytes(bad.content())
    with pytest.raises(ConfigError, match=r"general\.sampling: top_p is 7\.0"):
        SamplingParams.defaults(tmp_path / "b.gguf")


def test_repetitions_count_in_prompt_and_answer(tmp_path: Path) -> None:
    """As in transformers, with whatever else the model's makers chose."""
    found = SamplingParams.defaults(write(tmp_path, {"repetition_penalty": 1.1}))
    assert found == SamplingParams(repeat_penalty=1.1, repeat_last_n=-1)
    write(tmp_path, {"repetition_penalty": 1.1, "do_sample": False})
    found = SamplingParams.defaults(tmp_path)
    assert found == SamplingParams(temperature=0.0, repeat_penalty=1.1, repeat_last_n=-1)


def test_end_tokens(tmp_path: Path) -> None:
    config = build_config(LLAMA | {"eos_token_id": 5})
    assert eos_ids(tmp_path, config) == (5,)
    assert eos_ids(write(tmp_path, {}), config) == (5,)
    assert eos_ids(write(tmp_path, {"eos_token_id": 7}), config) == (7,)
    assert eos_ids(write(tmp_path, {"eos_token_id": [7, 8]}), config) == (7, 8)
    with pytest.raises(ConfigError, match="eos_token_id"):
        eos_ids(write(tmp_path, {"eos_token_id": [7, 800]}), config)


def test_locate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate_model(str(tmp_path)) == tmp_path
    (tmp_path / "file").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("hotcold.model.files.locate.DEMO_DIRECTORY", tmp_path)
    for name in (
        str(tmp_path / "file"),
        str(tmp_path / "none"),
        "x" * 5000,
        "a\0b",
        "",
        None,
        "a/b/c",
    ):
        with pytest.raises(UsageError) as caught:
            locate_model(name)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"nothing-at-all is .* Hugging Face cannot be reached"):
        locate_model("nobody/nothing-at-all")
    assert DEMO_DIRECTORY.name == "demo"
    (tmp_path / "config.json").touch()
    assert locate_model(None) == tmp_path
