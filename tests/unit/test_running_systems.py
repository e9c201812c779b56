"""How a running system is found: whose folder, which record, what is the same system.

And what is left of a server's start that fails.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from hotcold.actors.protocol.messages import (
    GenerateRequest,
    Generation,
    LoadProgress,
    SystemConfig,
)
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.preflight import prepare_system
from hotcold.actors.system import System
from hotcold.jobs.cluster_system import _difference
from hotcold.jobs.commands import stop as stop_module
from hotcold.jobs.commands.ps import ps
from hotcold.jobs.commands.stop import stop
from hotcold.jobs.running import find as find_module
from hotcold.jobs.running import identity as identities
from hotcold.jobs.running import registry
from hotcold.jobs.running.client import Client
from hotcold.jobs.running.find import find_system
from hotcold.jobs.running.identity import identity_of, is_same, model_text, resolved_options
from hotcold.jobs.running.registry import Record, Registration
from hotcold.jobs.running.served import ModelPlan, SystemStarter
from hotcold.model.errors import ServiceError, UsageError
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.weights.quantized_checkpoint import write_quantized
from hotcold.ui.api.backend import Backend, ServerSettings
from hotcold.ui.model_loading import Need
from tests.quantized_models import make_model

# The identity of a system that nobody asks for.
OTHER: dict[str, Any] = {"code": "x", "model": "m", "options": {}}


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a user's registry, which is made when it is needed."""
    with tempfile.TemporaryDirectory(prefix="hc-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder, "hotcold")


@pytest.fixture
def claim(base: Path) -> Iterator[Any]:
    """Registers a server with one model of that name, until the test ends."""
    with ExitStack() as stack:

        def made(name: str, identity: Any = OTHER, **resolved: Any) -> Registration:
            registration = Registration(name, "")
            stack.callback(registration.listener.close)
            stack.callback(registration.close)
            registration.add(name, identity)
            registration.publish(name, resolved=resolved)
            return registration

        yield made


def kill(registration: Registration) -> None:
    """Have it end as where its process is killed: its socket may listen a moment longer."""
    for _, lock in registration._locks.values():
        os.close(lock)
    registration._locks.clear()


def names() -> list[str]:
    return [one.name for one in registry.running()]


def test_a_record_that_is_removed_while_it_is_published_stays_removed(
    base: Path, claim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a descriptor closed twice, which may be another file's by then."""
    before = set(os.listdir("/proc/self/fd"))
    registration = claim("one")
    remover = threading.Thread(target=registration.remove, args=("one",))
    write = registry._write

    def written(*arguments: Any) -> int:
        remover.start()
        remover.join(0.3)  # as far as it comes
        return write(*arguments)

    monkeypatch.setattr(registry, "_write", written)
    registration.publish("one", resolved={})
    remover.join(60)
    registration.publish("one", resolved={})  # too late
    assert [path.name for path in base.iterdir()] == ["one.sock"]
    assert len(set(os.listdir("/proc/self/fd")) - before) == 1  # the socket


def test_a_folder_without_locks_is_told(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS. A command that only looks goes on."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(registry.fcntl, "flock", flock)
    (registry.own_folder() / "old.json").write_text("{}")
    with pytest.raises(UsageError, match=r"cannot be locked \(No locks.* XDG_RUNTIME_DIR"):
        Registration("one", "")
    assert names() == []


def test_a_folder_of_another_user_is_neither_used_nor_made(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`su` and `sudo` may leave XDG_RUNTIME_DIR: nothing can be, or should be, made there."""
    other = os.geteuid() + 1
    monkeypatch.setenv("TMPDIR", str(base.parent))
    monkeypatch.setattr(os, "geteuid", lambda: other)
    own = base.parent / f"hotcold-{other}"
    assert registry.systems_folder() == own
    assert CliRunner().invoke(ps).exit_code == 0
    (base.parent / "file").touch()
    for given in (str(base / "not there"), str(base.parent / "file"), "relative"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", given)
        assert registry.systems_folder() == own
    own.mkdir(mode=0o700)
    with pytest.raises(UsageError, match="belongs to another user"):
        registry.own_folder()
    assert registry.found_folder() is None


def _open(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o750)


def _link(folder: Path) -> None:
    (folder.parent / "real").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "real")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (_open, "is open to others (mode 750, not 700)"),
        (_link, "is no folder"),
        (Path.touch, "cannot be used (File exists)"),
    ],
)
def test_another_folder_is_refused(base: Path, make: Any, told: str) -> None:
    make(base)
    with pytest.raises(UsageError) as refused:
        registry.own_folder()
    assert told in str(refused.value)
    assert registry.found_folder() is None
    for command in (ps, stop):
        assert told in str(CliRunner().invoke(command).exception)
    with pytest.raises(UsageError):
        find_system(None, SystemOptions(), 60.0, False)
    assert find_system(None, SystemOptions(), 0.0, False) is None  # starts one of its own


def test_a_record_exists_as_long_as_its_process(base: Path, claim: Any) -> None:
    first, second = claim("a model!", mode="exact"), claim("a model!")
    assert names() == ["a-model", "a-model-2"]
    assert base.stat().st_mode & 0o777 == 0o700
    assert (base / "a-model.sock").stat().st_mode & 0o777 == 0o600
    (found, other) = registry.running()
    assert (found.pid, found.resolved, found.model) == (os.getpid(), {"mode": "exact"}, "a model!")
    assert (found.socket, other.socket) == ("a-model.sock", "a-model-2.sock")
    kill(second)
    assert names() == ["a-model"]
    assert {path.name for path in base.iterdir()} == {"a-model.json", "a-model.sock"}
    first.close()
    first.close()
    assert list(base.iterdir()) == []


def test_a_server_has_several_models_and_none_twice(claim: Any) -> None:
    """Its socket outlives its first model; another server has that name meanwhile."""
    first = claim("one")
    first.add("two", OTHER)
    first.remove("one")
    assert names() == ["two"] and registry.running()[0].socket == "one.sock"
    claim("one")
    assert names() == ["one-2", "two"]
    first.add("one", OTHER)
    assert names() == ["one", "one-2", "two"]
    with pytest.raises(UsageError, match="another command has just started this system"):
        claim("other", identity={**OTHER, "model": "another"}).add("one", OTHER, is_only=True)


def test_a_damaged_record_is_nobodys_and_a_newer_one_is_read(base: Path, claim: Any) -> None:
    (registry.own_folder() / "x.json").write_text("{")
    assert names() == [] and list(base.iterdir()) == []
    ((_, lock),) = claim("model")._locks.values()
    for content, found in (
        (b'{"name": "model", "pid": 7, "later": 1}', [("model", 7, "model.sock")]), (b"{}", []),
    ):  # fmt: skip
        os.ftruncate(lock, 0)
        os.pwrite(lock, content, 0)
        assert [(one.name, one.pid, one.socket) for one in registry.running()] == found


def test_a_record_that_is_replaced_while_it_is_looked_at_is_held(
    claim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registration = claim("model")
    lock = fcntl.flock

    def replaced(descriptor: int, how: int) -> None:
        if how & fcntl.LOCK_SH:  # of whoever looks, and has opened the record of before
            registration.publish("model", resolved={"seen": descriptor})
        lock(descriptor, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", replaced)
        assert names() == ["model"]


@pytest.mark.parametrize("where", ["ended", "in a container"])
def test_a_number_that_is_another_processes_is_left_alone(
    claim: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The system ended a moment before; or a container with the same folder counts otherwise."""
    with subprocess.Popen(["sleep", "600"]) as bystander:
        registration = claim("model")
        started = {"started": registry.start_of(bystander.pid) + 1} if where != "ended" else {}
        registration.publish("model", pid=bystander.pid, **started)
        if where == "ended":
            found = registry.running()
            kill(registration)
            monkeypatch.setattr(registry, "listed", lambda: found)
            assert CliRunner().invoke(stop).output == "the system 'model' has ended\n"
        else:
            refused = CliRunner().invoke(stop).exception
            assert "runs where its process cannot be seen from here" in str(refused)
        assert bystander.poll() is None
        bystander.kill()


_HOLDS = """
import signal, sys
from hotcold.jobs.running.registry import Registration
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
registration = Registration(sys.argv[1], "")
registration.add(sys.argv[1], {})
print("ready", flush=True)
signal.pause()
"""


@contextmanager
def holding(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has a system of that name."""
    program = [sys.executable, "-c", _HOLDS, *arguments]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def test_processes_are_ended_by_their_names(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they do with SIGTERM."""
    monkeypatch.setattr(stop_module, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(stop_module, "_ENDING_S", 0.5)
    with holding("a") as a, holding("b") as b, holding("c", "deaf") as c:
        said = "".join(f"the system '{name}' has ended\n" for name in ("c", "a"))
        assert CliRunner().invoke(stop, ["c", "a", "c"]).output == said
        assert (a.wait(60), c.wait(60)) == (-signal.SIGTERM, -signal.SIGKILL)
        refused = CliRunner().invoke(stop, ["b", "d"]).exception
        assert "no system named 'd' is running; these do: b" in str(refused)
        assert b.poll() is None  # nothing is ended by a list with a wrong name
    assert list(base.glob("a.json")) == list(base.glob("c.json")) == []


def same(asked: SystemOptions, running: SystemOptions, **resolved: Any) -> bool:
    model = model_text(None)
    return is_same(identity_of(model, asked), identity_of(model, running), resolved)


def test_options_tell_systems_apart_and_defaults_do_not(tmp_path: Path) -> None:
    none = SystemOptions()
    assert same(none, none, mode="exact")
    assert same(SystemOptions(mode="exact"), none, mode="exact")
    assert not same(none, SystemOptions(mode="dense"), mode="dense")
    assert "mode" not in resolved_options(SystemConfig("m", mode="sign", auto_mode=True))
    values: dict[str, Any] = {
        "exchange": "calls", "device": "cpu", "pin": "off", "hosts": ("10.0.0.1",), "mode": "sign",
        "kv_dtype": "float32", "weight_dtype": "q4",
    }  # fmt: skip
    for name in vars(none):
        is_file = name in ("plan", "predictors", "thresholds")
        value: Any = tmp_path / name if is_file else values.get(name, 7)
        asked = SystemOptions(**{name: value})
        assert not same(asked, none) and not same(none, asked), name
        assert same(asked, asked)


def in_place(file: Path) -> None:
    """Change a file's last byte, and set its time back."""
    found = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    time.sleep(0.05)  # the kernel's clock ticks
    with file.open("r+b") as stream:
        stream.write(content)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))


def test_files_cores_and_surroundings_tell_systems_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a directory, a later part of a GGUF model, what the hub's cache holds of an id."""
    hub = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    snapshot = hub / "models--org--repo" / "snapshots" / "0123"
    parts = [tmp_path / f"gguf/m-{part:05}-of-00002.gguf" for part in (1, 2)]
    files = {
        str(tmp_path / "folder"): tmp_path / "folder" / "model.safetensors",
        str(parts[0]): parts[1],
        "org/repo": snapshot / "model.safetensors",
        "org/repo:one.gguf": snapshot / "hotcold" / "one" / "predictors-sign.safetensors",
    }
    for file in (*parts, *files.values()):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"weights")
    plan = tmp_path / "plan"
    for model, file in files.items():
        seen = [identity_of(model, SystemOptions(plan=plan))]
        assert is_same(identity_of(model, SystemOptions(plan=plan)), seen[0], {})
        for change in (
            lambda file=file: in_place(file),
            lambda: plan.write_text("1"),
            lambda: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1"),
            lambda: monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {77}),
        ):
            change()
            seen.append(identity_of(model, SystemOptions(plan=plan)))
            assert not any(is_same(seen[-1], before, {}) for before in seen[:-1]), model
        plan.unlink()
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})


