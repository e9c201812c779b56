"""Requests of batches take the places that others leave, and give them back: by order alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("ray.serve")
from hotcold.ui.api.errors import ApiError
from hotcold.ui.fleet.turns import Turns

AT_ONCE, ROOM = 2, 3


class Fleet:
    """Requests that run until they are told to end; batches' also until their turn says so."""

    def __init__(self) -> None:
        self.turns = Turns(lambda: ROOM, 1, lambda: AT_ONCE)
        self.running: dict[str, asyncio.Event] = {}
        self.left: list[str] = []

    async def run(self, name: str) -> None:
        client, is_ended = name[0], asyncio.Event()
        while not is_ended.is_set():
            try:
                async with self.turns.turn(client, is_batch=client in "bc"):
                    self.running[name] = is_ended
                    try:
                        await is_ended.wait()
                    finally:
                        del self.running[name]
            except TimeoutError:
                self.left.append(name)

    async def start(self, *names: str) -> list[asyncio.Task[None]]:
        started = [asyncio.create_task(self.run(name)) for name in names]
        await settled()
        return started

    async def end(self, name: str) -> None:
        self.running[name].set()
        await settled()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def fleet() -> AsyncIterator[Fleet]:
    one = Fleet()
    yield one
    while one.running:
        await one.end(next(iter(one.running)))


def test_others_come_first() -> None:
    async def check() -> None:
        async with fleet() as at:
            await at.start("b1", "b2", "b3", "b4", "c1")
            await at.end("b1")
            assert [*at.running] == ["b2", "b3", "c1"], "of each batch in turn"
            await at.start("x1")
            assert [*at.running] == ["b2", "x1"] and at.left == ["c1", "b3"], "the newest leave"
            await at.start("x2", "x3")
            assert [*at.running] == ["x1", "x2", "x3"]
            await at.end("x1")
            assert [*at.running] == ["x2", "x3"], "none begins where another would wait for it"
            await at.end("x2")
            await at.end("x3")
            assert len(at.running) == ROOM

    asyncio.run(check())


def test_batches_wait_without_a_limit_and_leave_no_place_behind() -> None:
    async def check() -> None:
        async with fleet() as at:
            many = await at.start(*(f"b{number}" for number in range(9)))
            await at.start("x1", "x2", "x3")
            for task in many:
                task.cancel()
            await at.start("x4")
            assert [*at.running] == ["x1", "x2", "x3"]
            with pytest.raises(ApiError):
                (task,) = await at.start("x5")
                await task
            await at.end("x1")
            assert [*at.running] == ["x2", "x3", "x4"]

    asyncio.run(check())
