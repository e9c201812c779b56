"""What a trial of two modes found, kept on disk: starts that follow take the same mode.

Two modes that are about as fast would otherwise be chosen by chance, and with them the tokens.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotcold.actors.telemetry.mode_trial import ModeTrial
from hotcold.model.files.whole_file import write_first
from hotcold.numba_kernels.own_cache import own_folder


def kept_trial(
    modes: Sequence[str], key: Mapping[str, Any], try_modes: Callable[[], ModeTrial]
) -> ModeTrial:
    """What was found earlier of these modes under this key, else what is found now, and kept.

    `key`: all that speed depends on, as JSON has it. Of systems that try at the same time all take
    what the first has kept.
    Errors:  those of `try_modes`
    """
    try:
        path = trial_path(key)
    except OSError:
        return try_modes()
    found = _read(path, modes)
    if found is not None:
        return found
    tried = try_modes()
    with suppress(OSError):
        if _read(path, modes) is None:
            path.unlink(missing_ok=True)  # it is damaged
        write_first(path, json.dumps(tried.tokens_per_s).encode())
    first = _read(path, modes)  # perhaps of another system, which tried meanwhile
    if first is None:
        return tried
    return replace(first, is_kept=first.tokens_per_s != tried.tokens_per_s)


def trial_path(key: Mapping[str, Any]) -> Path:
    """The file, below XDG_CACHE_HOME or ~/.cache. Errors: OSError where no folder is ours alone."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return own_folder("modes") / f"{digest}.json"


def _read(path: Path, modes: Sequence[str]) -> ModeTrial | None:
    """What was kept; None where nothing was, or it is damaged."""
    try:
        speeds = json.loads(path.read_bytes())
        is_whole = list(speeds) == list(modes)
        is_whole = is_whole and all(isinstance(speed, float) for speed in speeds.values())
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return ModeTrial(speeds, str(path), is_kept=True) if is_whole else None
