"""A sampling parameter is the same wherever it is given."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import hotcold
from hotcold.jobs.support.options import sampling_options, split_sampling
from hotcold.model.errors import UsageError
from hotcold.model.sampling import PARAMETERS, REPETITION, SamplingParams
from tests.unit.ollama_routes import HELLO, Recording, post

GIVEN: dict[str, Any] = {
    "max_tokens": 9, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "seed": 7,
    "stop": ["a", "b"], "ignore_eos": True, "repeat_penalty": 1.5, "presence_penalty": 1.0,
    "frequency_penalty": 0.5, "repeat_last_n": 8, "logit_bias": {"5": -1.5, "7": 2.0},
    "stop_token_ids": [1, 2], "min_tokens": 2, "include_stop_str_in_output": True,
    "top_n_sigma": 1.0, "typical_p": 0.5, "xtc_probability": 0.5, "xtc_threshold": 0.2,
    "mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2, "dry_multiplier": 0.8,
    "dry_base": 2.0, "dry_allowed_length": 3, "dry_penalty_last_n": 99,
    "dry_sequence_breakers": [".", "x"], "thinking_token_budget": 5,
}  # fmt: skip
WITHOUT_WINDOW = {"presence_penalty": 1.0, "frequency_penalty": 0.5, REPETITION: 1.25}


def on_the_command_line(path: Path, given: dict[str, Any], **settings: Any) -> SamplingParams:
    words = []
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif isinstance(value, dict):
            words += [word for key, bias in value.items() for word in (flag, f"{key}={bias}")]
        else:
            values = value if isinstance(value, list) else [value]
            words += [word for one in values for word in (flag, str(one))]
    found: list[SamplingParams] = []

    @click.command()
    @sampling_options
    def command(**values: Any) -> None:
        found.append(split_sampling(path, values))
        assert not values

    result = CliRunner().invoke(command, words, catch_exceptions=False, **settings)
    assert result.exit_code == 0, result.output
    return found[0]


def over_http(route: str, given: dict[str, Any]) -> SamplingParams:
    asked, body = Recording(), dict(given)
    if route == "/v1/responses":
        body |= {"input": "a", "max_output_tokens": body.pop("max_tokens", None)}
    else:
        body["messages"] = HELLO
    answer = post(asked, route, **body)
    assert answer.status_code == 200, answer.text
    return asked.requests[0].sampling


def of_ollama(given: dict[str, Any]) -> SamplingParams:
    asked = Recording()
    options = {key: value for key, value in given.items() if key != "max_tokens"}
    if "max_tokens" in given:
        options["num_predict"] = given["max_tokens"]
    answer = post(asked, "/api/chat", messages=HELLO, options=options, stream=False)
    assert answer.status_code == 200, answer.text
    return asked.requests[0].sampling


def in_python(given: dict[str, Any]) -> SamplingParams:
    values = {**given, "logit_bias": {int(k): v for k, v in given.get("logit_bias", {}).items()}}
    (found,) = hotcold.SamplingParams(**values).of_requests(SamplingParams())
    return found


def test_it_means_the_same_everywhere(tmp_path: Path) -> None:
    expected = SamplingParams.of_given(GIVEN, SamplingParams())
    assert all(getattr(expected, name) != getattr(SamplingParams(), name) for name in GIVEN)
    assert set(GIVEN) | {"penalize_prompt"} == {one.name for one in fields(SamplingParams)}
    for route in ("/v1/chat/completions", "/v1/responses"):
        assert over_http(route, GIVEN) == expected
    assert in_python(GIVEN) == expected
    flags = {name: value for name, value in GIVEN.items() if PARAMETERS[name].about}
    partly = SamplingParams.of_given(flags, SamplingParams())
    assert on_the_command_line(tmp_path, flags) == partly
    keys = {name: value for name, value in GIVEN.items() if PARAMETERS[name].ollama}
    assert of_ollama(keys) == SamplingParams.of_given(keys, SamplingParams())


def test_what_penalties_count_where_nothing_is_said(tmp_path: Path) -> None:
    """OpenAI's and vLLM's definitions; Ollama's are llama.cpp's."""

    def counted(found: SamplingParams) -> tuple[float, ...]:
        penalties = (found.repeat_penalty, found.presence_penalty, found.frequency_penalty)
        return (*penalties, found.repeat_last_n, found.penalize_prompt)

    chat = "/v1/chat/completions"
    for found in (
        on_the_command_line(tmp_path, WITHOUT_WINDOW),
        over_http(chat, WITHOUT_WINDOW),
        in_python(WITHOUT_WINDOW),
    ):
        assert counted(found) == (1.25, 1.0, 0.5, -1, False)
    assert counted(of_ollama({"presence_penalty": 1.0})) == (1.0, 1.0, 0.0, 64, True)
    with_window = over_http(chat, {"presence_penalty": 1, "repeat_last_n": 9})
    assert counted(with_window) == (1.0, 1.0, 0.0, 9, True)


@pytest.mark.parametrize(
    ("given", "variables", "file", "expected"),
    [
        ({REPETITION: 1.25}, {}, {"repeat_penalty": "1.1"}, (1.25, -1)),
        ({"repeat_penalty": 1.5}, {}, {REPETITION: "1.1"}, (1.5, 64)),
        ({}, {"X_REPETITION_PENALTY": "1.2"}, {"repeat_penalty": "1.1"}, (1.2, -1)),
        ({}, {}, {"repeat_penalty": "1.1"}, (1.1, 64)),
    ],
)
def test_one_name_of_a_penalty_wins_over_the_other(
    given: dict[str, Any],
    variables: dict[str, str],
    file: dict[str, str],
    expected: tuple[float, int],
    tmp_path: Path,
) -> None:
    """The command line over the environment, and that over the file."""
    settings = {"env": variables, "auto_envvar_prefix": "X", "default_map": file}
    found = on_the_command_line(tmp_path, given, **settings)
    assert (found.repeat_penalty, found.repeat_last_n) == expected


def test_both_names_of_a_penalty_are_refused(tmp_path: Path) -> None:
    both = {REPETITION: 1.5, "repeat_penalty": 1.5}
    told = f"{REPETITION} and repeat_penalty were both given"
    with pytest.raises(UsageError, match=told):
        on_the_command_line(tmp_path, both)
    with pytest.raises(UsageError, match=told):
        in_python(both)
    answer = post(Recording(), "/v1/chat/completions", messages=HELLO, **both)
    assert answer.status_code == 400 and told in answer.json()["error"]["message"]
