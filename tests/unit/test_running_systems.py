"""How a running system is found: whose folder, which record, what is the same system."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hotcold.actors.protocol.messages import GenerateRequest, Generation, SystemConfig
from hotcold.actors.protocol.options import SystemOptions
from hotcold.jobs.commands import stop as stop_module
from hotcold.jobs.commands.ps import ps
from hotcold.jobs.commands.scale import scale
from hotcold.jobs.commands.stop import stop
from hotcold.jobs.running import find as find_module
from hotcold.jobs.running import identity as identities
from hotcold.jobs.running import registry
from hotcold.jobs.running.client import Client
from hotcold.jobs.running.find import find_system
from hotcold.jobs.running.identity import identity_of, is_same, model_text, resolved_options
from hotcold.jobs.running.registry import Record, Registration
from hotcold.model.errors import ServiceError, UsageError
from hotcold.model.files.locate import DEMO_DIRECTORY
from tests.documents import ROOT

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
    """Have it end as where its process is killed."""
    for _, lock in registration._locks.values():
        os.close(lock)
    registration._locks.clear()
    registration.listener.close()


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
        remover.join(1.0)  # as far as it comes
        return write(*arguments)

    monkeypatch.setattr(registry, "_write", written)
    registration.publish("one", resolved={})
    remover.join(60)
    registration.publish("one", resolved={})  # too late
    assert [path.name for path in base.iterdir()] == ["one.sock"]
    assert len(set(os.listdir("/proc/self/fd")) - before) == 1  # the socket


def test_the_folder_is_made_for_its_user_alone(base: Path) -> None:
    assert registry.found_folder() is None
    made = registry.own_folder()
    assert made == base and made.stat().st_mode & 0o777 == 0o700
    assert registry.own_folder() == registry.found_folder() == made


def test_a_folder_without_locks_is_told(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS. A command that only looks goes on."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(registry.fcntl, "flock", flock)
    (registry.own_folder() / "old.json").write_text("{}")
    with pytest.raises(UsageError, match=r"cannot be locked \(No locks.* XDG_RUNTIME_DIR"):
        Registration("one", "")
    assert names() == []


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


def test_a_folder_of_another_user_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.geteuid() + 1
    monkeypatch.setenv("TMPDIR", str(base.parent))
    (base.parent / f"hotcold-{other}").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(UsageError, match="belongs to another user"):
        registry.own_folder()
    assert registry.found_folder() is None


def test_a_runtime_folder_of_another_user_is_passed_over(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`su` and `sudo` may leave it: nothing can be, or should be, made there."""
    other = os.geteuid() + 1
    monkeypatch.setenv("TMPDIR", str(base.parent))
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert registry.systems_folder() == base.parent / f"hotcold-{other}"
    assert CliRunner().invoke(ps).exit_code == 0
    for given in (str(base / "not there"), str(base.parent / "file"), "relative"):
        (base.parent / "file").touch()
        monkeypatch.setenv("XDG_RUNTIME_DIR", given)
        assert registry.systems_folder() == base.parent / f"hotcold-{other}"


def test_a_record_exists_as_long_as_its_process(base: Path, claim: Any) -> None:
    first, second = claim("a model!", mode="exact"), claim("a model!")
    assert names() == ["a-model", "a-model-2"]
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


def test_a_socket_outlives_its_first_model(base: Path, claim: Any) -> None:
    """A server of several models gives one up; another server has that name meanwhile."""
    first = claim("one")
    first.add("two", OTHER)
    first.remove("one")
    assert names() == ["two"] and registry.running()[0].socket == "one.sock"
    claim("one")
    assert names() == ["one-2", "two"]
    first.add("one", OTHER)
    assert names() == ["one", "one-2", "two"]


def test_one_system_is_kept_once(claim: Any) -> None:
    claim("one")
    second = claim("other", identity={**OTHER, "model": "another"})
    with pytest.raises(UsageError, match="another command has just started this system"):
        second.add("one", OTHER, is_only=True)


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


