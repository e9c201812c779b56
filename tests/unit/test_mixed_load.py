"""The mixed load's figures, and its hostile clients against a server without a system."""

from __future__ import annotations

import asyncio
import runpy
import socket
import threading
from collections import Counter
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse

from hotcold.ui import connections
from hotcold.ui.api.errors import ApiError
from hotcold.ui.api.schemas import CompletionRequest, parse
from hotcold.ui.connections import ConnectionLimits
from hotcold.ui.server_thread import LoadingGate, ServerThread

_TIMEOUT_S = 60.0
PROGRAM = runpy.run_module("benchmarks.mixed_load")  # nothing imports it


def sample(at_s: float, figure: float) -> dict[str, Any]:
    held = dict.fromkeys(("open_files", "threads", "processes", "shared_memory_mb"), figure)
    return {"at_s": at_s, "resident_mb": {"server": figure}, **held}


def test_growth_is_told_from_before_to_after() -> None:
    samples = [sample(at_s, at_s) for at_s in range(10, 1210, 10)]
    found = PROGRAM["growth"](sample(0, 1), samples, sample(1300, 2))
    # The minute after the fifth has its median between 320 and 330, the last between 1170 and 1180.
    assert found["open files"] == found["resident MB, server"] == [1, 325, 1175, 2]
    assert found["resident MB, driver"] == [0, 0, 0, 0]


def test_percentiles() -> None:
    assert PROGRAM["percentiles"]([float(n) for n in range(100, 0, -1)]) == [51, 100]
    assert PROGRAM["percentiles"]([]) == [0, 0]


def test_the_report_has_a_row_for_all_that_is_held() -> None:
    report = {
        "shape": "small", "machine": "m", "date": "d", "clients": 2, "minutes": 5.0,
        "outcomes": {"whole": 3, "silent, cut off": 4}, "tokens_per_s": 10.0,
        "first_token_s": [0.5, 1.0], "answer_s": [1.0, 2.0], "growth": {"threads": [1, 2, 3, 4]},
    }  # fmt: skip
    text = PROGRAM["table_of"](report)
    assert "7 requests: 3 whole, 4 silent, cut off" in text
    assert "| threads | 1.0 | 2.0 | 3.0 | 4.0 |" in text


_PIECE = {"type": "http.response.body", "body": b"x" * (1 << 16), "more_body": True}


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Refuses what the API's schema refuses, and many prompts; another answer goes on for ever."""
    try:
        body = await Request(scope, receive).body()
        if len(parse(CompletionRequest, body).prompts) > 1:
            raise ApiError(400, "too many")
    except ApiError as error:
        await JSONResponse(error.body, error.status)(scope, receive, send)
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    gone = asyncio.ensure_future(receive())
    while not gone.done():
        await send(_PIECE)
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("SilentClient", "silent, cut off"),
        ("StalledReader", "stalled, cut off"),
        ("Flood", "too much, refused"),
    ],
)
def test_hostile_clients_see_what_the_server_does_to_them(
    kind: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_POLL_S", 0.01)
    listener = socket.create_server(("127.0.0.1", 0))
    loading = LoadingGate("demo")
    loading.use(answer)
    limits = ConnectionLimits(head_s=0.05, body_s=0.05, send_s=0.05)
    server = ServerThread(listener, loading, [], True, 4 << 20, limits)
    tally = PROGRAM["Tally"]()
    ended = _Seen(tally.outcomes, outcome)
    try:
        client = PROGRAM[kind](listener.getsockname()[1], tally)
        running = threading.Thread(target=client.run_until, args=(ended,), daemon=True)
        running.start()
        running.join(_TIMEOUT_S)
        assert not running.is_alive()
    finally:
        server.stop()
    assert tally.outcomes[outcome] > 0 and tally.wrong == []


class _Seen:
    """An event that is set once something has been counted."""

    def __init__(self, outcomes: Counter[str], outcome: str) -> None:
        self._outcomes, self._outcome = outcomes, outcome

    def is_set(self) -> bool:
        return self._outcomes[self._outcome] > 0
