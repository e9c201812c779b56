"""One file of requests, answered from the command line, as a Ray job, over HTTP, by two hosts.

The Ray job is in test_job.py and the two hosts are in test_two_hosts.py, where such systems run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.request_files import REQUESTS
from tests.e2e.server import serving

pytestmark = [pytest.mark.timeout(420), pytest.mark.thorough]


def test_the_same_answers_over_http(model: Path, expected_texts: dict[str, str]) -> None:
    """The same requests in OpenAI's words."""
    found = {}
    with serving(str(model), "--cpu-actors", "2") as server:
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
    assert found == expected_texts