def test_a_copy_of_a_checkout_is_the_same_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a job of a cluster has it; the embedded model is copied too."""
    for name in ("here", "copy", "other"):
        for folder in ("jobs/__pycache__", "demo"):
            (tmp_path / name / folder).mkdir(parents=True)
        (tmp_path / name / "jobs" / "one.py").write_text(f"a = {int(name == 'other')}")
        (tmp_path / name / "jobs" / "__pycache__" / "one.pyc").write_text(name)
        (tmp_path / name / "demo" / "config.json").write_text("{}")

    def identity(name: str) -> dict[str, Any]:
        monkeypatch.setattr(identities, "_CODE", tmp_path / name)
        monkeypatch.setattr(identities, "DEMO_DIRECTORY", tmp_path / name / "demo")
        return identity_of(str(tmp_path / name / "demo"), SystemOptions())

    here, copy, other = map(identity, ("here", "copy", "other"))
    assert is_same(copy, here, {}) and not is_same(other, here, {})
    (tmp_path / "copy" / "demo" / "config.json").write_text("[]")  # as long as before
    identities._digest.cache_clear()
    assert not is_same(identity("copy"), here, {})


def test_a_running_system_is_found_by_its_name(
    claim: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `hotcold ps` shows it; a model of that name comes before, and other options are told."""
    monkeypatch.setattr(find_module, "_ready", lambda found, *rest: found.name)
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    started = SystemOptions(context_length=64)
    model = model_text(str(tmp_path / "weights.gguf"))
    claim("mine", identity_of(model, started), mode="exact", context_length=64)

    def named(name: str, **options: Any) -> Any:
        return find_system(name, SystemOptions(**options), 0.0, False)

    assert named("mine") == named("mine", context_length=64, mode="exact") == "mine"
    with pytest.raises(UsageError, match=f"leave the options out, or give its model, {model}"):
        named("mine", context_length=128)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert named("mine") is None
    monkeypatch.chdir("/")
    in_place(tmp_path / "weights.gguf")
    with pytest.raises(UsageError, match="'mine' runs with other options, cores or var"):
        named("mine")


