"""A stub for an agent that the raylet requires: does nothing, and ends with the raylet.

Run by its path, without site packages, so that it starts at once.
"""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Wait for the end of the parent process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    raylet = os.environ.get("RAY_RAYLET_PID", str(os.getppid()))
    while os.getppid() == int(raylet):  # else it ended before prctl was called
        signal.pause()


if __name__ == "__main__":
    main()
