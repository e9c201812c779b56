"""The operating system's view of a service's process, where it runs on the driver's node."""

import os
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import psutil

from hotcold.actors.protocol.failures import KILLED_FOR_MEMORY
from hotcold.actors.protocol.ray_memory import MONITOR_EVERY_MS

_GONE_S = 30.0
_NOTE_S = 1.0
_RECENTLY_S = 5.0  # a process is gone soon after the kernel has killed it
_TOLD_POLLS, _POLL_S = 20, 0.1
_WAITS_FOR_DISK = "D"
_STATE, _MAJOR_FAULTS = 0, 9  # words of /proc/PID/stat after the program's name in parentheses


class ServiceProcess:
    """The process in which a service was loaded. Ray may start another in its place at any time."""

    def __init__(self, pid: int, is_local: bool) -> None:
        """`is_local`: it runs on this process's node, so it can be inspected."""
        self.pid = pid
        self._process: psutil.Process | None = None
        self.is_local = is_local
        num_oom_kills = _num_oom_kills() if is_local else 0
        self._oom_kills = (num_oom_kills, num_oom_kills)  # some seconds ago, and now
        self._noted_s = time.monotonic()
        self._num_read_back = 0
        if is_local:
            with suppress(psutil.NoSuchProcess):
                self._process = psutil.Process(pid)  # with its start: a pid may be used again

    def is_gone(self) -> bool:
        """Whether it has ended; False where that cannot be seen from here."""
        if not self.is_local:
            return False
        return self._status() in (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

    def note_kills(self) -> None:
        """Record, while it lives, how many processes the kernel has killed."""
        if time.monotonic() - self._noted_s >= _RECENTLY_S and not self.is_gone():
            self._oom_kills = self._oom_kills[1], _num_oom_kills()
            self._noted_s = time.monotonic()

    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal; False where that cannot be seen from here."""
        return self._status() == psutil.STATUS_STOPPED

    def is_paging(self) -> bool:
        """Whether it waits for its disk, or has had pages read from it since the last call.

        Such a process is slow, not stuck. False where that cannot be seen from here.
        """
        if self._process is None:
            return False
        state, num_read_back = _state_and_major_faults(self.pid)
        before, self._num_read_back = self._num_read_back, num_read_back
        return state == _WAITS_FOR_DISK or num_read_back > before

    def how_it_ended(self) -> str:
        """Why a process is gone: it died, or was killed for its memory."""
        if not self.is_local:
            return "died"
        is_by_kernel = _num_oom_kills() > self._oom_kills[0]  # counted before the process is gone
        return KILLED_FOR_MEMORY if is_by_kernel or killed_by_ray(self.pid) else "died"

    def kill(self) -> None:
        """Kill it, stopped or not, and wait: until then it may write to the arena."""
        if self._process is None:
            return
        with suppress(psutil.NoSuchProcess):
            self._process.kill()
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            self._process.wait(_GONE_S)

    def _status(self) -> str | None:
        try:
            if self._process is None or not self._process.is_running():
                return None
            return str(self._process.status())
        except psutil.NoSuchProcess:
            return None


class KillNotes:
    """Records the kernel's kills every second, for the processes of this one's services.

    The kernel counts its kills without names: those of the seconds in which a process was lost are
    taken for that process.
    """

    _processes: ClassVar["weakref.WeakSet[ServiceProcess]"] = weakref.WeakSet()
    _lock = threading.Lock()
    _thread: threading.Thread | None = None

    @classmethod
    def take(cls, process: ServiceProcess) -> ServiceProcess:
        """Record kills for this process from now on; returns it."""
        with cls._lock:
            cls._processes.add(process)
            if cls._thread is None:
                cls._thread = threading.Thread(target=cls._run, name="kills", daemon=True)
                cls._thread.start()
        return process

    @classmethod
    def _run(cls) -> None:
        while True:
            time.sleep(_NOTE_S)
            with cls._lock:
                processes = list(cls._processes)
            for process in processes:
                process.note_kills()


def killed_by_ray(pid: int) -> bool:
    """Whether Ray's memory monitor killed a worker process; False where Ray does not say."""
    if os.environ.get(MONITOR_EVERY_MS) == "0":
        return False
    with suppress(Exception):  # none of this is Ray's public interface
        from ray._private.state import state
        from ray.core.generated.common_pb2 import WorkerExitType
        from ray.core.generated.gcs_pb2 import WorkerTableData

        for _ in range(_TOLD_POLLS):
            rows = state._connect_and_get_accessor().get_worker_table()
            workers = [WorkerTableData.FromString(row) for row in rows]
            found = [worker for worker in workers if worker.pid == pid]
            if not any(worker.is_alive for worker in found):
                kinds = [worker.exit_type for worker in found]
                return WorkerExitType.Value("NODE_OUT_OF_MEMORY") in kinds
            time.sleep(_POLL_S)  # until Ray has noticed
    return False


def _num_oom_kills() -> int:
    """Processes that the kernel has killed for memory, of the machine or of a cgroup."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _state_and_major_faults(pid: int) -> tuple[str, int]:
    """A process's state, and how many pages its threads have waited for; ("", 0): no process."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return words[_STATE], int(words[_MAJOR_FAULTS])
    return "", 0
