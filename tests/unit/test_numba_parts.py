"""Other versions of Numba: what they have changed is left alone, and kernels compute the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.numba_kernels import own_cache
from hotcold.numba_kernels.kernel_cache import sources_digest

ROOT = Path(own_cache.__file__).resolve().parents[1]

# Runs after a part of Numba was changed. Says what was replaced, what a kernel that calls others
# answers, where it is kept, and how often it was found there.
ASKED = """
import json
from numba.core import dispatcher
cache, add = dispatcher.FunctionCache, dispatcher.Dispatcher.add_overload
import numpy as np
import hotcold.numba_kernels
from hotcold.numba_kernels.decode.ffn import keep_fired_kernel
from hotcold.numba_kernels.decode.selection import NO_IDS, NO_MASKS
gates = np.linspace(-1, 1, 40).astype(np.float32)
ids, fired = np.zeros(40, np.int32), np.zeros(40, np.float32)
masks = np.zeros(40, np.uint32)
count = keep_fired_kernel(NO_IDS, NO_MASKS, 0, np.float32(0.5), 0, 40, gates, ids, masks, fired)
stats = keep_fired_kernel.stats
print(json.dumps({
    "used": [dispatcher.FunctionCache is not cache, dispatcher.Dispatcher.add_overload is not add],
    "ids": ids[:count].tolist(),
    "folder": stats.cache_path,
    "found": sum(stats.cache_hits.values()),
}))
"""

LATER = """
import numba
numba.version_info = numba.version_info._replace(short=(0, 99))
"""
OTHER_NAMES = (
    LATER
    + """
from numba.core.base import BaseContext
as_tried = BaseContext.mangler
def mangler(self, name, types, *, abi_tags=(), uid=None, target=None):
    return as_tried(self, name, types, abi_tags=abi_tags, uid=uid)
BaseContext.mangler = mangler
"""
)


def asked(change: str, cache: Path) -> dict[str, Any]:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", change + ASKED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_kernels_work_with_what_another_numba_has(tmp_path: Path) -> None:
    first, again = (asked(LATER, tmp_path) for _ in range(2))
    assert first["used"] == [False] * 2
    fired = np.flatnonzero(np.abs(np.linspace(-1, 1, 40, dtype=np.float32)) > 0.5)
    assert first["ids"] == again["ids"] == fired.tolist()
    assert (first["found"], again["found"]) == (0, 1)
    kept = Path(first["folder"]).relative_to(tmp_path / "hotcold" / "numba")
    assert first["folder"] == again["folder"]
    assert kept.parts[0] == sources_digest()


@pytest.mark.parametrize("is_open", [False, True], ids=["names of numbers", "no folder to trust"])
def test_nothing_stays_that_could_be_linked_wrongly_or_be_anothers(
    is_open: bool, tmp_path: Path
) -> None:
    """Numba's own names have numbers of a process, so what another keeps may not be linked."""
    if is_open:
        (tmp_path / "hotcold").mkdir()
        (tmp_path / "hotcold").chmod(0o777)
    found = asked(LATER if is_open else OTHER_NAMES, tmp_path)
    assert found["used"] == [False, False]
    assert tmp_path not in Path(found["folder"]).parents and not Path(found["folder"]).exists()
