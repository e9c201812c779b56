"""How busy cores were with other programs while something was measured."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter

# Columns of a core's line in proc/stat that nobody works in: idle, and waiting for a disk. Guests'
# time, the last two, is counted in user and nice already. Steal, what other virtual machines took
# of a core, counts as work of others.
_IDLE_COLUMNS = (3, 4)
_COLUMNS = 8


class BusyWatch:
    """Counts, from when it is made, the work that others do on some cores."""

    def __init__(self, cores: tuple[int, ...], root: Path = Path("/")) -> None:
        """Watch `cores`; proc is read below `root`."""
        self._cores, self._root = cores, root
        self._begin = self._now()

    def busy_cores(self) -> float:
        """Cores that others kept busy since the beginning, on average: from 0 to their number.

        0 where the kernel does not tell.
        """
        began_s, all_s, own_s = self._begin
        ended_s, all_end_s, own_end_s = self._now()
        others_s = (all_end_s - all_s) - (own_end_s - own_s)
        return min(max(0.0, others_s / max(1e-9, ended_s - began_s)), float(len(self._cores)))

    def _now(self) -> tuple[float, float, float]:
        """The time, seconds worked on the cores by all, and by this process."""
        times = os.times()
        return perf_counter(), self._worked_s(), times.user + times.system

    def _worked_s(self) -> float:
        names = {f"cpu{core}" for core in self._cores}
        ticks = 0
        try:
            for line in (self._root / "proc/stat").read_text().splitlines():
                name, *columns = line.split()
                if name in names:
                    counts = [int(column) for column in columns[:_COLUMNS]]
                    ticks += sum(counts) - sum(counts[i] for i in _IDLE_COLUMNS)
        except (OSError, ValueError, IndexError):
            return 0.0
        return ticks / os.sysconf("SC_CLK_TCK")
