"""How a running system is found: whose folder, which record, what is the same system."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
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
    SystemConfig,
)
from hotcold.actors.protocol.options import SystemOptions
from hotcold.connections import KeptConnection
from hotcold.jobs.chat.conversation import Facts
from hotcold.jobs.commands.chat import chat
from hotcold.jobs.commands.scale import scale
from hotcold.jobs.kept import commands as kept_commands
from hotcold.jobs.kept import find as find_module
from hotcold.jobs.kept import folder as folders
from hotcold.jobs.kept import identity as identities
from hotcold.jobs.kept import registry
from hotcold.jobs.kept.client import GoneError, KeptSystem
from hotcold.jobs.kept.commands import ps, stop
from hotcold.jobs.kept.find import find_system
from hotcold.jobs.kept.identity import identity_of, is_same, model_text, resolved_options
from hotcold.jobs.kept.registry import Record
from hotcold.model.errors import ServiceError, UsageError
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.ui.control_api import IdleTimer, create_control_app
from tests.documents import ROOT


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(folders, "_LONGEST", 4096)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield tmp_path


def record(name: str, **changes: Any) -> Record:
    return Record(name, os.getpid(), True, name, "", {"options": {}}, **changes)


def claimed(folder: Path, name: str, **changes: Any) -> registry.Registration:
    here = os.getcwd()
    os.chdir(folder)  # pytest's folders have names too long for a socket
    try:
        with registry.locked(folder):
            return registry.register(Path(), replace(record(name), **changes))
    finally:
        os.chdir(here)


def test_a_record_that_is_removed_while_it_is_published_stays_removed(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a descriptor closed twice, which may be another file's by then."""
    registration = claimed(base, "one")
    remover, write = threading.Thread(target=registration.remove), registry._write

    def written(*arguments: Any) -> int:
        remover.start()
        remover.join(1.0)  # as far as it comes
        return write(*arguments)

    monkeypatch.setattr(registry, "_write", written)
    monkeypatch.chdir(base)  # the registration's folder is this one
    before = set(os.listdir("/proc/self/fd"))
    registration.publish(url="http://x")
    remover.join(60)
    assert registration.lock == -1 and list(base.iterdir()) == []
    assert len(set(os.listdir("/proc/self/fd")) - before) == 0
    registration.publish(url="http://y")  # too late
    assert list(base.iterdir()) == []
    registration.listener.close()


def test_the_folder_is_made_for_its_user_alone(base: Path) -> None:
    assert folders.found_folder() is None
    made = folders.own_folder()
    assert made == base / "hotcold" and made.stat().st_mode & 0o777 == 0o700
    assert folders.own_folder() == folders.found_folder() == made


