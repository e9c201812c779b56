"""The command line's contract: a failure is one line and a status, a traceback only when asked."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

import hotcold
from hotcold.jobs.cli import ensure_home, main
from hotcold.jobs.support.lazy_group import LazyGroup
from hotcold.model.errors import CheckpointError
from tests.e2e.commands import run_main

failure: Exception | KeyboardInterrupt | None = None


@click.command()
@click.argument("model", required=False)
@click.option("--prompt")
@click.option("--top-k", type=int)
def fails(model: str | None, prompt: str | None, top_k: int | None) -> None:
    if failure is not None:
        raise failure
    click.echo(f"{model} {prompt} {top_k}")


@click.group()
def nested() -> None:
    pass


nested.add_command(fails, "inner")

TABLE = {
    "fails": (f"{__name__}:fails", "Fails."),
    "nested": (f"{__name__}:nested", "A group."),
}
group = LazyGroup("hotcold", lazy_commands=TABLE)

Run = Callable[..., tuple[int, str, str]]


def python(code: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=50, check=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def run_with(
        *arguments: str, error: Exception | KeyboardInterrupt | None = None
    ) -> tuple[int, str, str]:
        monkeypatch.setattr(sys.modules[__name__], "failure", error)
        status = main(arguments, group)
        out, err = capsys.readouterr()
        return status, out, err

    return run_with


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (CheckpointError("a.safetensors is\ntruncated"), 1, "error: a.safetensors is truncated"),
        (EOFError(), 1, "error: standard input ended"),
        (FileNotFoundError(2, "No such file", "/in.txt"), 1, "error: No such file: /in.txt"),
        (MemoryError(), 1, "error: not enough memory: an allocation was refused"),
        (IndexError("out of range"), 70, "error: IndexError: out of range (this is a bug; run wi"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_failure_is_one_line(
    run: Run, error: Exception | KeyboardInterrupt, status: int, told: str
) -> None:
    found, out, err = run("fails", error=error)
    assert (found, out) == (status, "")
    assert err.strip().removeprefix("hotcold: ").startswith(told) and "\n" not in err.strip()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--debug", "fails"),
        ("fails", "m", "--debug"),
        ("nested", "--debug", "inner"),
    ],
)
def test_debug_shows_the_traceback_wherever_it_stands(run: Run, arguments: tuple[str]) -> None:
    status, _out, err = run(*arguments, error=CheckpointError("truncated"))
    assert status == 1
    assert "Traceback" in err
    assert err.splitlines()[-1] == "hotcold: error: truncated"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("fails", "--promt", "x"), "Did you mean '--prompt'?"),
        (("fail",), "Did you mean 'fails'?"),
        (("fails", "--top-k", "many"), "'many' is not a valid integer"),
        (("fails", "a", "b"), "unexpected extra argument"),
        (("--no-such",), "No such option"),
    ],
)
def test_a_wrong_command_line_is_one_line(run: Run, arguments: tuple[str], text: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("hotcold: error: ")
    assert text in err
    assert "--help'" in err
    assert err.count("\n") == 1


def test_an_interrupt_while_a_command_is_imported_is_not_lost(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python loses one that comes in a callback of its own."""
    module = tmp_path / "loses_interrupts.py"
    module.write_text(
        "import signal\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
        f"from {__name__} import fails\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(TABLE, "lost", ("loses_interrupts:fails", "Is imported."))
    assert run("lost") == (130, "", "\n")
    assert "loses_interrupts" in sys.modules
    assert run("lost") == (0, "None None None\n", "")


def test_an_interrupt_in_a_callback_comes_again() -> None:
    code = """
import signal, time, click
from hotcold.jobs.cli import run

class Gone:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

@click.command()
def command():
    gone = Gone()
    del gone
    time.sleep(60)
    print("went on")

run(command)
"""
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\n")


@pytest.mark.parametrize("ignored", [False, True])
def test_an_interrupt_before_the_command_is_imported_is_quiet(ignored: bool) -> None:
    code = f"""
import signal, sys
from importlib.abc import MetaPathFinder

class Interrupts(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            signal.raise_signal(signal.SIGINT)

if {ignored}:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.meta_path.insert(0, Interrupts())
sys.argv = ["hotcold", "--version"]
from hotcold.__main__ import run

run()
"""
    done = python(code)
    if ignored:
        assert (done.returncode, done.stderr) == (0, "")
        assert hotcold.__version__ in done.stdout
    else:
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "\n")


