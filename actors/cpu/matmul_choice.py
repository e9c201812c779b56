"""How long prompts are multiplied on this CPU: found out by trying, once a machine.

float32 products are fast everywhere, bfloat16 ones several times as fast or several times slower,
by torch or by own kernels; where they are slower, products of int16 with scales may be faster than
float32; integer products of quantized weights compete with those that widen the weights first.

What is chosen changes the last bits of a prompt's results, and a trial may be disturbed: so the
first one's answer is kept on disk, for all starts on this machine.
"""

import functools
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import llvmlite.binding
import numpy as np
import torch

from hotcold.actors.cpu.pair_matmul import PairMatmul, WordMatmul
from hotcold.actors.protocol.step_sizes import MatmulChoice
from hotcold.model.files.whole_file import write_first
from hotcold.numba_kernels.decode.rows import gemv
from hotcold.numba_kernels.formats import Q8, row_items
from hotcold.numba_kernels.ir.bfloat16_ir import has_pair_matmul
from hotcold.numba_kernels.ir.int16_ir import has_word_matmul
from hotcold.numba_kernels.kernel_cache import sources_digest
from hotcold.numba_kernels.load.convert import widen_kernel
from hotcold.numba_kernels.own_cache import own_folder

_ROWS, _WIDTH, _TOKENS, _TRIES = 256, 2048, 64, 7
_MORE = 4
# Services that try at the same time, and other machines of this kind, should find the same.
_CLEARLY = 2.0
_INSTRUCTIONS = ("ATEN_CPU_CAPABILITY", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")


_trying = threading.Lock()


def choose_matmul() -> MatmulChoice:
    """Time one thread's products of each kind; takes a tenth of a second, once all is compiled.

    Only the first time on this machine. Threads that ask at the same time get the same.
    """
    with _trying:
        return _choose()


@functools.cache
def _choose() -> MatmulChoice:
    """What this machine has kept, else what is fastest, kept from now on."""
    try:
        path = _kept_path()
    except OSError:
        return _try()
    found = _read(path)
    if found is None:
        tried = _try()
        _keep(path, tried)
        found = _read(path) or tried  # of whoever kept one meanwhile
    return found


def _keep(path: Path, choice: MatmulChoice) -> None:
    """Write the choice, whole, unless somebody has kept one that can be read."""
    with suppress(OSError):
        if _read(path) is None:
            path.unlink(missing_ok=True)
        write_first(path, json.dumps(choice._asdict()).encode())


def _kept_path() -> Path:
    """The file, below XDG_CACHE_HOME or ~/.cache: of these kernels, this torch and processor.

    Errors:  OSError where there is no folder of this user's alone
    """
    key = [sources_digest(), torch.__version__, llvmlite.binding.get_host_cpu_name()]
    key += [os.environ.get(name, "") for name in _INSTRUCTIONS]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return own_folder("products") / f"{digest}.json"


def _read(path: Path) -> MatmulChoice | None:
    """What was kept; None where nothing was, or it is damaged."""
    try:
        values = json.loads(path.read_bytes())
        found = MatmulChoice(**values)
    except (OSError, ValueError, TypeError):
        return None
    return found if all(isinstance(value, bool) for value in values.values()) else None


def _try() -> MatmulChoice:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x, weights = torch.rand(_TOKENS, _WIDTH), torch.rand(_ROWS, _WIDTH)
        narrow_x, narrow_weights = x.to(torch.bfloat16), weights.to(torch.bfloat16)
        wide_s = _fastest(lambda: x @ weights.T)
        narrow_s = _fastest(lambda: narrow_x @ narrow_weights.T)
    finally:
        torch.set_num_threads(threads)
    rows, block = np.zeros((_ROWS, row_items(Q8, _WIDTH)), Q8), np.empty((_ROWS, _WIDTH), np.int16)
    widen_s = _fastest(lambda: widen_kernel(rows, block, 0, _ROWS))
    vectors, halves = x.numpy(), weights.to(torch.float16).numpy().view(np.uint16)
    integers_s = _fastest(lambda: gemv(rows, vectors))
    halves_s = _fastest(lambda: widen_kernel(halves, block, 0, _ROWS))
    own_s = _own_s(PairMatmul, has_pair_matmul(), vectors, halves)
    bfloat16 = min(narrow_s, own_s) * _CLEARLY < wide_s
    has_words = has_word_matmul()
    # Tokens are rounded once for all rows, which takes longer than to round them to bfloat16.
    more = np.tile(halves, (_MORE, 1))
    words_s = _own_s(WordMatmul, has_words and not bfloat16, vectors, more) / _MORE
    return MatmulChoice(
        bfloat16=bfloat16,
        integers=integers_s < (widen_s + min(narrow_s, wide_s)) * _CLEARLY,
        own_bfloat16=own_s < (halves_s + narrow_s) * _CLEARLY,
        # Untried beside bfloat16, and for systems that have a service without it.
        words=has_words and (bfloat16 or words_s < (halves_s + wide_s) * _CLEARLY),
    )


def _own_s(
    kind: type[PairMatmul] | type[WordMatmul],
    is_possible: bool,
    x: np.ndarray,
    weights: np.ndarray,
) -> float:
    """Seconds of this project's kernels; infinite where they are impossible or not wanted."""
    if not is_possible:
        return math.inf
    products: Any = kind(1, lambda phase: phase(0))  # either kind takes what it made of x
    out = np.empty((x.shape[0], weights.shape[0]), np.float32)
    return _fastest(lambda: products.linear(products.operand(x, weights), weights, out))


def _fastest(product: Callable[[], object]) -> float:
    """Seconds of the fastest try; the first one, which may compile, does not count."""
    product()
    times = []
    for _ in range(_TRIES):
        started = perf_counter()
        product()
        times.append(perf_counter() - started)
    return min(times)
