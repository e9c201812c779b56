"""Jobs as users submit them, to a real head: one system, started, shared, resumed, ended."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.head import Head
from tests.cluster.request_files import GREEDY, read_lines, write_lines
from tests.conftest import TinyCheckpoint
from tests.e2e.word_model import words_of
from tests.tiny_models import VOCAB_SIZE

GENERATE = ("python", "-m", "jobs.generate")


def test_jobs_share_a_system(
    head: Head, checkpoint: TinyCheckpoint, model: Path, tmp_path: Path
) -> None:
    ids, expected = checkpoint.ids[:10].tolist(), checkpoint.greedy_ids
    text = " ".join(words_of(ids))
    mixed = write_lines(
        tmp_path / "mixed.jsonl",
        [
            {"id": "ids", "ids": ids, "sampling": GREEDY},
            "not json",
            {"id": "ids", "ids": ids},
            {"id": "high", "ids": [VOCAB_SIZE]},
            {"id": "empty", "prompt": ""},
            {"id": "long", "ids": [1] * 200},
            {"id": "extra", "ids": ids, "temperature": 0},
            {"id": "top", "ids": ids, "sampling": {"top_k": -2}},
            {"id": 9, "ids": ids, "sampling": GREEDY | {"max_tokens": 3}},
        ],
    )
    message = {"role": "user", "content": text}
    good = write_lines(
        tmp_path / "texts.jsonl",
        [
            {"id": "text", "prompt": text, "sampling": GREEDY},
            {"id": "greeting", "messages": [message], "sampling": GREEDY},
        ],
    )
    system = ("--system", "shared", "--keep", "--model", str(model))
    outs = [tmp_path / "out" / "mixed.jsonl", tmp_path / "out" / "texts.jsonl"]
    outs[0].parent.mkdir()
    jobs = [
        head.submit(*GENERATE, "--requests", str(requests), "--out", str(out), *system)
        for requests, out in zip((mixed, good), outs, strict=True)
    ]
    logs = [job.communicate(timeout=600)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(logs)
    assert sorted(head.actors().values()) == ["ray::DriverActor"] + 2 * ["ray::ServiceActor"]

    assert "2 requests answered, 7 with an error in " in logs[0]
    assert str(outs[0]) in logs[0]
    answers = read_lines(outs[0])
    assert [answer["id"] for answer in answers] == [
        "ids", None, "ids", "high", "empty", "long", "extra", "top", 9,
    ]  # fmt: skip
    errors = ["not JSON", "used by a line above", "not in the vocabulary 0..100", "is empty"]
    errors += ["200 tokens", "unknown key 'temperature'", "top_k is -2"]
    for number, (answer, error) in enumerate(zip(answers[1:-1], errors, strict=True), 2):
        assert set(answer) == {"id", "error"}
        assert answer["error"].startswith(f"line {number}: ")
        assert error in answer["error"]
    assert answers[0]["ids"] == expected
    assert answers[0]["finish_reason"] == "length"
    assert answers[0]["prefill_s"] > 0
    assert answers[0]["decode_s"] > 0
    assert answers[-1]["ids"] == expected[:3]
    for answer in read_lines(outs[1]):
        assert answer["ids"] == expected
        assert answer["text"].split() == words_of(expected)

    resumes(head, mixed, outs[0], answers)
    ends(head)


def resumes(head: Head, requests: Path, out: Path, answers: list[dict[str, Any]]) -> None:
    """Whoever comes later attaches by name alone and completes a file cut off within a line.

    A job's command, without the job around it: that costs as much again.
    """
    running = head.actors()
    out.write_bytes(out.read_bytes()[:-20])
    resume = ("--requests", str(requests), "--out", str(out), "--system", "shared", "--resume")
    status, log = head.run_beside(*GENERATE, *resume)
    assert status == 0, log
    assert "1 requests answered, 0 with an error, 8 were there already" in log
    found = read_lines(out)
    assert found[:-1] == answers[:-1]
    assert found[-1]["ids"] == answers[-1]["ids"]
    assert head.actors() == running


def ends(head: Head) -> None:
    """jobs.stop leaves no process; there is nothing to stop then, and it says so."""
    stop = ("python", "-m", "jobs.stop", "--system", "shared")
    status, log = head.run_beside(*stop)
    assert status == 0, log
    deadline = time.monotonic() + 60
    while head.actors() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert head.actors() == {}
    status, log = head.run_beside(*stop)
    assert status == 1
    assert "hotcold: error: no system named 'shared' is running" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("given", "told"), [({}, "none is given here"), ({"RAY_AUTH_TOKEN": "0" * 64}, "another one")]
)
def test_a_head_that_wants_a_token_says_so(head: Head, given: dict[str, str], told: str) -> None:
    own = {k: v for k, v in head.environment.items() if not k.startswith("RAY_AUTH")}
    own |= {"RAY_AUTH_MODE": "token" if given else "disabled", **given}
    status, log = replace(head, environment=own).run_beside(
        "python", "-m", "jobs.stop", "--system", "x"
    )
    assert status == 1 and log.count("\n") == 1, log
    assert "wants its token" in log and told in log


def test_a_wrong_token_is_refused(head: Head, tmp_path: Path) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("0" * 64)
    ran = tmp_path / "ran"
    status, log = head.run("touch", str(ran), RAY_AUTH_TOKEN_PATH=str(wrong))
    assert status != 0
    assert "authentication" in log.lower()
    assert not ran.exists()
