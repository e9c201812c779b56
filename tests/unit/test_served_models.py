"""Several models behind one server: which are loaded, which give way, what those hear who wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from hotcold.actors.protocol.messages import (
    DriverLoad,
    GenerateRequest,
    Generation,
    SystemConfig,
    TokenEvent,
)
from hotcold.actors.telemetry.experts import ExpertCounts
from hotcold.jobs.commands.serve import _serve
from hotcold.model.errors import MemoryBudgetError, ServiceError
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.ui.api.backend import Backend, ServerSettings
from hotcold.ui.api.served_models import ServedModels
from hotcold.ui.app import create_app
from hotcold.ui.model_loading import ModelLoader, Need

WAIT_S = 30.0


class StandIn:
    """A system that answers each request with its model's name, once it may."""

    def __init__(self, name: str, may_answer: asyncio.Event) -> None:
        self.name = name
        self.failure: ServiceError | None = None
        self._may_answer = may_answer
        self._asked: dict[str, GenerateRequest] = {}
        self._num_given = 0

    def begin(self, method: str, *args: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._do(method, *args))

    async def _do(self, method: str, *args: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        if method == "driver_load":
            experts = ExpertCounts(np.array([2]), 1, *np.array([[[5, 7]], [[3, 4]]]))
            return DriverLoad(
                len(self._asked), 0, 0.0, experts=experts if any(args) else None,
            )  # fmt: skip
        if method == "submit":
            self._asked[args[1].request_id] = args[1]
        if method == "cancel":
            del self._asked[args[0]]
        if method != "take_events":
            return None
        await self._may_answer.wait()
        asked, self._asked = self._asked, {}
        self._num_given += len(asked)
        end = TokenEvent(self.name, Generation(self.name, [7], "stop", 2, 0.1, 0.1), 1)
        vector = Generation("", [], "stop", 2, 0.1, 0.0, embedding=[3.0, 4.0])
        return self._num_given, [
            (request_id, TokenEvent("", vector) if request.wants_embedding else end)
            for request_id, request in asked.items()
        ]

    def cancel(self, request_id: str) -> None:
        del self._asked[request_id]


class House:
    """Models a, b and c of one size, of which `room` may be loaded, and what happens to them."""

    def __init__(
        self, room: int, gpus: str = "", timeout_s: float = WAIT_S, names: str = "abc"
    ) -> None:
        self.log: list[str] = []
        self.may_load = threading.Event()
        self.may_load.set()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.free, self.free_later = 100, 100  # of memory; and once a model has ended
        self.problem: Exception | None = None
        self.loader = ModelLoader(self, room * 10, lambda: self.free, self.tell)
        config = SystemConfig(str(DEMO_DIRECTORY), context_length=128, max_batch=2)
        self.of: dict[str, Backend] = {}
        for name in names:
            settings = ServerSettings(name, 1, 100, timeout_s)
            self.of[name] = Backend(config, settings, self.loader)
            self.loader.add(self.of[name], Need(10, name in gpus))
        self.models = ServedModels(list(self.of.values()))
        transport = httpx.ASGITransport(create_app(self.models), raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def tell(self, event: str, name: str) -> None:
        self.log.append(f"{event} {name}")

    def start(self, backend: Backend) -> Any:
        self.log.append(f"start {backend.name}")
        assert self.may_load.wait(WAIT_S)
        if self.problem is not None:
            raise self.problem
        return StandIn(backend.name, self.may_answer)

    def end(self, backend: Backend, system: Any) -> None:
        assert not backend.is_loaded and backend.is_idle
        self.log.append(f"end {system.name}")
        self.free = self.free_later

    async def ask(self, name: str | None, path: str = "/v1/completions", **body: Any) -> Any:
        """What is answered, or the code of the error."""
        body = {"prompt": [1, 2], "model": name, **body}
        answer = await self.http.post(path, json=body)
        told = answer.json()
        if answer.status_code == 200:
            return told["choices"][0]["text"]
        return answer.status_code, told["error"]["code"], told["error"]["message"]

    @property
    def loaded(self) -> str:
        return "".join(name for name, backend in self.of.items() if backend.is_loaded)

    @property
    def starts(self) -> list[str]:
        return [line for line in self.log if line.startswith(("start", "end"))]


def house(
    room: int, **options: Any
) -> Callable[[Callable[[House], Awaitable[None]]], Callable[[], None]]:
    """Runs a test in a loop, with a house."""

    def decorated(test: Callable[[House], Awaitable[None]]) -> Callable[[], None]:
        def run() -> None:
            async def within() -> None:
                async with asyncio.timeout(WAIT_S):
                    await test(House(room, **options))

            asyncio.run(within())

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorated


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@house(room=2)
async def test_the_least_recently_used_gives_way(house: House) -> None:
    for name in ("a", "b", None, "c"):
        assert await house.ask(name) == (name or "a")
    assert house.loaded == "ac" and house.starts[-2:] == ["end b", "start c"]
    assert house.log[-5:] == ["given up b", "end b", "loading c", "start c", "loaded c"]


@house(room=1)
async def test_who_is_asked_is_not_cut(house: House) -> None:
    house.may_answer.clear()
    asked = asyncio.create_task(house.ask("a"))
    await until(lambda: house.loaded == "a")
    status, code, text = await house.ask("b")
    assert (status, code) == (503, "no_room")
    assert text == (
        "the model 'b' needs 10 B and has no room beside 'a', in use now; try again later"
    )
    house.may_answer.set()
    assert await asked == "a" and await house.ask("b") == "b"


@house(room=3)
async def test_memory_that_others_have_taken_is_made_room_for(house: House) -> None:
    assert await house.ask("a") == "a"
    house.free = 9
    assert await house.ask("b") == "b"
    assert house.starts == ["start a", "end a", "start b"]
    house.free, house.free_later = 0, 9  # what b gives back is less than it was to take
    status, code, text = await house.ask("a")
    assert (status, code) == (503, "no_room") and "what other programs have taken" in text
    assert house.loaded == "" and house.starts[-1] == "end b"


@house(room=3)
async def test_none_is_given_up_in_vain(house: House) -> None:
    assert await house.ask("a") == "a"
    house.loader.add(house.of["b"], Need(30))
    house.free = 19
    assert (await house.ask("b"))[1] == "no_room" and house.loaded == "a"
    house.free = 20
    assert await house.ask("b") == "b" and house.loaded == "b"


@house(room=3, gpus="ab")
async def test_a_gpu_holds_one(house: House) -> None:
    for name in "acb":
        assert await house.ask(name) == name
    assert house.loaded == "bc" and "end a" in house.starts


@house(room=1)
async def test_all_who_wait_have_it_loaded_once(house: House) -> None:
    house.may_load.clear()
    waiting = [asyncio.create_task(house.ask("b")) for _ in range(3)]
    await until(lambda: house.of["b"].num_active == 3 and house.of["b"].state == "loading")
    assert (await house.ask("b"))[1] == "queue_full"
    found = (await house.http.get("/health")).json()
    assert found == {
        "status": "ok", "model": "a",
        "models": [
            {"model": "a", "state": "not loaded"}, {"model": "b", "state": "loading"},
            {"model": "c", "state": "not loaded"},
        ],
    }  # fmt: skip
    house.may_load.set()
    assert await asyncio.gather(*waiting) == ["b"] * 3
    assert house.starts == ["start b"]


@house(room=1, timeout_s=0.1)
async def test_who_waits_too_long_for_a_model_is_told_so(house: House) -> None:
    house.may_load.clear()
    for path, prompt in (("/v1/completions", {"prompt": [1]}), ("/api/generate", {})):
        told = await house.http.post(path, json={"model": "b", **prompt})
        assert told.status_code == 504 and "was still loading; ask again" in told.text
    house.may_load.set()


@house(room=1)
async def test_what_cannot_be_loaded_says_why_and_is_tried_again(house: House) -> None:
    house.problem = MemoryBudgetError("this model needs more")
    status, code, text = await house.ask("b")
    assert (status, code) == (503, "not_loaded")
    assert text == "the model 'b' cannot be loaded: this model needs more"
    assert house.of["b"].state == "not loaded" and house.of["b"].num_active == 0
    house.problem = None
    assert await house.ask("b") == "b"


@house(room=2)
async def test_one_that_fails_takes_no_other_with_it(house: House) -> None:
    assert [await house.ask(name) for name in "ab"] == ["a", "b"]
    system: Any = house.of["b"].system
    system.failure = ServiceError("the driver died")
    assert (await house.ask("b"))[::2] == (503, "the driver died")
    await house.loader.drop(house.of["b"], "the driver died")
    assert house.loaded == "a" and house.log[-2:] == ["lost (the driver died) b", "end b"]
    assert [await house.ask(name) for name in "ab"] == ["a", "b"]
    assert house.starts == ["start a", "start b", "end b", "start b"]


@house(room=2)
async def test_one_that_fails_is_ended_once_another_has_loaded(house: House) -> None:
    """One starts or ends at a time; requests for it wait from the moment that it is lost."""
    assert await house.ask("b") == "b"
    house.may_load.clear()
    asked = asyncio.create_task(house.ask("a"))
    await until(lambda: house.log[-1] == "start a")
    dropped = asyncio.create_task(house.loader.drop(house.of["b"], "the driver died"))
    await until(lambda: house.log[-1].startswith("lost"))
    assert house.loaded == ""
    await asyncio.sleep(0.05)  # in which it would be ended
    house.may_load.set()
    assert await asked == "a"
    await dropped
    assert house.log[-3:] == ["lost (the driver died) b", "loaded a", "end b"]


@house(room=1)
async def test_all_are_listed_and_counted(house: House) -> None:
    assert await house.ask("b") == "b"
    listed = (await house.http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["a", "b", "c"]
    assert (await house.http.get("/v1/models/c")).json()["max_model_len"] == 128
    assert house.models.page_paths == {"a": "/", "b": "/model/2-b/", "c": "/model/3-c/"}
    assert (await house.ask("d"))[::2] == (
        404, "model 'd' not found; these are: 'a', 'b', 'c'",
    )  # fmt: skip
    lines = (await house.http.get("/metrics")).text.splitlines()
    for line in (
        'hotcold:expert_tokens_total{model_name="b",layer="0",expert="1"} 7',
        'hotcold:model_loaded{model_name="a"} 0.0',
        'hotcold:model_loaded{model_name="b"} 1.0',
        'hotcold:model_loads_total{model_name="b"} 1.0',
        'vllm:request_success_total{finished_reason="stop",model_name="b"} 1.0',
    ):
        assert line in lines
    assert len([line for line in lines if line.startswith("# TYPE hotcold:model_loaded")]) == 1


@house(room=3)
async def test_a_driver_that_does_not_answer_is_not_waited_for(house: House) -> None:
    assert await house.ask("a") == "a"
    system: Any = house.of["a"].system
    system.begin = lambda method, *args: asyncio.get_running_loop().create_future()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotcold.ui.api.served_models._ANSWER_S", 0.01)
        lines = (await house.http.get("/metrics")).text.splitlines()
    assert 'hotcold:model_loaded{model_name="a"} 0.0' in lines


@house(room=1)
async def test_a_bad_prompt_loads_nothing(house: House) -> None:
    for stream in (False, True):
        status, _, text = await house.ask("b", prompt=[99999], stream=stream)
        assert status == 400 and "99999" in text and house.log == []


class Told:
    """Notes what it is asked to do, and answers with what is given for that."""

    count = 1

    def __init__(self, told: list[str], **answers: Callable[..., Any]) -> None:
        self.told, self.answers = told, answers

    def __getattr__(self, method: str) -> Any:
        def do(*given: Any) -> Any:
            self.told.append(method)
            return self.answers[method](*given) if method in self.answers else None

        return do


def served_by_stand_ins(num_models: int, **answers: Callable[..., Any]) -> list[str]:
    """What `_serve` has done to its end: a signal, after one poll. Errors: those of the poll."""
    told: list[str] = []
    backends = list(House(1).of.values())[:num_models]
    models: Any = SimpleNamespace(backends=backends, first=backends[0])
    one: Any = Told(told, **answers, wait=lambda poll: poll())
    routes: Any = SimpleNamespace(left_s=None)
    _serve(one, one, one, models, routes, one)
    return told


def test_a_server_that_ends_is_found_no_more_before_it_refuses() -> None:
    """Else a command could find it, and then not come in."""
    assert served_by_stand_ins(1, lost=list) == [
        "wait", "lost", "require_ray", "unregister_all", "refuse_new", "close", "stop",
    ]  # fmt: skip


def test_the_only_model_takes_the_server_with_it() -> None:
    problem = ServiceError("the driver died")

    def dead() -> None:
        raise ServiceError("Ray has ended")

    def lost() -> list[Any]:
        return [(None, problem)]

    assert served_by_stand_ins(2, lost=lost)[3:5] == ["drop", "begin"]
    with pytest.raises(ServiceError, match="the driver died"):
        served_by_stand_ins(1, lost=lost)
    with pytest.raises(ServiceError, match="Ray has ended"):
        served_by_stand_ins(2, lost=lost, require_ray=dead)


def test_a_model_that_has_just_failed_does_not_keep_the_server_from_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(backend: Backend, method: str) -> Any:
        raise ServiceError("the driver died")

    monkeypatch.setattr(Backend, "call", fail)
    monkeypatch.setattr(Backend, "is_loaded", True)
    assert served_by_stand_ins(2, lost=list)[-1] == "stop"
    with pytest.raises(ServiceError, match="the driver died"):
        served_by_stand_ins(1, lost=list)
