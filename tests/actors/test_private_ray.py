"""A private Ray: what it starts, who can reach it, what it leaves behind, and what happens where it
cannot start.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from hotcold.actors import launch
from hotcold.actors.private_ray import closed_ray, start
from hotcold.actors.private_ray.temp_folder import PREFIX, TempFolder
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.setup.ray_parts import replaced
from hotcold.actors.system import start_ray
from hotcold.model.errors import ServiceError
from hotcold.model.files.locate import DEMO_DIRECTORY
from tests.actors.private_ray_script import Echo
from tests.ray_doors import answers, listening, ray_methods


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of this test's own, with a short name."""
    with tempfile.TemporaryDirectory(prefix="hc-", dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder)


@contextmanager
def owner(
    *how: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A process with a private Ray, and what it told of it."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.actors.private_ray_script", *how],
        env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


STAND_IN = "stands_in_for_an_agent"
LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def of_kind(told: dict[str, Any], kind: str) -> list[int]:
    """Process ids of those whose program has that in its name."""
    named = {pid: words.split(" --")[0].split("/")[-1] for pid, words in told["processes"].items()}
    return [int(pid) for pid, name in named.items() if kind in name]


def open_files(process_id: int) -> set[str]:
    """The files, without sockets, that a process has open."""
    names = {os.readlink(link) for link in Path(f"/proc/{process_id}/fd").iterdir()}
    return {name for name in names if not name.startswith("socket:")}


def processes_of(pids: Iterable[int]) -> list[psutil.Process]:
    """Those that are still there."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def ended(pids: list[int]) -> bool:
    """Wait until these processes have ended."""
    processes = processes_of(pids)
    return not psutil.wait_procs(processes, timeout=600)[1]


@pytest.fixture(scope="module")
def told() -> Iterator[dict[str, Any]]:
    """What an owner told of its private Ray, which runs meanwhile."""
    with (
        tempfile.TemporaryDirectory(prefix="hc-", dir="/tmp") as folder,
        owner("1", RAY_TMPDIR=folder) as (process, running),
    ):
        yield running
        process.communicate(b"exit\n", timeout=600)
        assert ended([int(pid) for pid in running["processes"]])
        assert not Path(running["folders"][0]).exists()


def test_it_starts_only_what_is_needed_and_leaves_nothing(base: Path) -> None:
    with owner() as (process, told):
        assert told["said"] == "here"
        servers = of_kind(told, "fork_server")
        assert open_files(servers[0]) == {os.devnull}
        assert list(base.glob(f"{PREFIX}*")) == [Path(told["folders"][0])]
        process.communicate(b"shutdown\n", timeout=600)
        assert ended([int(pid) for pid in told["processes"]])
    assert not list(base.iterdir())
    assert "ray" in told["imports"] and "pydantic" not in told["imports"]  # 10 MB a worker
    # A worker takes its name once it has begun to work; until then it has its server's.
    forked = {int(pid) for pid, parent in told["parents"].items() if parent in servers}
    kinds = ("gcs_server", "raylet", STAND_IN)
    assert [len(of_kind(told, kind)) for kind in kinds] == [1, 1, 2]
    assert len(forked) == 3
    assert len(told["processes"]) == 8  # the fork server is one of them
    # Ray kills the process group of a worker that has ended.
    assert forked <= set(told["groups"])
    assert len(set(told["drawn"])) == 2  # forked workers draw ids of their own
    assert told["has_memory"]  # of /dev/shm, all that its object store may fill
    assert told["monitor_every_ms"] == "0"


def test_all_end_with_their_owner_and_a_killed_ones_folder_with_the_next_start(
    told: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are left alone, and end with theirs: one that is interrupted; `told` exits."""
    living = Path(told["folders"][0])
    base = living.parent
    monkeypatch.setenv("RAY_TMPDIR", str(base))
    with owner("1") as (killed, told_by_killed):
        foreign = base / f"{PREFIX}file"
        foreign.write_text("")
        elsewhere = base / "elsewhere"
        (elsewhere / "kept").mkdir(parents=True)
        (base / f"{PREFIX}link").symlink_to(elsewhere)
        killed.send_signal(signal.SIGKILL)
        assert ended([int(pid) for pid in told_by_killed["processes"]])
        assert Path(told_by_killed["folders"][0]).exists()
        with owner("1") as (next_one, told_by_next):
            left = set(base.glob(f"{PREFIX}*"))
            assert Path(told_by_killed["folders"][0]) not in left
            for each in (told, told_by_next):
                assert Path(each["folders"][0]) in left
                assert psutil.pid_exists(of_kind(each, "gcs_server")[0])
                assert psutil.pid_exists(of_kind(each, "raylet")[0])
            next_one.send_signal(signal.SIGINT)
            next_one.communicate(timeout=600)
            assert ended([int(pid) for pid in told_by_next["processes"]])
    left_over = {living.name, "elsewhere", f"{PREFIX}file", f"{PREFIX}link"}
    assert {path.name for path in base.iterdir()} == left_over
    TempFolder.remove_dead()
    assert {path.name for path in base.iterdir()} == left_over
    assert foreign.exists() and (elsewhere / "kept").exists()


