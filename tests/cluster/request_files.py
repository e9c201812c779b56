"""Files of requests and answers, and requests of every kind that all ways to ask have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
_DRAWN = {"temperature": 0.8, "seed": 7, "max_tokens": 40, "ignore_eos": True}
_QUESTION = [{"role": "user", "content": "w3 w14"}, {"role": "user", "content": "w15"}]
REQUESTS: list[dict[str, Any]] = [
    {"id": "prompt", "prompt": "w1 w2 w3", "sampling": _GREEDY},
    {"id": "chat", "messages": _QUESTION, "sampling": _GREEDY},
    {"id": "ids", "ids": list(range(20, 100)), "sampling": _GREEDY},
    {"id": "drawn", "prompt": "w1 w2 w3", "sampling": _DRAWN},
    {"id": "stop", "messages": _QUESTION, "sampling": _GREEDY | {"stop": ["7"]}},
]


def write_lines(path: Path, lines: Sequence[dict[str, Any] | str]) -> Path:
    """Write objects as JSON and strings as they are, a line each."""
    path.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The object of each line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(answers: Path) -> dict[str, str]:
    """What was answered to each request, by its id."""
    return {answer["id"]: answer["text"] for answer in read_lines(answers)}
