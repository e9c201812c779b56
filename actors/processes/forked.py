"""What a child that a process with Ray has forked may do: nothing to the parent's Ray.

Of Ray's threads a fork has none, but it has the objects that would wait for them, and those whose
end would kill the parent's processes and remove their files.
"""

import ctypes
import os
from functools import cache
from typing import Any

from hotcold.model.errors import UsageError

_left: list[Any] = []  # what was the parent's


@cache
def leave_in_children() -> None:
    """From now on children leave this process's Ray alone."""
    os.register_at_fork(after_in_child=_leave)


def require_own_ray() -> None:
    """Raise UsageError in a child whose parent has Ray, which cannot have one of its own."""
    if _left:
        raise UsageError(
            "this process was forked from one that runs Ray, so it cannot use its model, nor start "
            "one; make it with the start method 'spawn', or give keep='10m' in both"
        )


def _leave() -> None:
    from ray._private import state, worker

    node = worker._global_node
    if node is None and not worker.global_worker.connected:
        return
    if node is not None:
        node.kill_all_processes = lambda *_, **__: None  # which is called at the process's end
    _left.extend((node, worker.global_worker, state.state))
    worker._global_node, worker.global_worker = None, worker.Worker()
    state.state = state.GlobalState()
    for each in _left:  # never collected: their ends would wait for threads
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    library = ctypes.CDLL(None)
    library.on_exit(library._exit, None)  # so would Ray's library
