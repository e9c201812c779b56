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
from hotcold.numba_kernels.kernel_cache import kernel_folder, sources_digest

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

# Each a change of Numba, after which Numba itself works as before.
CHANGES = {
    "nothing": "",
    "a later version": """
import numba
numba.version_info = numba.version_info._replace(short=(0, 99))
""",
    "one more argument of what finds types": """
from numba.core import types
from numba.core.dispatcher import Dispatcher
as_tried = Dispatcher.get_call_template
def get_call_template(self, args, kws, flags):
    return as_tried(self, args, kws)
def get_call_type(self, context, args, kws):
    made, pysig, args, kws = self.dispatcher.get_call_template(args, kws, None)
    found = made(context).apply(args, kws)
    return found and found.replace(pysig=pysig)
Dispatcher.get_call_template = get_call_template
types.Dispatcher.get_call_type = get_call_type
""",
    "another name of a library": """
from numba.core import codegen
codegen.Library = codegen.JITCodeLibrary
del codegen.JITCodeLibrary
""",
    "one more argument of what is kept": """
from numba.core.compiler import CompileResult
as_tried = CompileResult._reduce
CompileResult._reduce = lambda self, flags=None: as_tried(self)
""",
    "another name of no cache": """
from numba.core import caching, ccallback
del caching.NullCache
""",
}
# Whether the cache of one compiler is used, and code that is compiled for callers.
USED = {"nothing": (True, True), "a later version": (True, False)}
USED |= {"one more argument of what finds types": (True, False)}


def asked(change: str, cache: Path) -> dict[str, Any]:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", change + ASKED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.sweep(change=["a later version", "another name of no cache"])
@pytest.mark.parametrize("change", CHANGES)
def test_kernels_work_with_what_another_numba_has(change: str, tmp_path: Path) -> None:
    first, again = (asked(CHANGES[change], tmp_path) for _ in range(2))
    assert tuple(first["used"]) == USED.get(change, (False, False))
    fired = np.flatnonzero(np.abs(np.linspace(-1, 1, 40, dtype=np.float32)) > 0.5)
    assert first["ids"] == again["ids"] == fired.tolist()
    assert (first["found"], again["found"]) == (0, 1)
    kept = Path(first["folder"]).relative_to(tmp_path / "hotcold" / "numba")
    assert first["folder"] == again["folder"]
    of_ffn = kernel_folder(ROOT / "numba_kernels/decode/ffn.py").name
    assert kept.parts[0] == (of_ffn if first["used"][0] else sources_digest())


OTHER_NAMES = """
from numba.core.base import BaseContext
as_tried = BaseContext.mangler
def mangler(self, name, types, *, abi_tags=(), uid=None, target=None):
    return as_tried(self, name, types, abi_tags=abi_tags, uid=uid)
BaseContext.mangler = mangler
"""


def test_without_names_of_content_nothing_stays(tmp_path: Path) -> None:
    """Numba's own have numbers of a process, so what another keeps may not be linked."""
    found = asked(OTHER_NAMES, tmp_path)
    assert found["used"] == [False, False]
    assert tmp_path not in Path(found["folder"]).parents and not Path(found["folder"]).exists()


def test_without_a_folder_to_trust_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "hotcold").mkdir()
    (tmp_path / "hotcold").chmod(0o777)
    found = asked(CHANGES["another name of no cache"], tmp_path)
    assert tmp_path not in Path(found["folder"]).parents and not Path(found["folder"]).exists()