def test_a_folder_without_locks_is_told(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS. A command that only looks goes on."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(registry.fcntl, "flock", flock)
    (base / "old.json").write_text("{}")
    with pytest.raises(UsageError, match=r"cannot be locked \(No locks.* XDG_RUNTIME_DIR"):
        claimed(base, "one")
    assert registry.running(base) == []


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
    make(base / "hotcold")
    with pytest.raises(UsageError) as refused:
        folders.own_folder()
    assert told in str(refused.value)
    assert folders.found_folder() is None
    for command in (ps, stop):
        assert told in str(CliRunner().invoke(command).exception)
    with pytest.raises(UsageError):
        find_system(None, SystemOptions(), 60.0, False)
    assert find_system(None, SystemOptions(), 0.0, False) is None  # starts one of its own


def test_a_folder_of_another_user_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.geteuid() + 1
    monkeypatch.setenv("TMPDIR", str(base))
    (base / f"hotcold-{other}").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(UsageError, match="belongs to another user"):
        folders.own_folder()
    assert folders.found_folder() is None


def test_a_runtime_folder_of_another_user_is_passed_over(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`su` and `sudo` may leave it: nothing can be, or should be, made there."""
    other = os.geteuid() + 1
    monkeypatch.setenv("TMPDIR", str(base))
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert folders.systems_folder() == base / f"hotcold-{other}"
    assert CliRunner().invoke(ps).exit_code == 0
    for given in (str(base / "not there"), str(base / "file"), "relative"):
        (base / "file").touch()
        monkeypatch.setenv("XDG_RUNTIME_DIR", given)
        assert folders.systems_folder() == base / f"hotcold-{other}"


def test_a_record_exists_as_long_as_its_process(base: Path) -> None:
    folder = folders.own_folder()
    first, second = claimed(folder, "a model!"), claimed(folder, "a model!")
    assert [one.name for one in registry.running(folder)] == ["a-model", "a-model-2"]
    assert (folder / "a-model.sock").stat().st_mode & 0o777 == 0o600
    os.chdir(folder)
    try:
        first.publish(pid=7, resolved={"mode": "exact"})
        (found, _) = registry.running(folder)
        assert (found.pid, found.resolved) == (7, {"mode": "exact"})
        os.close(second.lock)  # as where its process is killed
        assert [one.name for one in registry.running(folder)] == ["a-model"]
        assert {path.name for path in folder.iterdir()} == {"a-model.json", "a-model.sock"}
        first.remove()
        first.remove()
    finally:
        os.chdir(ROOT)
    assert list(folder.iterdir()) == []
    for registration in (first, second):
        registration.listener.close()


def test_a_record_outlives_who_has_handed_it_on(base: Path) -> None:
    """The command that starts a daemon hands it lock and socket, and ends."""
    folder = folders.own_folder()
    registration = claimed(folder, "model")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[registration.lock]) as holder:
        os.close(registration.lock)
        registration.listener.close()
        assert [one.name for one in registry.running(folder)] == ["model"]
        holder.kill()
        holder.wait()
        assert registry.running(folder) == []


def test_a_record_that_is_replaced_while_it_is_looked_at_is_held(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders.own_folder()
    registration = claimed(folder, "model")
    lock = fcntl.flock

    def replaced(descriptor: int, how: int) -> None:
        if how & fcntl.LOCK_SH:  # of whoever looks, and has opened the record of before
            registration.publish(pid=registration.record.pid + 1)
        lock(descriptor, how)

    monkeypatch.chdir(folder)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", replaced)
        assert [one.name for one in registry.running(folder)] == ["model"]
    registration.remove()
    registration.listener.close()


def test_what_is_damaged_is_nobody(base: Path) -> None:
    folder = folders.own_folder()
    (folder / "x.json").write_text("{")
    assert registry.running(folder) == []
    assert list(folder.iterdir()) == []
    registration = claimed(folder, "model")
    os.ftruncate(registration.lock, 3)
    assert registry.running(folder) == []
    os.close(registration.lock)
    registration.listener.close()


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user that has nothing to do with any system."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        assert process.poll() is None
        process.kill()


def test_a_number_that_is_another_processes_now_is_left_alone(
    base: Path, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system was found a moment before; its process ended, and the number was given again."""
    folder = folders.own_folder()
    registration = claimed(folder, "model", pid=bystander.pid)
    found = [(folder, registration.record)]
    monkeypatch.setattr(kept_commands, "running_systems", lambda: found)
    os.close(registration.lock)
    registration.listener.close()
    assert CliRunner().invoke(stop).output == "the system 'model' has ended\n"


def test_a_system_whose_process_is_not_to_be_seen_is_not_ended(
    base: Path, bystander: subprocess.Popen[bytes]
) -> None:
    """As that of a container with the same folder, where another process has the number here."""
    folder = folders.own_folder()
    started = registry.start_of(bystander.pid) + 1
    registration = claimed(folder, "model", pid=bystander.pid, started=started)
    refused = CliRunner().invoke(stop).exception
    assert isinstance(refused, ServiceError)
    assert "runs where its process cannot be seen from here" in str(refused)
    os.close(registration.lock)
    registration.listener.close()


_HOLDS = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from hotcold.jobs.kept import registry
os.chdir(sys.argv[1])
folder, deaf = Path(), sys.argv[2:]
pid = os.getpid()
one = registry.Record("model", pid, True, "m", "", {}, started=registry.start_of(pid))
if deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with registry.locked(folder):
    registration = registry.register(folder, one)
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("is_deaf", [False, True])
def test_the_process_that_holds_a_system_is_ended(
    base: Path, is_deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_commands, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(kept_commands, "_ENDING_S", 60.0 if not is_deaf else 0.5)
    folder = folders.own_folder()
    arguments = [sys.executable, "-c", _HOLDS, str(folder), *(["deaf"] if is_deaf else [])]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        assert CliRunner().invoke(stop).output == "the system 'model' has ended\n"
        ended_by = signal.SIGKILL if is_deaf else signal.SIGTERM
        assert process.wait(60) == -ended_by
    assert list(folder.iterdir()) == []


def test_several_are_ended_by_their_names(base: Path) -> None:
    folder, program = folders.own_folder(), _HOLDS.replace('"model", pid', "sys.argv[2], pid")
    program = program.replace("sys.argv[2:]", "[]")
    with ExitStack() as stack:
        processes = []
        for name in ("a", "b", "c"):
            arguments = [sys.executable, "-c", program, str(folder), name]
            process = stack.enter_context(subprocess.Popen(arguments, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            processes.append(process)
        said = "".join(f"the system '{name}' has ended\n" for name in ("c", "a"))
        assert CliRunner().invoke(stop, ["c", "a", "c"]).output == said
        assert [process.wait(60) for process in processes[::2]] == [-signal.SIGTERM] * 2
        refused = CliRunner().invoke(stop, ["b", "d"]).exception
        assert "no system named 'd' is running; these do: b" in str(refused)
        assert processes[1].poll() is None  # nothing is ended by a list with a wrong name


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
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `hotcold ps` shows it; a model of that name comes before, and other options are told."""
    monkeypatch.setattr(find_module, "_ready", lambda found, *rest: found[1].name)
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    started = SystemOptions(context_length=64)
    model = model_text(str(tmp_path / "weights.gguf"))
    running = claimed(
        folders.own_folder(),
        "mine",
        identity=identity_of(model, started),
        resolved={"mode": "exact", "context_length": 64},
    )

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
    running.remove()


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
    gone = KeptConnection(KeptSystem(base, record("model", resolved=resolved)), attends=False)
    asked: list[GenerateRequest] = []

    def answer_here(path: Path, options: SystemOptions, request: Any) -> Any:
        asked.append(request)
        about = {"num_neurons": 1, "has_text": True, "system": {"context_length": 9}}
        about["max_positions"] = 9
        return Generation("said", [1], "length", 1, 0.1, 0.1), about

    monkeypatch.setattr(generate, "find", lambda *asked, **options: gone)
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
        "from hotcold.jobs.kept import client, find\n"
        "heavy = 'torch ray numba numpy scipy rich psutil tokenizers huggingface_hub uvicorn'\n"
        "print([name for name in heavy.split() if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, "generate", "chat", "ps", "stop"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout == "[]\n", found.stderr


def test_a_silent_system_is_told_of(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped, or busy: whoever connects waits a while."""
    monkeypatch.setattr("hotcold.jobs.kept.client._ASK_S", 0.05)
    folder = folders.own_folder()
    registration = claimed(folder, "model")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("hotcold.jobs.kept.commands.found_folder", lambda: Path())
    out = CliRunner().invoke(ps).output.splitlines()
    assert out[1].split() == ["model", "model", "silent"]
    registration.remove()
    registration.listener.close()


def test_a_socket_of_nobody_is_no_system(tmp_path: Path) -> None:
    system = KeptSystem(tmp_path, record("model"))
    with pytest.raises(GoneError):
        system.state()
    with pytest.raises(GoneError), system.attended():
        pass


def test_who_takes_a_connection_and_ends_is_no_system(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes a connection for a process that then never looks at it."""
    folder = folders.own_folder()
    registration = claimed(folder, "model")
    monkeypatch.chdir(folder)

    def end() -> None:
        request_state = registration.listener.accept()[0]
        request_state.recv(1000)
        request_state.close()

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(GoneError), KeptSystem(Path(), record("model")).attended():
        pass
    thread.join()
    registration.remove()
    registration.listener.close()


def test_a_long_conversation_is_not_cut_off_for_not_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It only holds its connection: what it is sent stays in a buffer that ends somewhere."""
    backend: Any = SimpleNamespace(counts=[])
    backend.attend = backend.counts.append
    app = create_control_app(backend, IdleTimer(backend, 1.0), {})
    sent: list[bytes] = []
    real_sleep = asyncio.sleep

    async def attend() -> None:
        ended = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if backend.counts:
                await ended.wait()
            return {"type": "http.disconnect" if ended.is_set() else "http.request"}

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        monkeypatch.setattr(asyncio, "sleep", lambda seconds: real_sleep(0))
        scope = {"type": "http", "method": "GET", "path": "/own/attend", "headers": []}
        holding = asyncio.create_task(app(scope, receive, send))
        for _ in range(1000):
            await real_sleep(0)
        assert backend.counts == [1] and not holding.done()
        ended.set()
        await holding

    asyncio.run(attend())
    assert b"".join(sent) == b"{}\n" and backend.counts == [1, -1]


def test_a_conversation_whose_system_has_just_ended_has_its_own(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = KeptSystem(base, record("demo", resolved={"model_path": str(DEMO_DIRECTORY)}))
    started = []

    @contextmanager
    def start(path: Path, *arguments: Any) -> Iterator[tuple[Any, Facts]]:
        started.append(path)
        yield None, Facts("demo", "exact", "cpu", 128)

    monkeypatch.setattr("hotcold.jobs.commands.chat.find_system", lambda *arguments: gone)
    monkeypatch.setattr("hotcold.jobs.commands.chat._started", start)
    told = CliRunner().invoke(chat, input="/bye\n")
    assert (told.exit_code, started) == (0, [DEMO_DIRECTORY])
    assert "it has just ended, so this command starts its own" in told.output


def test_how_long_a_system_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("hotcold.ui.control_api.time", SimpleNamespace(monotonic=lambda: now))
    backend: Any = SimpleNamespace(is_idle=True, used_at=0.0, attend=lambda count: None)
    timer, served, endless = (IdleTimer(backend, keep_s) for keep_s in (10.0, None, -1.0))
    now = 104.0
    assert (timer.idle_s, timer.left_s) == (4.0, 6.0)
    backend.used_at = 103.0
    assert timer.left_s == 9.0
    backend.is_idle = False
    assert (timer.idle_s, timer.left_s) == (0.0, 10.0)
    backend.is_idle = True
    now = 120.0
    assert timer.left_s == 0.0  # not less: it ends at the next poll
    timer.attend(1)
    now = 121.0
    assert timer.left_s == 9.0
    timer.extend(None)
    assert timer.left_s == 9.0
    timer.extend(30.0)
    assert timer.left_s == 29.0
    timer.extend(1e300)
    assert timer.left_s == 1e9 - 1
    served.extend(5.0)  # a command does not end a server's
    assert served.left_s is None and endless.left_s is None
