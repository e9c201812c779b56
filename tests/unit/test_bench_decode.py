"""What `hotcold bench decode` makes of the times of its requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotcold.actors.protocol.messages import Generation, SystemConfig
from hotcold.actors.setup.preflight import read_model
from hotcold.jobs.bench.decode import batch_report, decode_request
from tests.tiny_models import make_tiny


def generation(
    num_tokens: int, queued_s: float, prefill_s: float, decode_s: float, step_tokens: float = 2.0
) -> Generation:
    return Generation(
        "", [1] * num_tokens, "length", 4, prefill_s, decode_s, queued_s,
        per_token_ms={"ffn": 3.0, "total": 4.0}, neurons_computed=0.5, gates_computed=1.0,
        ups_computed=0.5, step_tokens=step_tokens,
    )  # fmt: skip


def test_all_requests_together_and_each(tmp_path: Path) -> None:
    config = read_model(make_tiny("llama-relu", tmp_path))
    system = SystemConfig(str(tmp_path))
    slow, fast = [generation(11, 0, 1, 10.0)] * 2, [generation(11, 0, 1, 1.0)] * 2
    # The first one's steps have the other's prompt in them.
    uneven = [generation(11, 0.0, 1.0, 2.0, 9.0), generation(21, 0.5, 1.5, 4.0, 1.2)]
    report = batch_report(system, config, [slow, uneven, fast], 20.0)
    # From 2 s, the first token of the second, to 6 s, its end: 20 steps of 1.2 tokens.
    assert report["runs"] == [2.0, 6.0, 20.0]
    assert (report["tokens_per_s"], report["batch"]) == (6.0, 2)
    assert report["request_tokens_per_s"] == {"min": 5.0, "mean": 5.0, "max": 5.0}
    assert report["gb_per_s"] == pytest.approx(report["bytes_per_token"] * 3.0 / 1e9)
    alone = batch_report(system, config, [[generation(11, 0, 1, 10.0, 1.0)]], 20.0)
    assert (alone["tokens_per_s"], alone["batch"]) == (1.0, 1)
    assert alone["bytes_per_token"] == report["bytes_per_token"]


def test_each_request_has_a_prompt_of_its_own(tmp_path: Path) -> None:
    config = read_model(make_tiny("llama-relu", tmp_path))
    prompts = [decode_request(config, 5, 9, number).prompt_ids for number in range(32)]
    assert len(set(map(str, prompts))) == 32
    assert decode_request(config, 5, 9).prompt_ids == prompts[0]
