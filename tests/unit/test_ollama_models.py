"""Which models there are, which are loaded and given up, by Ollama's routes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.locate import DEMO_DIRECTORY
from tests.unit.ollama_routes import CONTEXT, HELLO, Recording, post, send
from tests.unit.test_served_models import House, house, until


def test_words_that_are_missing_load_the_model() -> None:
    recording = Recording()
    for path in ("/api/generate", "/api/chat"):
        for keep_alive in (-1, 0):  # an only model stays
            answer = post(recording, path, keep_alive=keep_alive).json()
            assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert post(recording, "/api/embeddings").json() == {"embedding": []}
    assert post(recording, "/api/embed", input="").json()["embeddings"] == []
    assert recording.requests == []


def test_models_as_ollama_lists_them() -> None:
    (listed,) = send(Recording(), "GET", "/api/tags")[0].json()["models"]
    (running,) = send(Recording(), "GET", "/api/ps")[0].json()["models"]
    shown = post(Recording(), "/api/show", name="demo:latest").json()
    assert listed["name"] == listed["model"] == running["name"] == "demo:latest"
    assert listed["digest"] == running["digest"] == ModelIdentity.of(DEMO_DIRECTORY).digest
    size = (DEMO_DIRECTORY / "model.safetensors").stat().st_size
    assert 0.9 * size < listed["size"] < size
    assert listed["details"]["parameter_size"].endswith("M")
    assert listed["details"]["family"] == shown["model_info"]["general.architecture"]
    assert running["size"] > 0 and running["context_length"] == CONTEXT
    family = listed["details"]["family"]
    assert shown["model_info"][f"{family}.embedding_length"] == 384
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["template"] == (DEMO_DIRECTORY / "chat_template.jinja").read_text()
    for path in ("/api/version", "/api/tags", "/"):
        answer = send(Recording(), "HEAD", path)[0]
        assert (answer.status_code, answer.text) == (200, "")
    assert send(Recording(), "GET", "/")[0].text == "Ollama is running"


@house(room=1)
async def test_of_several_models_the_one_that_is_named_is_loaded(house: House) -> None:
    async def names(path: str) -> list[str]:
        return [model["name"] for model in (await house.http.get(path)).json()["models"]]

    assert await names("/api/tags") == ["a:latest", "b:latest", "c:latest"]
    assert await names("/api/ps") == []
    told = await house.http.post("/api/generate", json={"model": "b"})
    assert told.json()["done_reason"] == "load" and house.loaded == "b"
    asked = {"model": "c:latest", "messages": HELLO, "stream": False}
    answer = (await house.http.post("/api/chat", json=asked)).json()
    assert (answer["model"], answer["message"]["content"]) == ("c:latest", "c")
    assert await names("/api/ps") == ["c:latest"]


ASKED: dict[str, dict[str, Any]] = {
    "/api/generate": {"prompt": "a", "stream": False},
    "/api/chat": {"messages": HELLO},
    "/api/embed": {"input": ["a", "b", "c", "d", "e"]},  # more than run at once
    "/api/embeddings": {"prompt": "a"},
}


@pytest.mark.parametrize(
    ("path", "keep_alive"), [(path, "0m0.0s" if path == "/api/chat" else 0) for path in ASKED]
)
def test_a_model_that_is_not_to_stay_is_given_up_after_the_answer(
    path: str, keep_alive: Any
) -> None:
    @house(room=3)
    async def ask(house: House) -> None:
        body = {"model": "b", **ASKED[path]}
        assert (await house.http.post(path, json=body)).status_code == 200
        await house.http.post(path, json={**body, "keep_alive": "10m"})
        assert house.loaded == "b"
        await house.http.post(path, json={**body, "keep_alive": keep_alive})
        assert house.loaded == ""
        end = {"model": "b", "keep_alive": keep_alive}  # one that is not loaded stays so
        assert (await house.http.post("/api/chat", json=end)).json()["done_reason"] == "unload"
        await until(lambda: house.starts == ["start b", "end b"])
        await house.http.post(path, json=body)
        assert house.loaded == "b"

    ask()


@house(room=3, names="a")
async def test_an_only_model_stays(house: House) -> None:
    given = {"model": "a", "keep_alive": 0}
    for path, asked in ASKED.items():
        assert (await house.http.post(path, json={**given, **asked})).status_code == 200
    told = (await house.http.post("/api/generate", json=given)).json()
    assert told["done_reason"] == "load"
    assert house.starts == ["start a"] and house.loaded == "a"


@house(room=3)
async def test_a_model_that_cannot_be_read_hides_no_other(house: House) -> None:
    """Its files are gone: it answers on where it is loaded, and is listed for that."""
    assert await house.ask("b") == "b"
    gone = replace(house.of["b"].config, model_path="/nowhere")
    house.of["b"].config = gone
    house.of["c"].config = gone
    tags, running = [
        (await house.http.get(path)).json()["models"] for path in ("/api/tags", "/api/ps")
    ]
    assert [model["name"] for model in tags] == ["a:latest", "b:latest", "c:latest"]
    assert [model["digest"] != "" for model in tags] == [True, False, False]
    assert tags[1]["details"]["family"] == tags[0]["details"]["family"]
    (one,) = running
    assert (one["name"], one["size"], one["digest"]) == ("b:latest", 0, "")
    assert len((await house.http.get("/v1/models")).json()["data"]) == 3


@house(room=3)
async def test_a_model_is_given_up_once_it_has_loaded(house: House) -> None:
    house.may_load.clear()
    asked = asyncio.create_task(house.ask("b"))
    await until(lambda: house.log[-1:] == ["start b"])
    asked.cancel()  # the one who had it loaded goes away
    with pytest.raises(asyncio.CancelledError):
        await asked
    await house.http.post("/api/generate", json={"model": "b", "keep_alive": 0})
    house.may_load.set()
    await until(lambda: house.starts == ["start b", "end b"])
    load = asyncio.create_task(house.http.post("/api/generate", json={"model": "b"}))
    assert (await load).json()["done_reason"] == "load" and house.loaded == "b"
    house.of["b"].attend(1)
    house.of["b"].attend(-1)
    assert house.loaded == "b"


@house(room=3)
async def test_a_model_stays_until_nobody_needs_it(house: House) -> None:
    end = {"model": "b", "keep_alive": 0}
    assert await house.ask("b") == "b"
    house.may_answer.clear()
    asked = asyncio.create_task(house.ask("b"))
    await until(lambda: house.of["b"].num_active == 1)
    house.of["b"].attend(1)  # as `hotcold chat` does
    assert (await house.http.post("/api/generate", json=end)).json()["done_reason"] == "unload"
    house.may_answer.set()
    assert await asked == "b" and house.loaded == "b"
    house.of["b"].attend(-1)
    assert house.loaded == ""
