"""What the server answers before the model is loaded."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from hotcold.ui.server_thread import LoadingGate


@pytest.fixture
def client() -> TestClient:
    gate = LoadingGate("<b>model</b>")
    gate.stage = "loading weights & more"
    return TestClient(gate)


def test_a_browser_gets_a_page_that_asks_again(client: TestClient) -> None:
    answer = client.get("/", headers={"accept": "text/html,*/*;q=0.8"})
    assert answer.status_code == 503 and answer.headers["content-type"].startswith("text/html")
    assert 'http-equiv="refresh"' in answer.text
    assert "&lt;b&gt;model&lt;/b&gt; is loading" in answer.text
    assert "loading weights &amp; more" in answer.text


@pytest.mark.parametrize("path", ["/", "/v1/chat/completions", "/metrics"])
def test_a_program_gets_an_error_to_come_back_for(client: TestClient, path: str) -> None:
    answer = client.get(path, headers={"accept": "application/json"})
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert "loading weights & more" in answer.json()["error"]["message"]


def test_a_client_of_ollama_gets_its_own_kind_of_error(client: TestClient) -> None:
    answer = client.post("/api/chat", json={"model": "demo"})
    assert answer.status_code == 503
    assert "loading weights & more" in answer.json()["error"]


def test_health_says_how_far_it_is(client: TestClient) -> None:
    found = client.get("/health").json()
    assert found == {
        "status": "loading",
        "stage": "loading weights & more",
        "model": "<b>model</b>",
    }
