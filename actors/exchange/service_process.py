"""The operating system's view of a service's process, where it runs on the driver's node."""

from contextlib import suppress

import psutil

_GONE_S = 30.0


class ServiceProcess:
    """The process in which a service was loaded. Ray may put another in its place at any time."""

    def __init__(self, pid: int, is_local: bool) -> None:
        """`is_local`: it runs on this process's node, so it can be looked at."""
        self.pid = pid
        self._process: psutil.Process | None = None
        self._is_local = is_local
        if is_local:
            with suppress(psutil.NoSuchProcess):
                self._process = psutil.Process(pid)  # with its start: a pid may be used again

    @property
    def is_local(self) -> bool:
        """Whether it runs on this process's node."""
        return self._is_local

    def is_gone(self) -> bool:
        """Whether it has ended; False where that cannot be seen from here."""
        if not self._is_local:
            return False
        return self._status() in (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal; False where that cannot be seen from here."""
        return self._status() == psutil.STATUS_STOPPED

    def kill(self) -> None:
        """End it, stopped or not, and wait: until then it may write to the arena."""
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
