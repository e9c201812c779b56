"""Where Linux is not: one line says so."""

import subprocess
import sys

import pytest

ELSEWHERE = "import sys; sys.platform = 'darwin'; sys.modules['fcntl'] = None\n"
COMMAND = "from hotcold.__main__ import run; sys.argv = ['hotcold', {!r}]; run()"
TOLD = "hotcold runs on Linux only; use a container, or WSL 2 on Windows"


@pytest.mark.parametrize("command", ["doctor", "generate", "list"])
def test_a_command_is_one_line(command: str) -> None:
    done = run(COMMAND.format(command))
    assert (done.returncode, done.stderr) == (1, f"hotcold: error: {TOLD}\n")


def test_the_python_api_says_it_too() -> None:
    assert TOLD in run("from hotcold import LLM").stderr.splitlines()[-1]
    assert run("from hotcold import __version__, HotcoldError").returncode == 0


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ELSEWHERE + program], capture_output=True, text=True
    )