def test_one_that_ends_before_it_answers_is_done_without(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is being stopped may have been found a moment before."""
    from hotcold.jobs.commands import generate

    resolved = {"model_path": str(DEMO_DIRECTORY), "max_batch": 8}
    gone = Client(Record("model", 1, socket="model.sock", resolved=resolved))
    asked: list[GenerateRequest] = []

    def answer_here(path: Path, options: SystemOptions, request: Any) -> Any:
        asked.append(request)
        about = {"num_neurons": 1, "has_text": True, "system": {"context_length": 9}}
        about["max_positions"] = 9
        return Generation("said", [1], "length", 1, 0.1, 0.1), about

    monkeypatch.setattr(generate, "find_system", lambda *asked: gone)
    monkeypatch.setattr(generate, "_answer_here", answer_here)
    found = CliRunner().invoke(generate.generate, ["--prompt", "a", "--max-tokens", "3"])
    assert found.exit_code == 0 and "this command starts its own" in found.output
    assert "cut at 1 token; a larger --max-tokens lets it be longer\n" in found.output
    assert [(one.prompt, one.sampling.max_tokens) for one in asked] == [("a", 3)]


def test_a_silent_system_is_told_of(claim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped, or busy: whoever connects waits a while."""
    monkeypatch.setattr("hotcold.jobs.running.client._ASK_S", 0.05)
    claim("model")
    out = CliRunner().invoke(ps).output.splitlines()
    assert out[1].split() == ["model", "model", "silent"]


def test_how_a_clusters_system_differs_is_told_as_commands_spell_it(tmp_path: Path) -> None:
    quantizable = make_model("q-llama", tmp_path / "model")

    def started(path: Path, dtype: str | None = None) -> SystemConfig:
        return prepare_system(path, SystemOptions(weight_dtype=dtype))[0]

    assert _difference(started(quantizable), str(quantizable), SystemOptions()) == ""
    other_threads = SystemOptions(num_threads=9)
    assert _difference(started(quantizable), None, other_threads).startswith("has --threads ")
    late = started(quantizable, "q4")
    assert _difference(late, None, SystemOptions(weight_dtype="q4")) == ""
    assert _difference(late, None, SystemOptions()) == ""
    text = "has --dtype q4, not q8"
    assert _difference(late, None, SystemOptions(weight_dtype="q8")) == text
    write_quantized(quantizable, tmp_path / "q8", "q8")
    for running in (started(tmp_path / "q8"), started(tmp_path / "q8", "q8")):
        assert _difference(running, None, SystemOptions(weight_dtype="q8")) == ""
    text = "has the weights as stored (q8), not --dtype q4"
    assert _difference(started(tmp_path / "q8"), None, SystemOptions(weight_dtype="q4")) == text
    other = replace(late, model_path="/elsewhere")
    assert _difference(other, str(quantizable), SystemOptions()) == "has the model /elsewhere"


class StandIn:
    """A system that has started; it has no processes."""

    def __init__(self) -> None:
        self.has_started = self.has_ended = False
        self.answers: dict[str, Any] = {"describe": CONFIG, "processes": {}}

    def call(self, method: str) -> Any:
        if isinstance(found := self.answers[method], Exception):
            raise found
        return found

    def begin(self, method: str) -> Any:
        raise AssertionError(method)

    def end(self) -> None:
        self.has_ended = True


CONFIG = SystemConfig(str(DEMO_DIRECTORY), context_length=128)
Made = tuple[SystemStarter, Backend, StandIn]


@pytest.fixture
def made(base: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """A starter whose systems start at once, and tell of it."""
    system = StandIn()
    plan = ModelPlan("demo", str(DEMO_DIRECTORY), CONFIG, Need(1))

    def start(config: SystemConfig, on_progress: Callable[[LoadProgress], None]) -> StandIn:
        assert names() == ["demo"]  # commands may wait for it
        system.has_started = True
        on_progress(LoadProgress(0, 0, "loading"))
        return system

    monkeypatch.setattr(System, "start", start)
    loader: Any = SimpleNamespace()
    registration = Registration("demo", "http://here")
    starter = SystemStarter(registration, [plan], SystemOptions())
    yield starter, Backend(CONFIG, ServerSettings("demo"), loader), system
    registration.listener.close()


def test_nothing_is_left_of_a_start_that_fails(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it has started; while its neurons are packed; once the server is to end."""
    starter, backend, system = made
    system.answers["describe"] = OSError("the disk is full")
    with pytest.raises(OSError, match="the disk is full"):
        starter.start(backend)
    assert system.has_ended and names() == []
    system.has_started = False

    def fail(config: SystemConfig) -> None:
        assert config is CONFIG
        raise ServiceError("no room for the bundles")

    monkeypatch.setattr("hotcold.jobs.running.served.require_bundles", fail)
    with pytest.raises(ServiceError, match="no room for the bundles"):
        starter.start(backend)
    starter.close()
    with pytest.raises(ServiceError, match="the server is being stopped"):
        starter.start(backend)
    assert not system.has_started and names() == []


def test_what_loading_writes_beside_a_model_is_part_of_what_it_is(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that looks at the files then finds the system that has written them."""
    starter, backend, _ = made
    start: Any = System.start

    def writing(config: SystemConfig, on_progress: Callable[[LoadProgress], None]) -> Any:
        (tmp_path / "written").touch()
        return start(config, on_progress)

    monkeypatch.setattr(System, "start", writing)
    starter._plans["demo"] = replace(starter._plans["demo"], model=str(tmp_path))
    starter.start(backend)
    (record,) = registry.running()
    asked = identity_of(str(tmp_path), SystemOptions())
    assert record.identity == json.loads(json.dumps(asked))
    assert [name for name, *_ in record.identity["files"]] == ["written"]
