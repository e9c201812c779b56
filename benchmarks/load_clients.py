"""Clients of a server that ask without pause, and know what the right answer is."""

import http.client
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.runs import Json

CONTEXT = 512  # tokens of the demo model's
_BAD: list[Json | bytes] = [
    {"prompt": "a", "max_tokens": -1},
    {"prompt": [], "max_tokens": 4},
    {"prompt": [10**9], "max_tokens": 4},
    {"prompt": [5] * (CONTEXT + 1), "max_tokens": 4},
    {"prompt": "a", "temperature": "hot"},
    {"prompt": "a", "grammar": "start: nowhere", "max_tokens": 4},
    b'{"prompt": "a"',
    b"\xff\xfe",
]


@dataclass(frozen=True)
class Question:
    """One request, with the answer that the server gave when it had nothing else to do."""

    body: Json
    expected: str


@dataclass
class Tally:
    """What all clients saw. Seconds of a whole answer, and to its first token where streamed."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    outcomes: Counter[str] = field(default_factory=Counter)
    answer_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, outcome: str) -> None:
        """Count something that ended as it should."""
        with self.lock:
            self.outcomes[outcome] += 1

    def add_wrong(self, what: str) -> None:
        """Keep what should not have happened."""
        with self.lock:
            self.outcomes["wrong"] += 1
            self.wrong.append(what[:300])


class Client:
    """Asks one thing after another on connections of its own."""

    def __init__(self, port: int, questions: list[Question], tally: Tally, seed: int) -> None:
        self._port, self._questions, self._tally = port, questions, tally
        self._random = random.Random(seed)

    def run_until(self, ended: threading.Event) -> None:
        """Ask until `ended` is set."""
        while not ended.is_set():
            kind = self._random.random()
            try:
                if kind < 0.08:
                    self._ask_badly()
                elif kind < 0.2:
                    self._leave()
                else:
                    self._ask(self._random.choice(self._questions), kind < 0.6)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                self._tally.add_wrong(f"{type(error).__name__}: {error}")

    def _ask(self, question: Question, streamed: bool) -> None:
        started = time.monotonic()
        first_s, text = stream(self._port, question.body) if streamed else (0.0, "")
        if not streamed:
            text = complete(self._port, question.body)
        took_s = time.monotonic() - started
        if text != question.expected:
            self._tally.add_wrong(f"{question.body} answered {text!r}")
            return
        with self._tally.lock:
            self._tally.outcomes["streamed" if streamed else "whole"] += 1
            self._tally.answer_s.append(took_s)
            self._tally.num_tokens += question.body["max_tokens"]
            if streamed:
                self._tally.first_token_s.append(first_s)

    def _leave(self) -> None:
        body = self._random.choice(self._questions).body | {"stream": True}
        connection, response = post(self._port, json.dumps(body).encode())
        for _ in range(self._random.randint(1, 12)):
            response.readline()
        connection.close()
        self._tally.add("left by the client")

    def _ask_badly(self) -> None:
        bad = self._random.choice(_BAD)
        body = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
        connection, response = post(self._port, body)
        text = response.read()
        connection.close()
        if 400 <= response.status < 500 and b'"error"' in text:
            self._tally.add("bad, refused")
        else:
            self._tally.add_wrong(f"{bad!r} was answered {response.status}: {text!r}")


def post(port: int, body: bytes) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Send a completion request; the answer's head has been read."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", body)
    return connection, connection.getresponse()


def complete(port: int, body: Json) -> str:
    """The text of a whole answer. Errors: ValueError where there is none."""
    connection, response = post(port, json.dumps(body).encode())
    answer = json.loads(response.read())
    connection.close()
    if response.status != 200:
        raise ValueError(f"{response.status}: {answer}")
    return str(answer["choices"][0]["text"])


def stream(port: int, body: Json) -> tuple[float, str]:
    """Seconds to the first text of a streamed answer, and the whole of it."""
    started, first_s, texts = time.monotonic(), 0.0, []
    connection, response = post(port, json.dumps(body | {"stream": True}).encode())
    if response.status != 200:
        raise ValueError(f"{response.status}: {response.read()!r}")
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise ValueError(f"the stream ended with {chunk['error']}")
        texts.append(chunk["choices"][0]["text"])
        first_s = first_s or time.monotonic() - started
    connection.close()
    return first_s, "".join(texts)


def make_questions(port: int, count: int) -> list[Question]:
    """Requests of every length, asked one at a time: the run that others are compared with."""
    numbers, found = random.Random(1), []
    for n in range(count):
        prompt = [numbers.randrange(10, 4000) for _ in range(max(1, round(400 ** (n / count))))]
        body: Json = {
            "prompt": prompt,
            "max_tokens": numbers.randrange(1, min(200, CONTEXT - len(prompt))),
            "temperature": 0.8 if n % 3 == 0 else 0,
            "seed": n,
            "ignore_eos": True,
        }
        found.append(Question(body, complete(port, body)))
    return found
