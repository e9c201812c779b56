"""`hotcold batch`: a file of requests, answered by a fleet beside all that others ask."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from hotcold.jobs.answer_file import AnswerFile
from hotcold.jobs.request_lines import json_object
from hotcold.jobs.support.extras import require_extra
from hotcold.jobs.support.settings import GroupedCommand
from hotcold.model.errors import HotcoldError, ServiceError, UsageError, shown

_PROMPTS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
_URLS = (*_PROMPTS.values(), "/v1/embeddings", "/v1/responses")
_UNAVAILABLE = 503
_AGAIN_S = (1, 5, 20, 60, 180, 300)  # after a door or all replicas are lost
_LINE_EVERY_S = 5.0
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(cls=GroupedCommand)
@click.argument("requests", type=_FILE)
@click.argument("out", type=_FILE)
def batch(requests: Path, out: Path) -> None:
    """Answer each line of REQUESTS by the cluster's fleet; go on with what OUT has already.

    Lines, of both files, are those of OpenAI's batches, or a custom_id beside the fields of a
    completion or chat. What fails is in OUT.errors.jsonl. Interactive requests come first.
    """
    require_extra("fleet", "batch")
    from hotcold.actors.processes.cluster import connect  # Ray takes a second to import

    requests.open("rb").close()
    errors = out.with_suffix(".errors.jsonl")
    if requests.resolve() in (out.resolve(), errors.resolve()):
        raise UsageError(f"answers would be written to {requests}; name another file for them")
    with (
        closing(AnswerFile(out, resume=True, name="custom_id")) as answers,
        closing(AnswerFile(errors, resume=True, name="custom_id")) as failures,
    ):
        connect("auto")
        job = _Batch(_door(), answers, failures)
        answers.begin()
        failures.begin()
        asyncio.run(job.run(requests))
        click.echo(f"{job} in {out} and {errors}")


def _door() -> Any:
    """The handle of the cluster's fleet. Errors: ServiceError where there is none."""
    from ray import serve

    for name, application in serve.status().applications.items():
        if "door" in application.deployments:
            return serve.get_deployment_handle("door", name)
    raise ServiceError("no fleet runs in this cluster; start one there with `hotcold fleet`")


class _Batch:
    """Asks for each line that has no answer, twice as many at once as the fleet has places."""

    def __init__(self, door: Any, answers: AnswerFile, failures: AnswerFile) -> None:
        self._door, self._answers, self._failures = door, answers, failures
        self._num_skipped = self._num_failed = self._num_answered = 0
        self._num_places = 8  # until the door says how many
        self._bytes_left = self._bytes_asked = 0  # of the file
        self._began = self._told = time.monotonic()

    def __str__(self) -> str:
        skipped = f", {self._num_skipped} were there already" if self._num_skipped else ""
        return f"{self._num_answered} requests answered, {self._num_failed} with an error{skipped}"

    async def run(self, requests: Path) -> None:
        """Answer a file. Errors: OSError; ServiceError where the fleet is gone."""
        seen = self._answers.held | self._failures.held
        running: set[asyncio.Task[None]] = set()
        self._bytes_left = requests.stat().st_size
        with requests.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                self._bytes_left -= len(line)
                if line.isspace():
                    continue
                custom_id, url, body = _read(line, number)
                if custom_id in seen:
                    self._num_skipped += 1
                    continue
                seen.add(custom_id)
                self._bytes_asked += len(line)
                names = {"id": f"batch_req_{number}", "custom_id": custom_id}
                running.add(asyncio.create_task(self._answer(names, url, body)))
                running = await self._fewer(running, 2 * self._num_places)
        await self._fewer(running, 1)

    async def _fewer(self, running: set[asyncio.Task[None]], most: int) -> set[asyncio.Task[None]]:
        """Wait until fewer than `most` run, and tell how far it is. Errors: theirs."""
        while len(running) >= most:
            done, running = await asyncio.wait(
                running, timeout=_LINE_EVERY_S, return_when=asyncio.FIRST_COMPLETED
            )
            for one in done:
                one.result()
            if (now := time.monotonic()) - self._told >= _LINE_EVERY_S:
                left_s = round((now - self._began) * self._bytes_left / self._bytes_asked)
                click.echo(f"{self}; about {timedelta(seconds=left_s)} left")
                self._told = now
        return running

    async def _answer(self, names: dict[str, Any], url: str, body: bytes) -> None:
        """Write what a request gives. Errors: as of `run`."""
        response = error = None
        if url:
            status, content = await self._asked(url, body)
            answer = json.loads(content)
            response = {"status_code": status, "request_id": answer.get("id"), "body": answer}
        else:
            status, error = 400, {"code": "invalid_request", "message": body.decode()}
        self._num_answered += status < 400
        self._num_failed += status >= 400
        file = self._answers if status < 400 else self._failures
        file.write(names | {"response": response, "error": error})

    async def _asked(self, url: str, body: bytes) -> tuple[int, bytes]:
        """Status and body that the door gives, once there is one."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        status, content, lost = 0, b"", None
        for wait_s in (0, *_AGAIN_S):
            await asyncio.sleep(wait_s)
            try:
                found = await self._door.answer.remote(str(self._answers.path), url, body)
                status, content, self._num_places = found
                if status != _UNAVAILABLE:
                    break
            except (RayError, RayServeException) as error:
                status, lost = 0, error
        if not status:
            raise ServiceError("the fleet is lost; submit this again once it runs") from lost
        return status, content


def _read(line: bytes, number: int) -> tuple[str | int, str, bytes]:
    """A line's id, route and body; no route where it is wrong, and what is wrong."""
    custom_id: Any = f"line-{number}"
    try:
        values = json_object(line)
        given = values.pop("custom_id", custom_id)
        if not isinstance(given, str | int):
            raise UsageError(f"custom_id is {shown(given)}; give a text or a whole number")
        custom_id, body = given, values.get("body", values)
        named = (url for key, url in _PROMPTS.items() if key in values)
        url = values.get("url") or next(named, None)
        if url not in _URLS:
            raise UsageError(f"url is {shown(url)}; a batch has {', '.join(_URLS)}")
        if not isinstance(body, dict) or body.get("stream"):
            raise UsageError("body is no object, or asks for a stream; a batch's answers are whole")
        return custom_id, url, json.dumps(body).encode()
    except HotcoldError as problem:
        return custom_id, "", f"line {number}: {problem}".encode()
