"""`hotcold generate` and `hotcold bench`, as a user runs them."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotcold.placement.machine.measure_node import measure_read_bandwidth
from tests.conftest import GREEDY_TOKENS, TinyCheckpoint
from tests.e2e.commands import (
    command_line,
    environment,
    processes_left,
    ray_folder,
    run_main,
)

SEEDED = ["--seed", "7", "--temperature", "1", "--top-k", "0", "--top-p", "1", "--ignore-eos"]


@pytest.fixture
def little_memory_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast memory is read is no test's matter: not a gigabyte of it, for a second, twice."""

    def measured(num_threads: int, num_bytes: int) -> float:
        return measure_read_bandwidth(num_threads, num_bytes >> 4, 0.02)

    monkeypatch.setattr("hotcold.jobs.bench.decode.measure_read_bandwidth", measured)


def command(*arguments: str | Path) -> tuple[list[str], dict[str, Any]]:
    """Run a command in this process; its output's lines but the last, and that as JSON."""
    done = run_main(*arguments, "--json")
    return done.out.splitlines()[:-1], done.report


def test_greedy_ids_are_those_of_transformers(
    local_ray: None, tiny: Callable[..., TinyCheckpoint]
) -> None:
    checkpoint = tiny("llama-gqa")
    prompt = ",".join(map(str, checkpoint.ids[:10]))
    lines, result = command(
        "generate", checkpoint.path, "--prompt-ids", prompt, "--max-tokens", str(GREEDY_TOKENS),
        "--temperature", "0", "--ignore-eos", "--cpu-actors", "2", "--threads", "2",
    )  # fmt: skip
    assert result["ids"] == checkpoint.greedy_ids
    assert result["text"] == ""
    assert result["finish_reason"] == "length"
    assert result["prompt_tokens"] == 10
    assert type(result["prefill_tokens_per_s"]) is float and result["prefill_tokens_per_s"] > 0
    assert type(result["decode_tokens_per_s"]) is float and result["decode_tokens_per_s"] > 0
    assert result["system"]["num_cpu_actors"] == 2
    assert lines == [",".join(map(str, checkpoint.greedy_ids))]


def test_penalties_and_biases_reach_the_answer(
    local_ray: None, tiny: Callable[..., TinyCheckpoint]
) -> None:
    asked: list[str | Path] = [
        "generate", tiny("llama-gqa").path, "--prompt-ids", "11,5,9,11", "--max-tokens", "6",
        "--temperature", "0", "--ignore-eos", "--logit-bias", "11=100",
    ]  # fmt: skip
    assert command(*asked)[1]["ids"] == [11] * 6
    once = command(*asked, "--frequency-penalty", "100")[1]["ids"]
    assert once[0] == 11 and len(set(once)) == 6  # the prompt's tokens do not count


def test_a_question_from_a_pipe_ends_at_a_stop_text(
    local_ray: None, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = TinyCheckpoint(words).greedy_after([5, 9, 2], 12)
    stop = next(i for i in range(4, 12) if expected[i] not in expected[:i])
    monkeypatch.setattr("sys.stdin", io.StringIO("w5 w9\nw2\n"))
    lines, result = command(
        "generate", words, "--chat", "--stop", f"w{expected[stop]}", "--stop", "nowhere",
        "--temperature", "0", "--ignore-eos", "--max-tokens", "12", "--exchange", "calls",
        "--context", "64",
    )  # fmt: skip
    text = " ".join(f"w{token}" for token in expected[:stop])
    assert result["finish_reason"] == "stop"
    assert result["text"].strip() == text
    assert lines == [result["text"]]
    assert result["ids"] == expected[: stop + 1]


@pytest.mark.parametrize(
    ("end", "number", "status"),
    [
        (os.killpg, signal.SIGINT, 130),
        # As in tests/e2e/test_chat_terminal.py, but in the midst of an answer.
        pytest.param(os.kill, signal.SIGTERM, 143, marks=pytest.mark.thorough),
    ],
)
def test_text_streams_by_its_seed_until_a_signal(
    local_ray: None, words: Path, end: Callable[[int, int], None], number: int, status: int
) -> None:
    """A pipe sees text long before the end; Ctrl-C, which reaches Ray's processes too, ends it.

    So does SIGTERM, which the command alone gets. Nothing but the status tells of either.
    """
    arguments: list[str | Path] = ["generate", words, "--prompt", "w1 w2", *SEEDED]
    _, result = command(*arguments, "--max-tokens", "20", "--context", "64")
    long = [*arguments, "--max-tokens", "50000", "--context", "50100"]
    with ray_folder() as folder:
        with subprocess.Popen(
            command_line(long), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=environment(folder), start_new_session=True, bufsize=0,
        ) as process:  # fmt: skip
            assert process.stdout is not None and process.stderr is not None
            text = b""
            while text.count(b" ") < 25 and (chunk := process.stdout.read(64)):
                text += chunk
            assert process.poll() is None, process.stderr.read().decode()
            end(process.pid, number)
            rest, err = process.communicate(timeout=90)
        assert (process.returncode, err.decode().strip()) == (status, "")
        assert (text + rest).count(b" ") < 45000
        assert processes_left(folder) == []
    found = [int(word) for word in re.findall(rb"w(\d+)", text)]
    assert found[:20] == [token for token in result["ids"] if token < 100]


def test_bench(local_ray: None, words: Path, little_memory_read: None) -> None:
    lines, report = command(
        "bench", "exchange", words, "--rounds", "20", "--context", "64", "--cpu-actors", "2",
    )  # fmt: skip
    assert 0 < report["us_min"] <= report["us_median"] <= report["us_p99"]
    assert set(report["idle_cpu_share"]) == {"gpu", "cpu0", "cpu1"}
    assert "median" in lines[0]
    sizes = ["--repeat", "1", "--context", "64", "--prompt-tokens"]
    lines, report = command("bench", "decode", words, *sizes, "4", "--tokens", "5")
    assert "tokens/s" in lines[0]
    assert report["tokens_per_s"] > 0 and report["gb_per_s"] > 0 and report["read_gb_per_s"] > 0
    assert 0 < report["density"] < 1
    assert {"attention", "head", "ffn", "exchange", "python"} <= set(report["per_token_ms"])
    lines, report = command("bench", "prefill", words, *sizes, "20")
    assert "tokens/s" in lines[0] and report["tokens_per_s"] > 0 and report["read_gb_per_s"] > 0


def test_bench_kernels() -> None:
    """Of whole blocks no down row is; formats that cannot be so wide are left out."""
    lines, report = command(
        "bench", "kernels", "--hidden", "256", "--ffn", "96", "--layers", "2", "--repeat", "1",
        "--threads", "1", "--tokens", "1", "--tokens", "5", "--dtype", "q4_1", "--dtype", "q6",
        "--density", "0.05",
    )  # fmt: skip
    assert report["gb_per_s"] > 0 and report["read_gb_per_s"] > 0
    found, rows = report["kernels"], ["rows x vector", "rows x 5 vectors"]
    assert {dtype: list(parts) for dtype, parts in found.items()} == {
        "q4_1": [*rows, "sparse FFN at 5%"], "q6": rows
    }  # fmt: skip
    for parts in found.values():
        assert all(number > 0 for part in parts.values() for number in part.values())
        assert all(parts[name]["share_of_peak"] < 1 for name in rows)
    assert f"q4_1 {rows[0]}" in lines[1]
    refused = run_main("bench", "kernels", "--hidden", "96", "--dtype", "q6").refusal
    assert "no rows of q6 are 96 wide" in refused
