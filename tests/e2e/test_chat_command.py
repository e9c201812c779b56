"""`hotcold chat`: a conversation over a pipe, and one at a terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jobs.cli import main
from tests.e2e.commands import command_line, environment, processes_left, ray_folder
from tests.e2e.word_model import make_word_model

PROMPT = "\n> "  # at the start of a line: the model may well write "<unk> "
GREEDY = ["--temperature", "0", "--ignore-eos"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_word_model(tmp_path_factory.mktemp("words"))


def test_conversation_over_a_pipe(
    local_ray: None, words: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    ten_words = " ".join(f"w{i}" for i in range(10))
    typed = ["w1 w2", "", "w3", "/reset", "w1 w2", "/unknown", ten_words, "/reset", "w1 w2",
             "\udcff", "/exit", "w4"]  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(typed)))
    status = main(["chat", str(words), *GREEDY, "--max-tokens", "5", "--context", "16"])
    out, err = capsys.readouterr()
    assert status == 0, err
    first, second, *again = out.splitlines()
    assert len(first.split()) == 5
    assert again == [first, first]
    assert second != first
    help_line, unknown, outgrown, no_unicode = err.splitlines()
    assert unknown == help_line
    assert "the prompt has 17 tokens, the context holds 16" in outgrown
    assert "/reset" in outgrown
    assert "Unicode" in no_unicode


class Terminal:
    """A command at the other end of a pseudo-terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.shown = ""
        self._seen = 0

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def press_until(self, key: str, text: str) -> None:
        """Press a key, and again where nothing comes of it: readline is deaf between two waits."""
        for _ in range(30):
            self.type(key)
            end = time.monotonic() + 3
            while time.monotonic() < end:
                if self.shown.find(text, self._seen) >= 0:
                    self.wait_for(text)
                    return
                if select.select([self._descriptor], [], [], 0.1)[0]:
                    self._read(text, end)
        pytest.fail(f"no {text!r} after {key!r}: {self.shown[-2000:]!r}")

    def wait_for(self, text: str, timeout_s: float = 90.0) -> None:
        """Wait until `text` is shown after what was waited for before."""
        end = time.monotonic() + timeout_s
        while (at := self.shown.find(text, self._seen)) < 0:
            self._read(text, end)
        self._seen = at + len(text)

    def _read(self, text: str, end: float) -> None:
        if not select.select([self._descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
            pytest.fail(f"no {text!r} after {self.shown[self._seen :][-2000:]!r}")
        try:
            self.shown += os.read(self._descriptor, 4096).decode(errors="replace")
        except OSError:  # the other end is closed
            pytest.fail(f"ended without {text!r}: {self.shown[-2000:]!r}")

    def drain(self) -> None:
        """Read until the other end is closed."""
        while True:
            try:
                data = os.read(self._descriptor, 4096)
            except OSError:
                return
            if not data:
                return
            self.shown += data.decode(errors="replace")


@contextmanager
def terminal(line: list[str], folder: Path) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    """Run a command whose terminal is ours to type at; keys such as Ctrl-C become signals."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        line, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env=environment(folder, {"TERM": "dumb", "COLUMNS": "200"}),
    )  # fmt: skip
    os.close(theirs)
    try:
        yield Terminal(ours), process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_keys_at_a_terminal(words: Path) -> None:
    line = command_line(["chat", words, *GREEDY, "--max-tokens", "50000", "--context", "50100"])
    with ray_folder() as folder:
        with terminal(line, folder) as (screen, process):
            screen.wait_for("Ctrl-D ends it")
            screen.wait_for(PROMPT)
            for shown, pressed in ((" w", "\x03"), (" w", "\x03\x03"), ("", "\x03")):
                screen.type("w5\n")
                screen.wait_for("w5\r\n")
                screen.wait_for(shown)
                screen.type(pressed)
                screen.wait_for(PROMPT)
            screen.type("w3")
            screen.wait_for("w3")
            screen.press_until("\x03", "Ctrl-D ends it")  # at the prompt it only gives up the line
            screen.wait_for(PROMPT)
            screen.type("/reset\n")
            screen.wait_for(PROMPT)
            screen.type("w5\n")
            screen.wait_for(" w")
            screen.type("\x03")
            screen.wait_for(PROMPT)
            screen.type("\x04")
            screen.drain()
            assert process.wait(timeout=30) == 0
        assert "Traceback" not in screen.shown
        assert "error" not in screen.shown
        assert processes_left(folder) == []
