"""Systems that stay, as their user meets them: real commands, and real signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import (
    command_line,
    environment,
    processes_left,
    ray_folder,
    run_here,
)
from tests.e2e.server import await_that, serving

WORDS = "w5 w9 w2"
DEMO = ["--chat", "--temperature", "0", "--prompt", "What does textwrap.dedent do?"]
GREEDY = ["--temperature", "0", "--ignore-eos", "--max-tokens", "12"]
LONG = ["--context", "50100"]  # so that an answer may take as long as a test needs
WAIT_S = 600.0
WORK = {  # of steps, which drafts change
    "neurons_computed", "gates_computed", "ups_computed", "drafts", "draft_tokens",
    "accepted_tokens", "accepted_by_position",
}  # fmt: skip


@dataclass
class Machine:
    """A user's folder of systems, a folder for their Ray, and the model that they have."""

    systems: Path
    ray: Path
    model: Path

    @property
    def question(self) -> list[str]:
        return ["generate", str(self.model), "--chat", "--prompt", WORDS, *GREEDY, *LONG]

    @property
    def endless(self) -> list[str]:
        asked = ["--prompt", WORDS, "--max-tokens", "50000", "--ignore-eos"]
        return ["generate", str(self.model), *asked, *LONG]

    @property
    def changes(self) -> dict[str, str]:
        return {"XDG_RUNTIME_DIR": str(self.systems.parent)}

    def begin(
        self, *arguments: str, stdin: int = subprocess.DEVNULL, **changes: str
    ) -> subprocess.Popen[str]:
        """`changes` are of its environment."""
        return subprocess.Popen(
            command_line(arguments), stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment(self.ray, self.changes | changes), start_new_session=True, text=True,
        )  # fmt: skip

    def run(self, *arguments: str, stdin: str | None = None) -> tuple[str, str]:
        """What a command that does well prints."""
        process = self.begin(*arguments, stdin=subprocess.PIPE)
        out, err = process.communicate(stdin, timeout=WAIT_S)
        assert process.returncode == 0, err
        return out, err

    def ask(self, *arguments: str) -> tuple[dict[str, Any], str]:
        """The answer to the question, and standard error."""
        out, err = self.run(*self.question, "--json", *arguments)
        return json.loads(out.splitlines()[-1]), err

    def run_here(self, *arguments: str) -> str:
        """The same of a command that starts nothing, in this process: tests ask again and again."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.changes.items():
                patch.setenv(name, value)
            done = run_here(*arguments)
        assert done.status == 0, done.err
        return done.out

    def listed(self) -> list[dict[str, Any]]:
        found = json.loads(self.run_here("ps", "--json").splitlines()[-1])
        return list(found["systems"])

    def has_nothing(self) -> bool:
        """Whether no process, session, record or socket is left."""
        if any(self.systems.glob("*")) or any(self.ray.iterdir()):
            return False
        return processes_left(self.ray, 0) == []


@pytest.fixture
def machine(words: Path) -> Iterator[Machine]:
    base = Path(tempfile.mkdtemp(prefix="hc-", dir="/tmp"))
    with ray_folder() as folder:
        made = Machine(base / "hotcold", folder, words)
        shared = set(os.listdir("/dev/shm"))
        try:
            yield made
        finally:
            made.run_here("stop")
            assert processes_left(folder) == []
            shutil.rmtree(base)
        assert {name for name in os.listdir("/dev/shm") if str(os.getpid()) in name} <= shared


def test_a_kept_system_answers_as_its_own_would_until_nobody_asks(machine: Machine) -> None:
    """One system goes through all: two that start it at once, others, Ctrl-C, a chat, the end."""
    own, err = machine.ask("--own")
    assert "system" not in err and machine.has_nothing()
    both = [machine.begin(*machine.question, "--keep", "10m") for _ in range(2)]
    told = [process.communicate(timeout=WAIT_S) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert [out for out, _ in told] == [own["text"] + "\n"] * 2
    heads = sorted(err.splitlines()[0] for _, err in told)
    assert heads == [
        "the system 'words' stays for 600 s after its last answer",
        "using the system 'words' that is kept",
    ]
    (found,) = machine.listed()
    assert (found["name"], found["mode"], found["status"]) == ("words", "exact", "ready")
    assert found["memory_bytes"] > 50 << 20 and found["tokens_per_s"] > 0
    assert 500 < found["left_s"] <= 600 and found["idle_s"] < 100
    top, _ = machine.run("top")
    assert top.startswith("words  exact  up ") and re.search(r"^cpu0 +alive +cpu ", top, re.M)

    # What is asked for by its default's value is the same system; the answer is the same tokens.
    result, err = machine.ask("--parallel", "8", "--kv-tokens", "50100")
    assert err.startswith("using the system 'words' that is kept\n[12 tokens, length; prefill ")
    assert (result["ids"], result["text"]) == (own["ids"], own["text"])
    timed = {"prefill_tokens_per_s", "decode_tokens_per_s", "per_token_ms", *WORK}
    assert {key: result[key] for key in result.keys() - timed} == {
        key: own[key] for key in own.keys() - timed
    }

    process = machine.begin(*machine.endless)
    assert process.stdout is not None
    assert process.stdout.read(5)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err.rstrip("\n")) == (130, "using the system 'words' that is kept")
    await_that(lambda: machine.listed()[0]["num_active"] == 0)

    pid = machine.listed()[0]["pid"]
    arguments = [str(machine.model), *GREEDY, *LONG, "--keep", "0.5"]
    chat = machine.begin("chat", *arguments, stdin=subprocess.PIPE)
    assert chat.stdin is not None and chat.stdout is not None
    chat.stdin.write(f"{WORDS}\n")
    chat.stdin.flush()
    assert chat.stdout.readline() == own["text"] + "\n"
    time.sleep(1.5)  # longer than it is kept: a conversation holds it
    assert machine.listed()[0]["pid"] == pid
    _, err = chat.communicate("/exit\n", timeout=WAIT_S)
    assert chat.returncode == 0 and err.startswith("using the system 'words' that is kept\n")
    await_that(machine.has_nothing)
    assert machine.run("ps") == ("NAME  MODEL  MODE  MEMORY  TOKENS/S  IDLE  STAYS  AT\n", "")


def test_services_are_scaled_and_run_answers_until_its_process_is_killed(machine: Machine) -> None:
    """What `ps` lists is found by `scale`; `run` answers what is given, piped in, or both.

    Whoever asks when it is killed is told, and nothing is left.
    """
    before, _ = machine.ask("--keep", "-1")
    assert machine.run("ps")[0].splitlines()[1].endswith("  until stopped")
    for count, had in ((2, 1), (1, 2)):
        named = [] if count == 2 else ["words"]
        out, err = machine.run("scale", "--cpu-actors", str(count), *named, "--json")
        told, report = out.splitlines()
        found = json.loads(report)
        assert (found["num_cpu_actors"], found["num_cpu_actors_before"]) == (count, had)
        assert told.startswith(f"the system 'words' has {count} CPU service") and not err
        after, err = machine.ask("--cpu-actors", str(count))
        assert err.startswith("using the system 'words'") and after["ids"] == before["ids"]
    process = machine.begin("scale", "--cpu-actors", "9999")
    assert process.communicate(timeout=WAIT_S)[1].startswith("hotcold: error: --cpu-actors 9999 ")

    model = ["run", str(machine.model)]
    first, *rest = WORDS.split()
    assert machine.run(*model, first, *rest, *GREEDY, *LONG)[0] == before["text"] + "\n"
    asked = machine.run(*model, first, *GREEDY, *LONG, "--json", stdin=" ".join(rest))[0]
    both = f"{first}\n\n{' '.join(rest)}"
    line = ["generate", str(machine.model), "--chat", "--prompt", both, *GREEDY, *LONG, "--json"]
    ids = [json.loads(out.splitlines()[-1])["ids"] for out in (asked, machine.run(*line)[0])]
    assert ids[0] == ids[1]
    process = machine.begin(*model, *LONG)
    assert process.communicate(timeout=WAIT_S)[1].endswith("error: the prompt is empty; give at "
                                                           "least one token\n")  # fmt: skip

    (found,) = machine.listed()
    request_state = machine.begin(*machine.endless)
    assert request_state.stdout is not None and request_state.stdout.read(5)
    os.kill(found["pid"], signal.SIGKILL)
    _, err = request_state.communicate(timeout=WAIT_S)
    assert request_state.returncode == 1
    assert err.splitlines()[-1] == "hotcold: error: the system 'words' has ended"
    assert processes_left(machine.ray) == []
    assert [path.name for path in sorted(machine.systems.iterdir())] == ["words.json", "words.sock"]
    await_that(lambda: machine.listed() == [])  # until its last thread ends it holds its record
    assert list(machine.systems.iterdir()) == []


def test_one_that_loads_is_stopped_and_says_so(machine: Machine, tmp_path: Path) -> None:
    """With no kernel compiled, so that it loads for long enough.

    What cannot be started is told in its own words.
    """
    process = machine.begin(*machine.question, "--keep", "5", "--threads", "9999")
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("hotcold: error: --threads is 9999; give a number from 1 to ")
    await_that(machine.has_nothing)
    starting = machine.begin(*machine.question, "--keep", "-1", XDG_CACHE_HOME=str(tmp_path))
    await_that(lambda: any(found.get("progress") for found in machine.listed()))
    assert machine.run("stop") == ("the system 'words' has ended\n", "")
    out, err = starting.communicate(timeout=WAIT_S)
    assert (starting.returncode, out) == (1, "")
    # What it does is told where it came so far.
    assert re.fullmatch(r"(compiling kernels.*\n)?hotcold: error: the system .*ended.*\n", err)
    await_that(machine.has_nothing)


def test_commands_use_what_is_served(machine: Machine) -> None:
    with serving(changes=machine.changes) as server:
        out, err = machine.run("generate", *DEMO, "--keep", "5")
        assert err.startswith(f"using the system 'demo' of hotcold serve at {server.url}\n")
        assert out.startswith("Remove any common leading whitespace")
        (found,) = machine.listed()
        assert (found["url"], found["left_s"]) == (server.url, None)
        assert machine.run("stop")[0] == "no system is kept\n"
        process = machine.begin("stop", "demos")
        assert process.communicate(timeout=WAIT_S)[1] == (
            "hotcold: error: no system named 'demos' is running; these do: demo (those of a Ray "
            "cluster are not listed)\n"
        )
        assert machine.run("stop", "demo") == ("the system 'demo' has ended\n", "")
        assert server.end() == (0, "")
