"""Scripts as users run them: with modules of their own beside them, ended in any way."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.commands import environment, processes_left, ray_folder

WAIT_S = 170.0
OWN = ("model.py", "jobs.py", "torch.py", "actors.py", "ui/__init__.py")
# So many tokens go through matrix products, for which services import what steps do not need.
SCRIPT = """
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
    script.write_text(SCRIPT.format(start=start, end=end, folder=str(folder)))
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
