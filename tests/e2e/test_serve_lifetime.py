"""The life of `hotcold serve`: its start, what ends it, and what it does about models that fail."""

from __future__ import annotations

import json
import re
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.commands import run_here
from tests.e2e.page_visit import QUESTION, TIMEOUT_MS, ask, wait_for_answer
from tests.e2e.server import LONG, Server, serving


def test_a_second_start_says_who_runs(server: Server) -> None:
    done = run_here("serve", "--port", server.port)
    assert done.status == 1 and len(done.error_lines) == 1
    assert f"hotcold already serves demo at {server.url}" in done.err
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        answering = threading.Thread(target=lambda: other.accept()[0].close(), daemon=True)
        answering.start()
        done = run_here("serve", "--port", port)
    assert done.status == 1 and len(done.error_lines) == 1
    assert f"port {port}" in done.err and "another program" in done.err


SHOWN = ("environ", "cmdline")  # of a process, to its user


def test_drains_once_asked_and_needs_its_key(openai: Any) -> None:
    keys = ["the-secret-of-one", "the-key-of-another"]
    given = {name: " ".join(keys) for name in ("HOTCOLD_API_KEY", "HOTCOLD_SERVE_API_KEY")}
    with serving("--kv-tokens", "1024", changes=given) as server:
        own = psutil.Process(server.process.pid)
        for one in (own, *own.children(recursive=True)):
            with suppress(FileNotFoundError, ProcessLookupError):  # a worker that nobody needs ends
                # Not by psutil, which reads no further than where a process has a title.
                told = [Path(f"/proc/{one.pid}/{name}").read_bytes() for name in SHOWN]
                assert not any(key.encode() in text for key in keys for text in told), one
        assert httpx.get(f"{server.url}/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer the-secret"}, {"Authorization": "Basic e"}):
            answer = httpx.get(f"{server.url}/v1/models", headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{server.url}/metrics", auth=("anyone", keys[0])).status_code == 200
        client: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key=keys[1], max_retries=0)
        texts = [client.completions.create(model="demo", **LONG).choices[0].text]
        streams = [client.completions.create(model="demo", **LONG, stream=True) for _ in range(2)]
        firsts = [next(iter(stream)).choices[0].text for stream in streams]
        server.press_ctrl_c()
        texts += [
            first + "".join(chunk.choices[0].text for chunk in stream)
            for first, stream in zip(firsts, streams, strict=True)
        ]
        assert len(set(texts)) == 1, "draining changed or cut an answer"
        status, err = server.end()
        assert status == 0
        assert "finishing" in err or not err
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_the_page_comes_at_its_first_view_and_a_second_ctrl_c_stops_at_once(
    browser: Any, openai: Any
) -> None:
    with serving("--kv-tokens", "2048", has_page=True) as server:
        views(browser, server)
        stops_at_once(openai, server)


def views(browser: Any, server: Server) -> None:
    """Until then pandas, which Gradio imports, is not even imported."""
    libraries = Path(f"/proc/{server.process.pid}/maps")
    assert server.post("/v1/completions", {"prompt": "Return", "max_tokens": 2}).is_success
    assert httpx.head(server.url).is_success
    assert "/numpy/" in libraries.read_text() and "/pandas/" not in libraries.read_text()
    page = browser.new_context().new_page()
    page.goto(server.url, timeout=TIMEOUT_MS)
    page.set_default_timeout(TIMEOUT_MS)
    page.wait_for_selector("body[data-chat=ready][data-state=ready] #question textarea")
    ask(page, QUESTION)
    assert wait_for_answer(page)
    assert "/pandas/" in libraries.read_text()
    page.context.close()


def stops_at_once(openai: Any, server: Server) -> None:
    client: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    streams = [client.completions.create(model="demo", **LONG, n=8, stream=True) for _ in range(2)]
    for stream in streams:
        next(iter(stream))
    server.press_ctrl_c()
    assert server.process.stderr is not None
    assert server.process.stderr.readline().startswith("finishing ")
    server.press_ctrl_c()
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        for stream in streams:
            for _ in stream:
                pass
    status, err = server.end()
    assert status == 0 and "Traceback" not in err


def test_services_are_replaced_and_it_ends_when_the_system_has_ended() -> None:
    """What was replaced is in the log. Whoever keeps a server running then starts it again."""
    asked = {"model": "demo", "prompt": "Return the", "max_tokens": 4, "temperature": 0}
    with serving("--log", "json") as server:
        assert server.process.stderr is not None
        for service in actors_of(server, "ServiceActor"):
            service.kill()
        assert server.post("/v1/completions", asked).status_code == 200
        events: list[str] = []
        while not events:  # the line of the answer may come before
            line = json.loads(server.process.stderr.readline())
            events += [line["event"]] if "event" in line else []
            assert line["model"] == "demo"
        one = "(the (gpu|cpu0) service died, and was replaced)"
        both = "(the cpu0 service died, the gpu service died, and were replaced)"  # at once
        other = "(the gpu service died, the cpu0 service died, and were replaced)"
        assert re.fullmatch("|".join([one, both, other]), events[0]), events[0]
        (driver,) = actors_of(server, "DriverActor")
        driver.kill()
        status, err = server.end()
        assert status == 1
        (told,) = [line for line in err.splitlines() if not line.startswith("{")]
        assert told.startswith("hotcold: error: the driver died")


def actors_of(server: Server, kind: str) -> set[psutil.Process]:
    """Processes of the actors of that kind, of all models that are loaded."""
    found = set()
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ends
            if f"ray::{kind}" in " ".join(child.cmdline()):
                found.add(child)
    return found


def test_listening_elsewhere_needs_a_key() -> None:
    done = run_here("serve", "--host", "0.0.0.0")
    assert done.status == 1 and len(done.error_lines) == 1
    assert "--api-key" in done.err