def test_a_folder_of_its_name_is_not_taken_for_it(tmp_path: Path) -> None:
    """As the one of a checkout is, seen from the folder that it is in, after `pip install -e`."""
    code = f"""
import runpy, sys, types
sys.modules["hotcold"] = types.ModuleType("hotcold")  # as of a folder without code
sys.argv = ["hotcold", "--version"]
runpy.run_path({str(Path(hotcold.__file__).with_name("__main__.py"))!r}, run_name="__main__")
"""
    done = python(code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert hotcold.__version__ in done.stdout


ENDING = """
import atexit, os, signal, sys, time
import click
from hotcold.jobs.cli import run

class Crash:
    def __del__(self, abort=os.abort):  # as Ray's destructors may at the end of Python
        abort()

def end():
    os.kill(os.getpid(), signal.SIGINT)  # in the midst of the clean-up
    time.sleep(0.01)
    print("cleaned up")

@click.command()
@click.argument("how")
def command(how):
    sys.crash = Crash()
    atexit.register(end)
    print("an answer")
    if how == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    if how == "terminated":
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except SystemExit:
            sys.exit(1)  # as Ray's calls do that wait

run(command)
"""


@pytest.mark.parametrize(
    ("how", "status"), [("interrupted", 130), ("terminated", 143), ("done", 0)]
)
def test_a_process_ends_without_taking_apart_what_threads_use(how: str, status: int) -> None:
    done = python(ENDING, how)
    assert (done.returncode, done.stderr.strip()) == (status, "")
    assert done.stdout == "an answer\ncleaned up\n"


# Writes at once, at its end, and beside a file that it opens.
WRITING = """
import click
from hotcold.jobs.cli import run

@click.command()
@click.argument("how")
@click.argument("file")
def command(how, file):
    with open(file, "w") as opened:
        print("an answer", flush=how == "flush")
        click.echo("a remark", err=True)
        opened.write("of the file")

run(command)
"""


@pytest.mark.parametrize(
    ("how", "shell", "status", "says"),
    [
        ("flush", ">&-", 1, "hotcold: error: standard output: Bad file descriptor"),
        ("end", "<&- >&-", 1, "hotcold: error: standard output: Bad file descriptor"),
        ("flush", ">/dev/full", 1, "hotcold: error: standard output: No space left on device"),
        ("end", ">/dev/full", 1, "hotcold: error: standard output: No space left on device"),
        ("flush", "unread", 141, None),
        ("end", "unread", 141, None),
        ("end", "2>/dev/full", 0, None),
        ("end", ">&- 2>&-", 1, None),
    ],
)
def test_output_that_is_closed_or_full_is_one_line(
    how: str, shell: str, status: int, says: str | None, tmp_path: Path
) -> None:
    """The status is that of usual programs; what is opened does not become standard output."""
    program, file = tmp_path / "program.py", tmp_path / "file"
    program.write_text(WRITING)
    line = f"exec '{sys.executable}' '{program}' {how} '{file}' {shell.replace('unread', '')}"
    output, pipe = subprocess.PIPE, tuple[int, ...]()
    if shell == "unread":
        pipe = os.pipe()
        os.close(pipe[0])
        output = pipe[1]
    done = subprocess.run(
        ["bash", "-c", line], stdout=output, stderr=subprocess.PIPE, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    for number in pipe[1:]:
        os.close(number)
    assert done.returncode == status, done.stderr
    told = [line for line in done.stderr.splitlines() if line != "a remark"]
    assert told == ([says] if says else [])
    assert (done.stdout or "") == ("an answer\n" if status == 0 else "")
    assert not file.exists() or file.read_text() in ("", "of the file")


@pytest.mark.parametrize(
    ("home", "is_known", "found"),
    [
        (None, False, "/"),  # a number without a name, as in containers
        (None, True, None),
        ("here", True, "/"),  # of the current folder, which is foreign
        ("/nonexistent", False, "/nonexistent"),
    ],
)
def test_every_user_has_a_home(
    home: str | None, is_known: bool, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(user: int) -> pwd.struct_passwd:
        if is_known:
            return pwd.struct_passwd(("a", "x", user, user, "", "/home/a", "/bin/sh"))
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", look_up)
    monkeypatch.delenv("HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    ensure_home()
    assert os.environ.get("HOME") == found
    assert Path.home() == Path(found or "/home/a")


@pytest.mark.parametrize(
    ("words", "options"), [("help", "--help"), ("help ps", "ps --help"), ("version", "--version")]
)
def test_help_and_version_are_commands_too(words: str, options: str) -> None:
    told = run_main(*words.split()).out
    assert told == run_main(*options.split()).out != ""
    assert "Did you mean 'ps'?" in run_main("help", "pss").refusal


# Where Linux is not, one line says so.
ELSEWHERE = "import sys; sys.platform = 'darwin'; sys.modules['fcntl'] = None\n"
COMMAND = "from hotcold.__main__ import run; sys.argv = ['hotcold', {!r}]; run()"
TOLD = "hotcold runs on Linux only; use a container, or WSL 2 on Windows"


@pytest.mark.parametrize("command", ["doctor", "list"])
def test_other_systems_are_refused_in_one_line(command: str) -> None:
    done = python(ELSEWHERE + COMMAND.format(command))
    assert (done.returncode, done.stderr) == (1, f"hotcold: error: {TOLD}\n")


def test_the_python_api_refuses_them_too() -> None:
    assert TOLD in python(f"{ELSEWHERE}from hotcold import LLM").stderr.splitlines()[-1]
    assert python(f"{ELSEWHERE}from hotcold import __version__, HotcoldError").returncode == 0