def in_its_own_process(check: Callable[[Path], None], folder: Path) -> None:
    """Call `check` where no other test has started Ray."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        pool.submit(check, folder).result(timeout=600)


class Said(logging.Handler):
    """The lines that some of hotcold's own loggers are given."""

    def __init__(self, *modules: Any) -> None:
        super().__init__()
        self.lines: list[str] = []
        for module in modules:
            logging.getLogger(module.__name__).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def start_another_version(base: Path) -> None:
    def unknown(*_: object) -> None:
        raise TypeError("the raylet's command has changed")

    said = Said(launch)
    before = set(psutil.Process().children(recursive=True))
    setattr(start, "_node_class", unknown)  # noqa: B010
    launch.start_local_ray(1, 0)
    assert said.lines == [
        "Ray has started in its own way, which takes longer: the raylet's command has changed"
    ]
    assert len(list(base.glob(f"{PREFIX}*"))) == 1  # that of the private one has been removed
    assert ray.get(Echo.remote().say.remote("here")) == "here"  # type: ignore[attr-defined]
    children = set(psutil.Process().children(recursive=True)) - before
    servers = [child for child in children if "gcs_server" in child.name()]
    assert len(servers) == 1  # that of the private one has been ended
    sockets = listening([psutil.Process(), *children])
    assert {address for address, _ in sockets} <= LOOPBACK
    ray.shutdown()


def start_an_open_ray(base: Path) -> None:
    """One that asks for no token, whatever it is told."""
    asks_for_none = replaced(closed_ray, "_MODE", "A_VARIABLE_OF_ANOTHER_VERSION")
    os.environ["RAY_AUTH_MODE"] = "disabled"
    system = SystemConfig(str(DEMO_DIRECTORY))
    said = r"^Ray \S+ answers OK at 127\.0\.0\.1:\d+ without a token"
    with asks_for_none, pytest.raises(ServiceError, match=said):
        start_ray([system])
    assert not ray.is_initialized()
    assert not list(base.glob(f"{PREFIX}*"))


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize("check", [start_an_open_ray, start_another_version])
def test_where_it_cannot_start(base: Path, check: Callable[[Path], None]) -> None:
    in_its_own_process(check, base)


def family(told: dict[str, Any]) -> list[psutil.Process]:
    """The owner and the processes of its Ray that are still there: workers that wait may end."""
    return processes_of(map(int, (told["owner"], *told["processes"])))


def test_ports_are_for_this_machine_alone_and_files_for_this_user(told: dict[str, Any]) -> None:
    addresses = [address for address, _ in listening(family(told))]
    assert len(addresses) >= 4  # of GCS server, raylet, object manager, owner
    assert set(addresses) <= LOOPBACK
    folder = Path(told["folders"][0])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    (sockets,) = folder.glob("**/sockets")
    assert {path.name for path in sockets.iterdir()} == {"raylet", "plasma_store"}


def test_no_port_answers_without_the_token(told: dict[str, Any]) -> None:
    methods = list(ray_methods())
    ports = [port for _, port in listening(family(told))]
    for port in ports:
        refused = answers(port, methods)
        assert set(refused) == {"UNAUTHENTICATED", "UNIMPLEMENTED"}, port
        assert answers(port, methods, "0" * 64) == refused
        with (
            pytest.raises((OSError, HTTPException)),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/"),
        ):
            pass
    # The way to ask is right: with the token the same question is answered.
    token = (Path(told["folders"][0]) / "token").read_text()
    ping = ["/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"]
    assert sum((answers(port, ping, token) for port in ports), Counter())["OK"] == 1


@pytest.mark.parametrize(
    ("has_own", "status", "when"),
    [(True, 143, "registering"), (False, -signal.SIGTERM, "running")],
)
def test_sigterm_ends_a_program_as_without_ray(
    has_own: bool, status: int, when: str, base: Path
) -> None:
    """Ray would print a stack, once its part of the program has begun to register."""
    program = f"""
import os, signal, sys
import ray
from hotcold.actors.launch import start_local_ray
if {has_own}:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
def register(*given, made=ray._raylet.CoreWorker, **more):
    worker = made(*given, **more)
    os.kill(os.getpid(), signal.SIGTERM)
    return worker
if {when == "registering"}:
    ray._raylet.CoreWorker = register
start_local_ray(1, 1 << 20)
os.kill(os.getpid(), signal.SIGTERM)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")
    if has_own:
        assert list(base.iterdir()) == []
