"""A process that does nothing in place of an agent that a raylet insists on; it ends with it.

It is run by its path, without site packages, so that it starts at once.
"""

import ctypes
import os
import signal

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def main() -> None:
    """Wait for the end of the process that started this one."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    raylet = os.environ.get("RAY_RAYLET_PID", str(os.getppid()))
    while os.getppid() == int(raylet):  # else it ended before it could be asked for its signal
        signal.pause()


if __name__ == "__main__":
    main()
