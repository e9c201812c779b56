"""When a model of a fleet is loaded: when it is asked for, until its memory is wanted.

Serve keeps replicas within each node by what they reserve. One that has no room waits, as a pending
placement group; then the idle model that was used least recently leaves.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.serve.config import AutoscalingContext

_LOOK_S = 1.0  # between two looks for who waits for room; who waited at both has none
_LEFT_S = 5.0  # until what a model held is free

# Of all models, as Serve's controller asks for each: when idle ones were used, and asked for last.
_idle: dict[Any, tuple[float, float]] = {}
_waiting: set[str] = set()  # placement groups
_next_look = 0.0


class OnDemand:
    """How many replicas a model has; Serve calls it in its controller, many times a second.

    The first replica of one that is asked for is Serve's own doing. It gets more by what waits, and
    keeps them until it leaves.
    """

    def __init__(self, stay_s: float) -> None:
        """`stay_s`: how long it stays after its last answer; -1: until there is no room."""
        self._stay_s = stay_s
        self._used_at = time.monotonic()

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """The number of replicas, and nothing to keep."""
        now, name, num_asked = time.monotonic(), context.deployment_id, context.total_num_requests
        if num_asked:
            self._used_at = now
            _idle.pop(name, None)
            each = context.config.get_target_ongoing_requests()
            return max(num_asked / each, context.target_num_replicas), {}  # never fewer
        if not context.current_num_replicas:  # who asked for it has gone
            return 0, {}
        _idle[name] = self._used_at, now
        for gone in [one for one, (_, asked_at) in _idle.items() if now - asked_at > _LEFT_S]:
            del _idle[gone]
        is_oldest = min(_idle, key=lambda one: _idle[one]) == name
        leaves = 0 <= self._stay_s <= now - self._used_at or (is_oldest and _is_room_wanted(now))
        return 0 if leaves else context.target_num_replicas, {}


def _is_room_wanted(now: float) -> bool:
    """Whether a model should leave now; the caller's does then."""
    global _waiting, _next_look
    if now < _next_look:
        return False
    groups = ray.util.placement_group_table().items()
    before, _waiting = _waiting, {key for key, group in groups if group["state"] == "PENDING"}
    is_wanted = bool(before & _waiting)
    _next_look = now + (_LEFT_S if is_wanted else _LOOK_S)
    return is_wanted
