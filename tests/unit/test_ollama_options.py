"""Ollama's options, as the system hears of them."""

from __future__ import annotations

from typing import Any

import pytest

from hotcold.ui.api.drawn import ollamas_sampling
from hotcold.ui.api.errors import ApiError
from tests.unit.ollama_routes import HELLO, Recording, post


def test_options_reach_the_system() -> None:
    asked = Recording()
    options = {
        "num_predict": 5, "temperature": 0, "top_k": 3.0, "top_p": 0.5, "min_p": 0.25, "seed": 7,
        "stop": [*"xabcde"], "repeat_penalty": 1.25, "repeat_last_n": 9, "num_ctx": 4096,
        "numa": None, "typical_p": 1, "mirostat": 2.0, "mirostat_tau": 4, "mirostat_eta": 0.2,
    }  # fmt: skip
    post(asked, "/api/chat", messages=HELLO, options=options, stream=False, keep_alive="5m")
    sampling = asked.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (5, 0, 3)
    assert (sampling.top_p, sampling.min_p, sampling.seed) == (0.5, 0.25, 7)
    assert sampling.stop == tuple("xabcde")
    assert (sampling.mirostat, sampling.mirostat_tau, sampling.mirostat_eta) == (2, 4.0, 0.2)
    assert (sampling.repeat_penalty, sampling.repeat_last_n) == (1.25, 9)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0, 0)


def test_temperatures_are_ollamas_own() -> None:
    """Its range is larger than that of OpenAI's routes."""
    asked = Recording()
    assert post(asked, "/api/chat", messages=HELLO, options={"temperature": 3}).status_code == 200
    assert asked.requests[0].sampling.temperature == 3
    told = post(asked, "/api/chat", messages=HELLO, options={"temperature": 101})
    assert told.status_code == 400 and "temperature" in told.json()["error"]
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
    ):
        assert post(asked, path, temperature=2, **body).status_code == 200
        refused = post(asked, path, temperature=3, **body)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "temperature must be at most 2"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, {}),
        ({"num_predict": -1, "seed": -1, "top_k": -1, "stop": None}, {"top_k": 0}),
        ({"num_predict": 10**12}, {"max_tokens": (1 << 31) - 1}),
        ({"tfs_z": 1.0, "penalize_newline": True, "num_gpu": 1}, {}),
    ],
)
def test_options_without_effect(options: Any, expected: dict[str, Any]) -> None:
    assert ollamas_sampling(options) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"tfs_z": 0.5}, {"mirostat": "1"}, {"typical_p": "1"}, {"dry_sequence_breakers": [5]},
        {"temperature": "1"}, {"temperature": True}, {"top_k": 1e300}, {"seed": float("nan")},
        {"stop": 5}, {"stop": [1]}, {"num_predict": []},
    ],
)  # fmt: skip
def test_options_that_cannot_be_had_are_told(options: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=f"option {next(iter(options))} ") as refusal:
        ollamas_sampling(options)
    assert refusal.value.status == 400


def test_an_unknown_option_is_told() -> None:
    with pytest.raises(ApiError, match="option 'tempreture' is not known here"):
        ollamas_sampling({"tempreture": 1})
