"""A conversation at a terminal, most with a system that answers as tests say; one over a pipe."""

from __future__ import annotations

import io
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.commands import command_line, processes_left, ray_folder, run_main
from tests.e2e.terminal import Terminal, terminal

GREEDY = ["--temperature", "0", "--ignore-eos"]
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
    assert process.wait(timeout=600) == 0
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
        assert process.wait(timeout=600) == 0
    assert "secret" not in kept.read_text() and "/set top_k 7" in kept.read_text()


def test_run_talks_at_a_terminal_until_it_is_terminated(state: Path, words: Path) -> None:
    """With a system of its own. The terminal is afterwards as it was before."""
    line = command_line(["run", words, *GREEDY, "--max-tokens", "50000", "--context", "50100"])
    with (
        ray_folder() as folder,
        terminal(line, {"XDG_STATE_HOME": str(state), "RAY_TMPDIR": str(folder)}) as (
            screen, process,
        ),
    ):  # fmt: skip
        before = termios.tcgetattr(screen.descriptor)
        screen.wait_for("Ctrl-D ends it", "0 of 50,100 tokens", timeout_s=150)
        assert termios.tcgetattr(screen.descriptor) != before
        for keys in ("\x03", "\x03\x03", "\x03"):
            screen.type("w5\r")
            screen.wait_for(" w", "tokens/s")  # the status of what is being answered
            screen.type(keys)
            screen.wait_for_prompt()
            screen.type("/clear\r")
            screen.wait_for(" 0 of 50,100 tokens (0%)")
            screen.wait_for_prompt()
        screen.type("w3")
        screen.wait_for("> w3")
        screen.type("\x03")  # at the prompt it only gives up the line
        screen.wait_for_prompt()
        process.terminate()
        assert process.wait(timeout=600) == 143
        assert termios.tcgetattr(screen.descriptor) == before
        screen.drain()
        assert not {"SIGTERM", "Traceback", "error"} & set(screen.all_text.split())
        assert processes_left(folder) == []
    kept = (state / "hotcold" / "chat-history").read_text()
    assert "+/clear" in kept and "w3" not in kept


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
        assert process.wait(timeout=600) == 0
    assert not state.exists()


def test_conversation_over_a_pipe(
    local_ray: None, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ten_words = " ".join(f"w{i}" for i in range(10))
    typed = ["w1 w2", "", "w3", "/reset", "w1 w2", "/unknown", ten_words, "/reset", "w1 w2",
             "\udcff", "/exit", "w4"]  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(typed)))
    done = run_main("chat", words, *GREEDY, "--max-tokens", "5", "--context", "16")
    assert done.status == 0, done.err
    first, second, *again = done.out.splitlines()
    assert len(first.split()) == 5
    assert again == [first, first]
    assert second != first
    told = [line for line in done.error_lines if "cut at 5 tokens" not in line]
    assert len(done.error_lines) == len(told) + 4  # answers
    help_line, unknown, outgrown, no_unicode = told
    assert help_line.startswith("/help lists commands")
    assert unknown == "there is no /unknown; /help lists what there is"
    assert "the prompt has 17 tokens, the context holds 16" in outgrown
    assert "/clear" in outgrown
    assert "Unicode" in no_unicode
