"""What a job reads and writes, without a cluster, and where it is told to look for one."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotcold.actors.processes.cluster import connect
from hotcold.actors.protocol.messages import (
    GenerateRequest,
    Generation,
    SystemConfig,
    TokenEvent,
)
from hotcold.jobs.answer_file import AnswerFile
from hotcold.jobs.generate import WINDOW, _serve
from hotcold.jobs.request_lines import RequestLine, read_requests
from hotcold.jobs.running.in_flight import Deliver, InFlight
from hotcold.model.errors import HotcoldError, ServiceError, UsageError
from hotcold.model.sampling import SamplingParams

DEFAULTS = SamplingParams(temperature=0.5, top_k=7)


def read(tmp_path: Path, content: bytes) -> list[RequestLine]:
    file = tmp_path / "in.jsonl"
    file.write_bytes(content)
    return list(read_requests(file, DEFAULTS))


def test_good_requests(tmp_path: Path) -> None:
    content = b"""\xef\xbb\xbf{"id": "a", "prompt": "Hi", "sampling": {"top_k": 3, "stop": "x"}}

    {"id": 1, "ids": [1, 2], "prompt": null, "sampling": null}\r
    {"id": "1", "messages": [{"role": "user", "content": ""}]}
    {"id": 2, "prompt": "x", "sampling": {"repetition_penalty": 1.5, "temperature": null}}
    {"id": 3, "ids": [1, 2], "cache": false}"""
    first, second, third, fourth, fifth = read(tmp_path, content)
    assert (first.request_id, second.request_id, third.request_id) == ("a", 1, "1")
    assert first.request and second.request and third.request
    assert first.request.prompt == "Hi"
    assert first.request.sampling == SamplingParams(temperature=0.5, top_k=3, stop=("x",))
    assert second.request.prompt_ids == [1, 2]
    assert second.request.sampling == DEFAULTS
    assert third.request.messages == [{"role": "user", "content": ""}]
    assert fourth.request
    assert fourth.request.use_cache and fifth.request and not fifth.request.use_cache
    assert fourth.request.sampling == replace(DEFAULTS, repeat_penalty=1.5, repeat_last_n=-1)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("[" * 100_000, "not JSON"),
        ("\udcff", "not JSON in UTF-8"),
        ("[]", "not a JSON object"),
        ('{"prompt": "x"}', "there is no id"),
        ('{"id": true, "prompt": "x"}', "the id is True"),
        ('{"id": 1}', "found none of them"),
        ('{"id": 1, "prompt": "x", "ids": [1]}', "found prompt and ids"),
        ('{"id": 1, "prompt": 7}', "prompt is 7; give a text"),
        ('{"id": 1, "ids": "1,2"}', "give a list of token ids"),
        ('{"id": 1, "messages": [{"role": "user"}]}', "a role and a content"),
        ('{"id": 1, "prompt": "x", "sampling": []}', "sampling is []"),
        ('{"id": 1, "prompt": "x", "sampling": {"topk": 1}}', "unknown option 'topk'"),
        ('{"id": 1, "prompt": "x", "sampling": {"temperature": NaN}}', "temperature is nan"),
        ('{"id": 1, "prompt": "x", "max_tokens": 1}', "unknown key 'max_tokens'"),
        ('{"id": 1, "prompt": "x", "sampling": {"n": 2}}', "n is 2; a line has one answer"),
        ('{"id": 1, "prompt": "x", "sampling": {"json_schema": "{"}}', "json_schema is '{'"),
        ('{"id": 1, "ids": [1], "sampling": {"regex": "a", "choice": ["a"]}}', "both given"),
        (
            """{"id": 1, "ids": [1], "sampling": {"json_schema": {"not": {"type": "null"}}}}""",
            "not",
        ),
        ('{"id": 1, "prompt": "x", "cache": 0}', "cache is 0; give true or false"),
    ],
)
def test_bad_requests(line: str, error: str, tmp_path: Path) -> None:
    bad, good = read(
        tmp_path, line.encode(errors="surrogateescape") + b'\n{"id": "next", "prompt": "x"}'
    )
    assert bad.request is None
    assert error in bad.error
    text = bad.failure(bad.error)
    assert text.startswith("line 1: ")
    assert "\n" not in text
    assert good.request is not None


def test_an_answer_is_on_disk_once_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, synced = tmp_path / "out.jsonl", b""

    def sync(descriptor: int) -> None:
        nonlocal synced
        if os.path.samestat(os.fstat(descriptor), out.stat()):
            synced = out.read_bytes()

    monkeypatch.setattr(os, "fsync", sync)
    file = AnswerFile(out, resume=False)
    file.begin()
    for number in range(3):
        file.write({"id": number})
        assert synced == b"".join(b'{"id": %d}\n' % one for one in range(number + 1))
    file.close()


def write(path: Path, *answers: dict[str, Any], resume: bool = False) -> None:
    file = AnswerFile(path, resume=resume)
    file.begin()
    for answer in answers:
        file.write(answer)
        assert path.read_bytes().endswith(b"}\n")
    file.close()


def test_answers_are_kept_only_to_resume(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(out, {"id": 1, "text": "é\n"}, {"id": None, "error": "line 2: x"})
    out.write_bytes(out.read_bytes() + b'{"id": 3, "te')
    file = AnswerFile(out, resume=True)
    assert file.holds({"id": 1})
    assert file.holds({"id": None, "error": "line 2: x"})
    assert not file.holds({"id": None, "error": "line 3: x"})
    assert not file.holds({"id": 3})
    file.close()
    write(out, {"id": 3}, resume=True)
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == [1, None, 3]
    AnswerFile(out, resume=False).close()  # a system that does not start costs no answers
    assert len(out.read_text().splitlines()) == 3
    write(out, {"id": 4})
    assert out.read_text() == '{"id": 4}\n'


@pytest.mark.parametrize("content", ["text\n", '{"id": [1]}\n', "3\n"])
def test_another_file_is_not_resumed(content: str, tmp_path: Path) -> None:
    out = tmp_path / "notes.txt"
    out.write_text(content)
    with pytest.raises(UsageError, match="line 1, is no answer"):
        AnswerFile(out, resume=True)
    assert out.read_text() == content


class FakeConnection:
    """Completes a request when told; knows which run. Request 13 finds the system dead."""

    max_batch = 4
    config: SystemConfig

    def __init__(self) -> None:
        self.running: dict[int, Deliver] = {}
        self.started: set[int] = set()
        self.cancelled: list[str] = []
        self.most = 0

    def submit(self, request: GenerateRequest, deliver: Deliver) -> None:
        (number,) = request.prompt_ids or []
        self.running[number] = deliver
        self.started.add(number)
        self.most = max(self.most, len(self.running))

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def close(self) -> None:
        """Nothing to end."""

    def await_start(self, number: int) -> None:
        while number not in self.running:
            time.sleep(0.001)

    def finish(self, number: int) -> None:
        """End request `number`, once it runs."""
        self.await_start(number)
        deliver = self.running.pop(number)
        if number == 13:
            deliver(ServiceError("the gpu service died"))
        else:
            deliver(TokenEvent("", Generation("", [number], "length", 1, 0.1, 0.2)))


def lines_of(numbers: Iterable[int]) -> Iterator[RequestLine]:
    for number in numbers:
        yield RequestLine(number, number, GenerateRequest(DEFAULTS, prompt_ids=[number]))


class Serving:
    """A job's loop over lines in a thread of its own."""

    def __init__(self, out: Path, numbers: Iterable[int]) -> None:
        self.out, self.system, self.error = out, FakeConnection(), ""
        self._answers = AnswerFile(out, resume=False)
        self._lines = lines_of(numbers)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with closing(InFlight(self.system)) as in_flight:  # type: ignore[arg-type]
                _serve(self._lines, self._answers, in_flight, 4)
        except ServiceError as error:
            self.error = str(error)
        self._answers.close()

    def written(self) -> list[int]:
        return [json.loads(line)["id"] for line in self.out.read_text().splitlines()]

    def end(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_answers_stand_in_order_and_requests_run_side_by_side(tmp_path: Path) -> None:
    serving = Serving(tmp_path / "out.jsonl", range(100, 160))
    system = serving.system
    for number in range(101, 100 + WINDOW * 4):  # the first one lasts longest
        system.finish(number)
    assert serving.written() == []  # they wait for the first one
    assert 100 + WINDOW * 4 not in system.started  # and so does the next line
    system.finish(100)
    for number in range(100 + WINDOW * 4, 160):
        system.finish(number)
    serving.end()
    assert serving.written() == list(range(100, 160))
    assert system.most == 2 * system.max_batch


def test_a_lost_system_ends_the_job_and_what_runs(tmp_path: Path) -> None:
    serving = Serving(tmp_path / "out.jsonl", [5, 13, *range(20, 40)])
    serving.system.await_start(20)  # beside both: to be cancelled
    serving.system.finish(5)
    serving.system.finish(13)
    serving.end()
    assert "the gpu service died" in serving.error
    assert serving.written() == [5]
    assert serving.system.cancelled


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "ray://a:10001", "host", "a:b", ":1"])
def test_what_is_no_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UsageError, match="no address of a Ray head"):
        connect()


def test_where_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(ServiceError, match="no Ray cluster answers at") as caught:
            connect()
    assert isinstance(caught.value, HotcoldError)
    assert "\n" not in str(caught.value)
