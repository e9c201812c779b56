"""Files of requests and answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.conftest import GREEDY_TOKENS

GREEDY = {"temperature": 0, "max_tokens": GREEDY_TOKENS, "ignore_eos": True}


def write_lines(path: Path, lines: Sequence[dict[str, Any] | str]) -> Path:
    """Write objects as JSON and strings as they are, a line each."""
    path.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The object of each line."""
    return [json.loads(line) for line in path.read_text().splitlines()]
