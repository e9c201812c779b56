"""What cannot be is refused before what is slow: downloads that try again, imports of kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotcold.jobs.cli import main
from hotcold.model.files import hub

_SLOW = ("ray", "numba", "torch", "hotcold.numba_kernels.ffn")


@pytest.mark.parametrize(
    ("arguments", "says", "slow"),
    [
        (["generate", "--top-k", "-5", "--prompt", "x"], "top_k is -5", _SLOW),
        (["generate", "--context", "1", "--prompt", "x"], "--context is 1;", _SLOW[2:]),
        (["profile", "--window", "1"], "--window is 1;", _SLOW[2:]),
    ],
)
def test_a_wrong_value_is_refused_before_slow_imports(
    arguments: list[str], says: str, slow: tuple[str, ...]
) -> None:
    code = (
        "import sys\nfrom hotcold.jobs.cli import main\n"
        f"main({arguments!r})\nprint([name for name in {slow!r} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert says in found.stderr and found.stdout == "[]\n"


def test_a_config_is_looked_for_once_where_nothing_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    assert main(["plan", "--config", "org/repo"]) == 1
    assert "cannot be reached: 'Name or service not known'" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(
        hub, "_newest_snapshot", lambda repo: SimpleNamespace(snapshot_path=tmp_path)
    )
    assert hub.fetch_config("org/repo") == tmp_path / "config.json"
