"""`LLM` in scripts: that fork, start other processes, make the same LLM again, end in any way.

Or have modules of their own beside them.
"""

import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotcold.actors import launch
from hotcold.actors.protocol.options import SystemOptions
from hotcold.jobs.running import own
from hotcold.jobs.running.own import OwnSystem
from tests.e2e.commands import CHECKOUT, environment, processes_left, ray_folder

SCRIPT = """
import multiprocessing, os, sys
from concurrent.futures import ProcessPoolExecutor

from hotcold import LLM, HotcoldError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def told(act):
    try:
        return act()
    except HotcoldError as error:
        return f"{type(error).__name__}: {error}"


def ask(llm):
    return llm.generate("def add(a, b):", GREEDY).text


def use(llm, answers):
    answers.put(told(lambda: ask(llm)))
    answers.put(told(llm.telemetry))
    answers.put(told(lambda: LLM(own=True, threads=1)))


def fork_and_exit(llm):
    if (child := os.fork()) == 0:
        del llm
        sys.exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    llm = LLM(own=True, context_length=128, progress=False)
    first = ask(llm)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=use, args=(llm, answers))
    child.start()
    found = [answers.get() for _ in range(3)]
    child.join()
    assert child.exitcode == 0
    assert all("was forked from one that runs Ray" in each for each in found), found
    assert all("\\n" not in each for each in found), found

    del child  # it holds the LLM
    llm_again = LLM(own=True, context_length=128, progress=False)
    assert llm_again._in_flight.connection is llm._in_flight.connection
    assert fork_and_exit(llm) == 3
    del llm
    assert ask(llm_again) == first

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        told_by_pool = told(lambda: pool.submit(ask, llm_again).result())
    assert "handed to Ray's tasks and actors alone" in told_by_pool, told_by_pool

    assert "runs a model already" in told(lambda: LLM(own=True, threads=1))
    llm_again.close()

    sys.ps1 = ">>> "  # as in a notebook, where `Out` and the last error hold what cells made
    held = LLM(own=True, context_length=64, progress=False)
    with LLM(own=True, context_length=64, progress=False):
        pass
    assert ask(held) == first
    LLM(own=True, context_length=64, progress=False).close()
    assert "this LLM is closed" in told(lambda: ask(held)), told(lambda: ask(held))
    assert "this LLM is closed" in told(held.telemetry)
    with LLM(own=True, context_length=128, progress=False) as other:
        del held
        assert ask(other) == first
        assert "runs a model already" in told(lambda: LLM(own=True, threads=1))
    print("done", flush=True)
"""


def test_forks_pools_and_cells_that_run_again(tmp_path: Path) -> None:
    """A fork is refused at once, its end leaves the parent's system alone, cells share one."""
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    with ray_folder() as ray:
        done = subprocess.run(
            [sys.executable, script], cwd=tmp_path, env=environment(ray), text=True,
            capture_output=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout == "done\n"
        assert processes_left(ray) == []


def test_while_one_starts_no_other_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What uses another system goes on; who wants the same one waits, and shares it."""
    system: Any = SimpleNamespace(call=lambda name: None, owns_ray=False)
    config: Any = SimpleNamespace(max_batch=1)
    begun, loaded, started = threading.Event(), threading.Event(), []

    def start(prepared: Any) -> OwnSystem:
        begun.set()
        assert loaded.wait(60)
        started.append(prepared)
        return OwnSystem(system, config)

    monkeypatch.setattr(own, "start_prepared", start)
    monkeypatch.setattr(launch, "prepare_in_cluster", lambda *arguments: "prepared")
    other, options = OwnSystem(system, config), SystemOptions()
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(own.start, tmp_path, options) for _ in range(2)]
        try:
            assert begun.wait(60)
            pool.submit(other.end_sharing).result(60)
            pool.submit(other.close).result(60)
        finally:
            loaded.set()
        first, second = (each.result(60) for each in asked)
    assert first is second and first.num_users == 2 and started == ["prepared"]
    first.close()
    assert first.num_users == 1
    second.close()
    assert first.is_closed and not own._started


WAIT_S = 600.0
OWN = ("model.py", "jobs.py", "torch.py", "actors.py", "ui/__init__.py")
# So many tokens go through matrix products, for which services import what steps do not need.
USERS_SCRIPT = """
import os, sys
path = list(sys.path)
import model, ui  # the script's own
from hotcold import LLM, SamplingParams
{start}
llm = LLM(threads=1, own=True)
print(llm.generate("return the wrapped text " * 50, SamplingParams(max_tokens=2)).token_ids)
processes = llm._in_flight.connection.system.call("processes").values()
maps = [open(f"/proc/{{pid}}/maps").read() for pid in processes]
print(any("libllvmlite" in one for one in maps), [f for f in path if f not in sys.path], flush=True)
print("torch" in sys.modules, model.MARK, os.getcwd() == {folder!r}, flush=True)
{end}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose modules leave a mark with the name of the process that runs them."""
    for name in OWN:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(
            f"import os\nMARK = {name!r}\n"
            f"print({name!r}, os.getpid(), file=open({str(tmp_path / 'marks')!r}, 'a'))\n"
        )
    yield tmp_path


RAY = "import ray; ray.init(num_cpus=2, include_dashboard=False)"


@pytest.mark.parametrize(
    ("start", "end"),
    [(RAY, ""), ("", "import time; time.sleep(1000)")],
    ids=["ends", "killed"],
)
def test_no_service_runs_a_module_of_the_scripts_folder(folder: Path, start: str, end: str) -> None:
    """The script closes nothing, and nothing is left when it has ended or is killed."""
    script = folder / "script.py"
    script.write_text(USERS_SCRIPT.format(start=start, end=end, folder=str(folder)))
    with ray_folder() as ray:
        process = subprocess.Popen(
            [sys.executable, str(script)], cwd=folder, env=environment(ray), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(3)]
        if end:
            process.kill()
        _, err = process.communicate(timeout=WAIT_S)
        assert lines[1:] == ["True []", "False model.py True"], err
        assert process.returncode == (-signal.SIGKILL if end else 0), err
        marks = {line.split()[0] for line in (folder / "marks").read_text().splitlines()}
        pids = {line.split()[1] for line in (folder / "marks").read_text().splitlines()}
        assert marks == {"model.py", "ui/__init__.py"} and pids == {str(process.pid)}
        assert processes_left(ray) == []


def test_tasks_and_actors_ask(
    local_ray: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of a Ray program, in the Ray of this process; the thorough run starts its own."""
    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setattr("sys.argv", ["ray_program.py"])
    runpy.run_path(str(CHECKOUT / "examples" / "ray_program.py"), run_name="__main__")
    told = "textwrap.dedent: Remove any common leading whitespace"
    assert told in capsys.readouterr().out
