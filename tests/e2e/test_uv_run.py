"""Under `uv run` Ray would make an environment for each worker; ours are this program's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray._private import worker
from ray._private.runtime_env import uv_runtime_env_hook

from hotcold.actors.processes.cluster import as_this_program
from tests.e2e.commands import command_line, environment, processes_left, ray_folder


@pytest.mark.parametrize(("told", "is_asked"), [(None, False), ("0", False), ("1", True)])
def test_its_hook_is_asked_where_the_user_says_so(
    monkeypatch: pytest.MonkeyPatch, told: str | None, is_asked: bool
) -> None:
    monkeypatch.delenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", raising=False)
    if told is not None:
        monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", told)
    monkeypatch.setattr(uv_runtime_env_hook, "_get_uv_run_cmdline", lambda: ["uv", "run", "x"])
    monkeypatch.setattr(uv_runtime_env_hook, "hook", lambda runtime_env: {"py_executable": "uv"})
    with as_this_program():
        found = worker._maybe_modify_runtime_env(None, False)
    assert (found is not None) == is_asked


def test_a_command_under_it(tmp_path: Path) -> None:
    """A shell stands in for `uv`, which is known by its command line."""
    command = [*command_line(["generate", "--own", "--prompt", "a", "--max-tokens", "2"]), "--json"]
    (tmp_path / "run").write_text('"$@"\nexit $?\n')
    with ray_folder() as ray:
        done = subprocess.run(
            ["uv", "run", *command], executable="/bin/bash", cwd=tmp_path, text=True,
            env=environment(ray), capture_output=True, timeout=150,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert '"finish_reason": "length"' in done.stdout
        assert "in its own way" not in done.stderr
        assert processes_left(ray) == []
    assert sys.executable in command and os.listdir(tmp_path) == ["run"]
