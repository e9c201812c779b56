"""The page's queue of events takes no processor while it is empty, and loses none."""

import json
import time
from collections.abc import Iterator
from typing import Any

import gradio as gr
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from gradio.queueing import Queue

from hotcold.ui.page.waiting_queue import wait_for_events

_IDLE_S = 0.3


class CountedJobs(list[Any]):
    """A list that notes in `seen` whenever somebody goes through it."""

    def __init__(self, jobs: list[Any], seen: list[None]) -> None:
        super().__init__(jobs)
        self._seen = seen

    def __iter__(self) -> Iterator[Any]:
        self._seen.append(None)
        return super().__iter__()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows whenever somebody looks which events a queue has, or which of them run."""
    seen: list[None] = []
    length = Queue.__len__

    def counted(self: Queue) -> int:
        seen.append(None)
        return length(self)

    start = Queue.start

    def start_counted(self: Queue) -> None:
        start(self)
        self.active_jobs = CountedJobs(self.active_jobs, seen)

    monkeypatch.setattr(Queue, "__len__", counted)
    monkeypatch.setattr(Queue, "start", start_counted)
    return seen


def test_empty_queue_waits_and_takes_each_event(looks: list[None]) -> None:
    with gr.Blocks(analytics_enabled=False) as page:
        shown = gr.Number(1)
        gr.Button().click(lambda number: number + 1, shown, shown)
    app = gr.mount_gradio_app(FastAPI(), page, "/", ssr_mode=False)
    wait_for_events(page._queue)
    with TestClient(app) as client:
        client.get("/config").raise_for_status()
        _await_idle(looks)
        for number in (3, 7):
            assert _answer(client, page, number) == [number + 1]
            _await_idle(looks)


def _await_idle(looks: list[None]) -> None:
    """Until hardly anybody looks, once an event has done what is left to do."""
    for _ in range(100):
        looks.clear()
        time.sleep(_IDLE_S)
        if len(looks) <= 4:
            return
    raise AssertionError(f"{len(looks)} looks at an empty queue in {_IDLE_S} s")


def _answer(client: TestClient, page: gr.Blocks, number: int) -> list[Any]:
    """What the page's only event answers."""
    (function,) = page.fns
    event = {"data": [number], "fn_index": function, "session_hash": f"session{number}"}
    client.post("/gradio_api/queue/join", json=event).raise_for_status()
    answers = client.get(f"/gradio_api/queue/data?session_hash=session{number}").text
    messages = [json.loads(line[6:]) for line in answers.splitlines() if line[:6] == "data: "]
    (done,) = [each for each in messages if each["msg"] == "process_completed"]
    return done["output"]["data"]