def test_what_is_damaged_is_nobody(base: Path, claim: Any) -> None:
    (registry.own_folder() / "x.json").write_text("{")
    assert names() == [] and list(base.iterdir()) == []
    registration = claim("model")
    ((_, lock),) = registration._locks.values()
    os.ftruncate(lock, 3)
    assert names() == []


def test_a_record_of_another_version_is_read_as_far_as_it_goes(claim: Any) -> None:
    registration = claim("model")
    ((_, lock),) = registration._locks.values()
    os.ftruncate(lock, 0)
    os.pwrite(lock, b'{"name": "model", "pid": 7, "later": 1}', 0)
    (found,) = registry.running()
    assert (found.name, found.pid, found.socket) == ("model", 7, "model.sock")


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user that has nothing to do with any system."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        assert process.poll() is None
        process.kill()


def test_a_number_that_is_another_processes_now_is_left_alone(
    claim: Any, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system was found a moment before; its process ended, and the number was given again."""
    registration = claim("model")
    registration.publish("model", pid=bystander.pid)
    found = registry.running()
    kill(registration)
    monkeypatch.setattr(registry, "listed", lambda: found)
    assert CliRunner().invoke(stop).output == "the system 'model' has ended\n"


def test_a_system_whose_process_is_not_to_be_seen_is_not_ended(
    claim: Any, bystander: subprocess.Popen[bytes]
) -> None:
    """As that of a container with the same folder, where another process has the number here."""
    started = registry.start_of(bystander.pid) + 1
    claim("model").publish("model", pid=bystander.pid, started=started)
    refused = CliRunner().invoke(stop).exception
    assert isinstance(refused, ServiceError)
    assert "runs where its process cannot be seen from here" in str(refused)


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


@pytest.mark.parametrize("deaf", [[], ["deaf"]])
def test_the_process_that_holds_a_system_is_ended(
    base: Path, deaf: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_module, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(stop_module, "_ENDING_S", 0.5 if deaf else 60.0)
    with holding("model", *deaf) as process:
        assert CliRunner().invoke(stop).output == "the system 'model' has ended\n"
        assert process.wait(60) == -(signal.SIGKILL if deaf else signal.SIGTERM)
    assert list(base.glob("*.json")) == []


def test_several_are_ended_by_their_names(base: Path) -> None:
    with holding("a") as a, holding("b") as b, holding("c") as c:
        said = "".join(f"the system '{name}' has ended\n" for name in ("c", "a"))
        assert CliRunner().invoke(stop, ["c", "a", "c"]).output == said
        assert [process.wait(60) for process in (a, c)] == [-signal.SIGTERM] * 2
        refused = CliRunner().invoke(stop, ["b", "d"]).exception
        assert "no system named 'd' is running; these do: b" in str(refused)
        assert b.poll() is None  # nothing is ended by a list with a wrong name


def test_scale_takes_one_name() -> None:
    for names, told in (
        (["a", "--system", "b"], "two systems are named, 'a' and 'b'"),
        ([""], "the system's name is empty"),
    ):
        refused = CliRunner().invoke(scale, [*names, "--cpu-actors", "1"]).exception
        assert told in str(refused)


def same(asked: SystemOptions, running: SystemOptions, **resolved: Any) -> bool:
    model = model_text(None)
    return is_same(identity_of(model, asked), identity_of(model, running), resolved)


def test_the_same_options_are_the_same_system() -> None:
    none = SystemOptions()
    assert same(none, none, mode="exact")
    assert same(SystemOptions(mode="exact"), none, mode="exact")
    assert not same(SystemOptions(mode="dense"), none, mode="exact")
    assert not same(none, SystemOptions(mode="dense"), mode="dense")
    assert not same(SystemOptions(context_length=64), none, context_length=4096)
    assert not same(SystemOptions(cpu_memory_bytes=1 << 30), none)


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
    with pytest.raises(UsageError, match="'mime' is neither a directory nor"):
        named("mime")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert named("mine") is None
    monkeypatch.chdir("/")
    in_place(tmp_path / "weights.gguf")
    with pytest.raises(UsageError, match="'mine' runs with other options, cores or var"):
        named("mine")


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
    in_place(tmp_path / "here" / "demo" / "config.json")
    assert not is_same(identity("here"), here, {})


def in_place(file: Path) -> None:
    """Change a file's last byte, and set its time back."""
    found = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    time.sleep(0.05)  # the kernel's clock ticks
    with file.open("r+b") as stream:
        stream.write(content)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (found.st_size, found.st_mtime_ns)


def test_weights_that_are_changed_in_place_are_another_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a directory, of a later part of a GGUF model, of what the hub's cache holds of an id."""
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
    for model, file in files.items():
        before = identity_of(model, SystemOptions())
        assert is_same(identity_of(model, SystemOptions()), before, {})
        in_place(file)
        assert not is_same(identity_of(model, SystemOptions()), before, {}), model


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


def test_each_option_tells_systems_apart(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "exchange": "calls", "device": "cpu", "pin": "off", "hosts": ("10.0.0.1",), "mode": "sign",
        "kv_dtype": "float32", "weight_dtype": "q4",
    }  # fmt: skip
    for name in vars(SystemOptions()):
        is_file = name in ("plan", "predictors", "thresholds")
        value: Any = tmp_path / name if is_file else values.get(name, 7)
        asked = SystemOptions(**{name: value})
        assert not same(asked, SystemOptions()) and not same(SystemOptions(), asked), name
        assert same(asked, asked)


def test_files_cores_and_surroundings_tell_systems_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hotcold").mkdir()
    model = model_text(str(tmp_path))
    plan = tmp_path / "plan"

    def identity() -> dict[str, Any]:
        return identity_of(model, SystemOptions(plan=plan))

    seen = [identity()]
    assert identity() == seen[0]
    for change in (
        lambda: (tmp_path / "config.json").write_text("{ }"),
        lambda: (tmp_path / "hotcold" / "profile").touch(),
        lambda: plan.write_text("1"),
        lambda: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1"),
        lambda: monkeypatch.setenv("HOTCOLD_NUMA_ROOT", "/elsewhere"),
        lambda: monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {77}),
    ):
        change()
        assert identity() not in seen
        seen.append(identity())


