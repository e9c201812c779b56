"""What Ray's memory monitor keeps free: where less is, it kills workers, our services among them.

A raylet reads how from its environment, and hands that on to its workers and jobs.
"""

import os

import ray

from hotcold.model.weights.memory import available_bytes, usable_bytes

MONITOR_EVERY_MS = "RAY_memory_monitor_refresh_ms"  # "0": there is no monitor
_THRESHOLD, _USUAL_THRESHOLD = "RAY_memory_usage_threshold", "0.95"  # of all memory, in use
_MIN_FREE = "RAY_min_memory_free_bytes"  # from how few on it kills, whatever the threshold


def kept_bytes() -> int:
    """Bytes that the monitor of the Ray that is used keeps free; 0 for a private one, without."""
    is_ours = not (ray.is_initialized() or os.environ.get("RAY_ADDRESS"))
    if os.environ.get(MONITOR_EVERY_MS, "0" if is_ours else "") == "0":
        return 0
    total = usable_bytes()
    kept = round(total * (1 - float(os.environ.get(_THRESHOLD, _USUAL_THRESHOLD))))
    least = int(os.environ.get(_MIN_FREE, "-1"))
    return kept if least < 0 else min(kept, least)


def free_bytes() -> int:
    """Bytes that can be taken without swapping and without waking Ray's memory monitor."""
    return max(0, available_bytes() - kept_bytes())
