"""A conversation at a terminal, with a system that answers as tests say."""

from __future__ import annotations

import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.commands import command_line, processes_left, ray_folder
from tests.e2e.terminal import Terminal, terminal

LINE = [sys.executable, "-m", "tests.stand_in_chat"]
RENDERED = """A title

Some bold words and a <tag>.

def f(x):
    return x

 1 one
 2 two

>"""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def talk(state: Path) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    with terminal(LINE, {"XDG_STATE_HOME": str(state)}) as found:
        found[0].wait_for_prompt()
        yield found


def test_a_session(
    talk: tuple[Terminal, subprocess.Popen[bytes]], state: Path, tmp_path: Path
) -> None:
    screen, process = talk
    screen.wait_for("/help lists commands", "what you type is kept in", "words · exact on cpu")
    screen.type("markdown\r")
    screen.wait_for(RENDERED, "30 of 1,000 tokens (3%) · ")  # and the status tells it

    # Several lines: between quotation marks, with Alt-Enter, pasted.
    for keys in ('"""one\rtwo"""\r', "one\x1b\rtwo\r", "\x1b[200~one\ntwo\x1b[201~\r"):
        screen.type("/clear\r")
        screen.wait_for(" 0 of 1,000")
        screen.type(keys)
        screen.wait_for("echo of one\ntwo\n", "13 of 1,000")

    # What is typed meanwhile is not shown within an answer, but behind it.
    screen.type("slowly told\r")
    screen.wait_for("> slowly told\necho")
    screen.type("later\r")
    screen.wait_for("> slowly told\necho of slowly told\n\n> later\necho of later\n\n>")
    screen.type("endless\r\x03")  # at once: it is not asked
    screen.wait_for("> endless\n\n/help lists commands")
    screen.wait_for_prompt()
    screen.type("endless\r")
    screen.wait_for("\nw w", "tokens/s")
    screen.type("\x03")
    screen.wait_for_prompt()

    screen.type("/se\t")
    screen.wait_for("> /set")
    screen.type(" top_k 7\r")
    screen.wait_for("top_k is 7")
    note = tmp_path / "note.txt"
    note.write_text("from a file")
    screen.type(f"what is in @{note}\r")
    screen.wait_for("goes with it", "note.txt:\n\nfrom a file")
    screen.wait_for_prompt()
    screen.type("/edit\r")
    screen.wait_for("/edit\n> what is in")
    screen.type("?\r")
    screen.wait_for("echo of what is in", "?\n")
    screen.wait_for_prompt()
    screen.type("\x03")  # with nothing typed it helps
    screen.wait_for(">\n\n/help lists commands")
    screen.type("\x04")
    screen.drain()
    assert process.wait(timeout=120) == 0
    assert "Traceback" not in screen.all_text

    kept = state / "hotcold" / "chat-history"
    assert kept.stat().st_mode & 0o777 == 0o600 and kept.parent.stat().st_mode & 0o777 == 0o700
    with terminal(LINE, {"XDG_STATE_HOME": str(state)}) as (screen, process):
        screen.wait_for_prompt()
        screen.type("\x1b[A\x1b[A\x1b[A\x1b[A")
        screen.wait_for("> /set top_k 7")
        screen.type("\x03/set nohistory\r")
        screen.wait_for("nohistory is set")
        screen.type("secret\r")
        screen.wait_for("echo of secret")
        screen.type("/bye\r")
        screen.drain()
        assert process.wait(timeout=120) == 0
    assert "secret" not in kept.read_text() and "/set top_k 7" in kept.read_text()


def test_a_cut_answer_goes_on(talk: tuple[Terminal, subprocess.Popen[bytes]]) -> None:
    screen, _ = talk
    screen.type("cut\r")
    screen.wait_for("echo of cut", "the answer was cut at 3 tokens; /continue lets it go on")
    screen.wait_for_prompt()
    screen.type("/co\t")
    screen.wait_for("> /continue")
    screen.type("\r")
    screen.wait_for("> /continue\necho of echo of cut\n")
    screen.type("/show messages\r")
    screen.wait_for("echo of cutecho of echo of cut")


def test_run_talks_at_a_terminal_until_it_is_terminated(state: Path) -> None:
    """With the embedded model. The terminal is afterwards as it was before."""
    line = command_line(["run", "--temperature", "0", "--max-tokens", "4"])
    with (
        ray_folder() as folder,
        terminal(line, {"XDG_STATE_HOME": str(state), "RAY_TMPDIR": str(folder)}) as (
            screen, process,
        ),
    ):  # fmt: skip
        before = termios.tcgetattr(screen.descriptor)
        screen.wait_for_prompt(timeout_s=150)
        assert termios.tcgetattr(screen.descriptor) != before
        screen.type("What does textwrap.dedent do?\r")
        screen.wait_for("the answer was cut at 4 tokens; /continue lets it go on")
        screen.wait_for_prompt()
        process.terminate()
        assert process.wait(timeout=120) == 143
        assert termios.tcgetattr(screen.descriptor) == before
        screen.drain()
        assert "SIGTERM" not in screen.all_text and "Traceback" not in screen.all_text
        assert processes_left(folder) == []


def test_a_terminal_without_a_cursor_has_plain_text(state: Path) -> None:
    changes = {"XDG_STATE_HOME": str(state), "TERM": "dumb"}
    with terminal([*LINE, "plain"], changes) as (screen, process):
        screen.wait_for("/help lists commands", "\n>")
        screen.type("markdown\r")
        screen.wait_for("Some **bold** words and a <tag>.\n\n```python", "2. two\n\n>")
        screen.type('"""one\rtwo"""\r')
        screen.wait_for("... two", "echo of one\ntwo\n>")
        screen.type("endless\r")
        screen.wait_for("w w")
        screen.type("\x03")
        screen.wait_for_prompt()
        screen.type("\x04")
        screen.drain()
        assert process.wait(timeout=120) == 0
    assert not state.exists()