def test_an_automatic_mode_is_no_other() -> None:
    chosen = resolved_options(SystemConfig("m", mode="sign", auto_mode=True))
    assert "mode" not in chosen and chosen["model_path"] == "m"
    assert resolved_options(SystemConfig("m", mode="sign"))["mode"] == "sign"


def test_what_a_command_imports_before_it_asks_is_little() -> None:
    """Torch, Ray and Numba take a second; the first text comes in less than half of one."""
    program = (
        "import sys, click\nfrom hotcold.jobs.cli import cli\n"
        "context = click.Context(cli)\n"
        "for name in sys.argv[1:]:\n    cli.get_command(context, name)\n"
        "from hotcold.jobs.running import client, find\n"
        "heavy = 'torch ray numba numpy scipy rich psutil tokenizers huggingface_hub fastapi'\n"
        "print([name for name in heavy.split() if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, "generate", "chat", "ps", "stop"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout == "[]\n", found.stderr


def test_a_silent_system_is_told_of(claim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped, or busy: whoever connects waits a while."""
    monkeypatch.setattr("hotcold.jobs.running.client._ASK_S", 0.05)
    claim("model")
    out = CliRunner().invoke(ps).output.splitlines()
    assert out[1].split() == ["model", "model", "silent"]


def test_a_system_that_has_just_ended_is_found_no_more(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record was read a moment before; nobody listens any more."""
    identity = identity_of(model_text(None), SystemOptions())
    found = iter([[Record("demo", 1, socket="demo.sock", identity=identity)], []])
    monkeypatch.setattr(find_module, "running", lambda: next(found))
    monkeypatch.setattr(find_module, "may_be_running", lambda: True)
    assert find_system(None, SystemOptions(), 0.0, False, attends=True) is None
