"""One file of requests, answered from the command line, as a Ray job, over HTTP, by two hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.head import ROOT, running_head
from tests.e2e.server import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

GREEDY = {"temperature": 0, "max_tokens": 40}
DRAWN = {"temperature": 0.8, "seed": 7, "max_tokens": 40, "ignore_eos": True}
QUESTION = [{"role": "user", "content": "What does textwrap.dedent do?"}]
REQUESTS: list[dict[str, Any]] = [
    {"id": "prompt", "prompt": "Return the", "sampling": GREEDY},
    {"id": "chat", "messages": QUESTION, "sampling": GREEDY},
    {"id": "ids", "ids": list(range(100, 180)), "sampling": GREEDY},
    {"id": "drawn", "prompt": "Return the", "sampling": DRAWN},
    {"id": "stop", "messages": QUESTION, "sampling": GREEDY | {"stop": ["a"]}},
]


def job(requests: Path, out: Path, *more: str) -> list[str]:
    command = [sys.executable, "-m", "jobs.generate", "--requests", str(requests)]
    return [*command, "--out", str(out), "--cpu-actors", "2", *more]


def texts(out: Path) -> dict[str, str]:
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    return {answer["id"]: answer["text"] for answer in answers}


def over_http() -> dict[str, str]:
    """The same requests in OpenAI's words."""
    found = {}
    with serving("--cpu-actors", "2") as server:
        for line in REQUESTS:
            body = dict(line["sampling"])
            chat = "messages" in line
            if chat:
                body["messages"] = line["messages"]
            else:
                body["prompt"] = line.get("prompt", line.get("ids"))
            route = "/v1/chat/completions" if chat else "/v1/completions"
            answer = server.post(route, body).json()
            choice = answer["choices"][0]
            found[line["id"]] = choice["message"]["content"] if chat else choice["text"]
    return found


def test_the_same_answers_four_ways(tmp_path: Path) -> None:
    requests = tmp_path / "in.jsonl"
    requests.write_text("".join(f"{json.dumps(line)}\n" for line in REQUESTS))

    local = tmp_path / "local.jsonl"
    plain = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    subprocess.run(job(requests, local), cwd=ROOT, env=plain, check=True, timeout=300)
    expected = texts(local)
    assert list(expected) == [line["id"] for line in REQUESTS]
    assert all(expected.values())

    submitted = tmp_path / "submitted.jsonl"
    with running_head(num_cpus=2) as head:
        status, log = head.run(*job(requests, submitted))
    assert status == 0, log
    assert texts(submitted) == expected

    assert over_http() == expected

    permitted = [sys.executable, "-m", "benchmarks.shaped_link"]
    if reason := subprocess.run(permitted, cwd=ROOT, capture_output=True, text=True).stderr.strip():
        pytest.skip(f"the fourth way, two hosts: {reason}")
    far = tmp_path / "far.jsonl"
    command = job(requests, far, "--threads", "1", "--hosts", "HOSTS")
    two_nodes = [sys.executable, "-m", "benchmarks.two_nodes"]
    subprocess.run([*two_nodes, *command], cwd=ROOT, check=True, timeout=300)
    assert texts(far) == expected
