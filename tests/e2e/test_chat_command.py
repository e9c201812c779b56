"""`hotcold chat`: a conversation over a pipe, and one at a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from hotcold.jobs.cli import main
from tests.e2e.commands import command_line, processes_left, ray_folder
from tests.e2e.terminal import terminal
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
    told = [line for line in err.splitlines() if "cut at 5 tokens" not in line]
    assert len(err.splitlines()) == len(told) + 4  # answers
    help_line, unknown, outgrown, no_unicode = told
    assert help_line.startswith("/help lists commands")
    assert unknown == "there is no /unknown; /help lists what there is"
    assert "the prompt has 17 tokens, the context holds 16" in outgrown
    assert "/clear" in outgrown
    assert "Unicode" in no_unicode


def test_keys_at_a_terminal(words: Path, tmp_path: Path) -> None:
    line = command_line(["chat", words, *GREEDY, "--max-tokens", "50000", "--context", "50100"])
    with ray_folder() as folder:
        changes = {"RAY_TMPDIR": str(folder), "XDG_STATE_HOME": str(tmp_path)}
        with terminal(line, changes) as (screen, process):
            screen.wait_for("Ctrl-D ends it", "0 of 50,100 tokens")
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
            screen.type("\x04")
            screen.drain()
            assert process.wait(timeout=120) == 0
        assert "Traceback" not in screen.all_text
        assert "error" not in screen.all_text
        assert processes_left(folder) == []
    kept = (tmp_path / "hotcold" / "chat-history").read_text()
    assert "+/clear" in kept and "w3" not in kept
