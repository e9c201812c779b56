"""What is slow is left until it is needed: imports of kernels, downloads that try again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotcold.model.files import hub
from tests.e2e.commands import run_main

_KERNELS = "torch hotcold.numba_kernels.decode.ffn"
_SLOW = f"ray numba numpy rich {_KERNELS}"
_COMMANDS = """
import click
from hotcold.jobs.cli import cli
for name in "generate chat ps stop".split():
    cli.get_command(click.Context(cli), name)
from hotcold.jobs.running import client, find
"""


def _run(*lines: str) -> str:
    return f"from hotcold.jobs.cli import main\nfor line in {lines!r}: main(line.split())"


@pytest.mark.parametrize(
    ("program", "says", "slow"),
    [
        (_run("--help"), ["Fetch a model from Hugging Face."], _SLOW),
        (_run("generate --top-k -5 --prompt x"), ["top_k is -5"], "ray numba torch"),
        (_run("generate --context 1 --prompt x", "profile --window 1"),
         ["--context is 1;", "--window is 1;"], _KERNELS),
        # The first text comes in less than half a second; a terminal's libraries load meanwhile.
        (_COMMANDS, [], f"{_SLOW} scipy psutil tokenizers huggingface_hub fastapi prompt_toolkit "
                        "markdown_it pygments"),
    ],
)  # fmt: skip
def test_what_is_not_imported(program: str, says: list[str], slow: str) -> None:
    program += f"\nimport sys\nprint([name for name in {slow.split()!r} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    *told, imported = (found.stderr + found.stdout).splitlines()
    assert all(each in "\n".join(told) for each in says) and imported == "[]"


def test_a_config_is_looked_for_once_where_nothing_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download tries for half a minute; an earlier one's config.json is taken."""
    import huggingface_hub

    def offline(*_: Any, **__: Any) -> None:
        raise OSError("Name or service not known")

    def tries_again(*_: Any, **__: Any) -> None:
        raise AssertionError("tried again")

    monkeypatch.setattr(huggingface_hub, "model_info", offline)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", tries_again)
    monkeypatch.setattr(hub, "_newest_snapshot", lambda repo: None)
    refusal = run_main("plan", "--config", "org/repo").refusal
    assert "cannot be reached: 'Name or service not known'" in refusal
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(
        hub, "_newest_snapshot", lambda repo: SimpleNamespace(snapshot_path=tmp_path)
    )
    assert hub.fetch_config("org/repo") == tmp_path / "config.json"
