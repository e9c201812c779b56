"""What kernels give and become for a CPU that the environment names, in a process of its own.

python -m tests.kernels.other_cpu results FOLDER KIND...    results of each; prints features
python -m tests.kernels.other_cpu aarch64 FOLDER KIND...    rows_kernel in aarch64's assembly
python -m tests.kernels.other_cpu x86_64 FOLDER KIND...     the same in x86's

A kind is one of KINDS. Of the FFN only what is written for each CPU is compiled: products of
listed rows, and sums of rows. The loops around it are the same everywhere.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import binding
from numba import njit
from numba.core import caching, codegen, config
from safetensors.numpy import save_file

from hotcold.numba_kernels.decode.ffn import add_one
from hotcold.numba_kernels.decode.rows import add_in_order, rows_kernel
from hotcold.numba_kernels.decode.vectors import (
    QuantizedVectors,
    activation_space,
    empty_vectors,
    quantize_activations,
)
from hotcold.numba_kernels.formats import CHUNK, QUANT_GROUP, is_quantized, row_width, whole_chunks
from hotcold.numba_kernels.ir.target import has_feature
from hotcold.numba_kernels.ir.vector_ir import dot_ahead
from hotcold.numba_kernels.prefill.shared_rows import FLOAT32
from tests.kernels.arrays import random_bits, random_floats
from tests.kernels.cpu_calls import gemv
from tests.kernels.prefill_texts import a_text, attend
from tests.kernels.products import Products, combine, linear
from tests.kernels.quantized_rows import (
    IN_BLOCKS,
    LIMITS,
    SUMMED,
    TABLES,
    random_rows,
)

KINDS = (
    "f16", "q8", "q4", "q4_1", "q4_k", "q5", "q5_k", "q6", "mxfp4", "nvfp4", "iq4_xs", "iq3_s",
    "iq2",
)  # fmt: skip
FEATURES = ("avx2", "avx512f", "avx512vnni", "avxvnni", "f16c", "fma")
# Two whole blocks of tiles of float rows and some rows; four chunks and six groups more.
NUM_ROWS, WIDTH = 51, 2240
WIDTH_IN_BLOCKS = 2304  # eight groups more
# Row after row; rows side by side, which ask for the next ones or not; rows unpacked twice.
TOKENS = (1, 5, 13, 35)
LAST_GROUPS = range(1, 16)  # of rows' last chunks, behind a whole one
LAST_ROWS, LAST_TOKENS = 19, (1, 2, 5, 9)  # rows of a block of tiles, and some
PROMPT = a_text(np.uint16, 150, (6, 2), 20)
ATTENTION: tuple[dict[str, Any], ...] = ({}, {"window": 70, "softcap": 2.5})
PROMPT_TOKENS, PROMPT_PART = 71, range(40, 63)
LISTED = np.array([0, 2, 3, 7, 8, 11, 12, 19, 20, 22, 26], np.int32)  # twice four, and three
ASSEMBLIES = ("aarch64", "x86_64")


def at_page_end(array: np.ndarray) -> np.ndarray:
    """A copy that ends where a page ends that cannot be read. It stays as long as the process."""
    page = mmap.PAGESIZE
    size = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    flat = np.frombuffer(memory, np.uint8, array.nbytes, size - array.nbytes)
    found = flat.view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


def width_of(kind: str) -> int:
    """Weights of a row of that kind, or of what is multiplied with it."""
    return WIDTH_IN_BLOCKS if kind in IN_BLOCKS and kind != "nvfp4" else WIDTH


def matrix(kind: str, seed: int) -> np.ndarray:
    """Weights as kernels take them."""
    if kind == "f16":
        return random_bits(seed, np.uint16, NUM_ROWS, WIDTH)
    return random_rows(seed, kind, NUM_ROWS, width_of(kind)).rows


def with_ends(kind: str) -> list[np.ndarray]:
    """Rows of the least value alone, and of the greatest, which make the largest sums."""
    table = TABLES.get(kind)
    ends = LIMITS[kind] if table is None else (int(table.argmax()), int(table.argmin()))
    return [
        random_rows(abs(end), kind, LAST_ROWS, WIDTH_IN_BLOCKS, (end, end)).rows for end in ends
    ]


def tokens(kind: str, number: int) -> np.ndarray:
    return random_floats(number, number, width_of(kind))


@njit(nogil=True, _nrt=False)
def _listed_sums(gate, down, ids, order, x, scratch, h, sums, out):
    """h[i] = gate[ids[i]] . x[0]; out = sum over i of h[i] * down[ids[i]]."""
    vectors, last = quantize_activations(gate, x, scratch, 0), ids.shape[0] - 1
    for i in range(ids.shape[0]):
        h[i] = dot_ahead(gate, ids[i], ids[min(i + 1, last)], vectors, 0)
    add_one(down, ids, order, 0, ids.size, h, sums)
    add_in_order(down, sums, out, 0, out.shape[0])


def results(kind: str) -> dict[str, np.ndarray]:
    """The kernels' products for all TOKENS, and sums of the rows in LISTED for one token."""
    gate, down = matrix(kind, 1), matrix(kind, 2)
    found = {f"rows{n}": gemv(gate, tokens(kind, n)) for n in TOKENS}
    if kind == "f16":
        found |= {f"attended{i}": attend(PROMPT, **how) for i, how in enumerate(ATTENTION)}
    else:
        found |= _last_chunks(kind)
        # Tokens of 1 or of -1 alone: 127 and -127 where they are quantized.
        ones = np.repeat(np.array([[1], [-1]] * 5, np.float32), WIDTH_IN_BLOCKS, axis=1)
        found |= {f"end{i}": gemv(rows, ones) for i, rows in enumerate(with_ends(kind))}
    if kind != "f16" and kind not in SUMMED:  # its rows are multiplied only
        return found
    found |= _prompt_products(gate, down)
    x = tokens(kind, 1)
    scratch = activation_space(1, *x.shape)
    h, out = np.zeros(LISTED.size, np.float32), np.zeros(WIDTH, np.float32)
    sums = np.zeros(whole_chunks(WIDTH), np.float32)
    order = np.arange(LISTED.size, dtype=np.int32)
    _listed_sums(gate, down, LISTED, order, x, scratch, h, sums, out)
    return found | {"listed": h, "sums": out}


def _prompt_products(gate: np.ndarray, down: np.ndarray) -> dict[str, np.ndarray]:
    """Of a prompt's tokens, and of some alone: h @ down and, of float rows, x @ gate.T; float32."""
    products, found = Products(FLOAT32, 1), {}
    width = row_width(down.dtype, down.shape[1])
    for tokens in (range(PROMPT_TOKENS), PROMPT_PART):
        h = random_floats(PROMPT_TOKENS, PROMPT_TOKENS, NUM_ROWS)[tokens]
        found[f"combine{len(h)}"] = np.empty((len(h), width), np.float32)
        combine(products, h, down, found[f"combine{len(h)}"])
        if not is_quantized(gate.dtype):
            x = random_floats(PROMPT_TOKENS, PROMPT_TOKENS, width)[tokens]
            found[f"linear{len(x)}"] = np.empty((len(x), NUM_ROWS), np.float32)
            linear(products, x, gate, found[f"linear{len(x)}"])
    return found


def _last_chunks(kind: str) -> dict[str, np.ndarray]:
    """Products of rows at the end of what can be read, for all LAST_GROUPS."""
    found = {}
    of_pairs = LAST_GROUPS[1::2] if kind == "nvfp4" else (8,)
    for groups in LAST_GROUPS if kind not in IN_BLOCKS else of_pairs:
        width = CHUNK + QUANT_GROUP * groups
        rows = at_page_end(random_rows(groups, kind, LAST_ROWS, width).rows)
        for n in LAST_TOKENS:
            found[f"last{groups}x{n}"] = gemv(rows, random_floats(n, n, width))
    return found


def assembly(architecture: str, kind: str) -> str:
    """What LLVM makes of rows_kernel for an ARM CPU with NEON, or for an x86 CPU.

    The x86 CPU is the one that NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name.

    The kernel is compiled without what calls it from Python: that needs Numba's reference counts,
    which x86 instructions are in.
    """
    for name in ("__extendhfsf2", "__truncsfhf2"):
        # Code for x86 without F16C calls them and is linked here, though never run.
        binding.add_symbol(name, 1)
    weights, x = matrix(kind, 1), random_floats(2, 5, width_of(kind))
    one_thread = QuantizedVectors(*(part[0] for part in empty_vectors(1, *x.shape)))
    vectors = x if kind == "f16" else one_thread
    alone = numba.njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False)
    kernel = alone(rows_kernel.py_func)
    arguments = weights, np.empty(0, np.float32), vectors, x, 0, 1
    kernel.compile(tuple(numba.typeof(argument) for argument in arguments))
    (compiled,) = kernel.overloads.values()
    compiled.library.link_called()
    text = compiled.library.get_llvm_str()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    triple = f"{architecture}-unknown-linux-gnu"
    own = architecture == "x86_64"
    cpu, features = (config.CPU_NAME, config.CPU_FEATURES) if own else ("", "")
    target = binding.Target.from_triple(triple)
    machine = target.create_target_machine(cpu=cpu, features=features)
    module = binding.parse_assembly(text)
    module.triple, module.data_layout = triple, str(machine.target_data)
    return str(machine.emit_assembly(module))


def _leave_out_own_machine_code() -> None:
    """Let Numba optimise LLVM's code and go no further, which saves half of the time."""
    for owner, name, instead in (
        (codegen.JITCodeLibrary, "_finalize_specific", lambda self: None),
        (codegen.JITCodeLibrary, "get_pointer_to_function", _finalized),
        (codegen.JITCPUCodegen, "set_env", lambda self, name, env: None),
        (caching.Cache, "load_overload", lambda self, sig, context: None),
        (caching.Cache, "save_overload", lambda self, sig, data: None),
    ):
        setattr(owner, name, instead)


def _finalized(library: codegen.JITCodeLibrary, name: str) -> int:
    """Where a function would be, once its code was optimised."""
    library._ensure_finalized()
    return 0


def main() -> None:
    """See the top of this file."""
    what, folder, *kinds = sys.argv[1:]
    gc.disable()  # compiling makes many objects that last as long as this process
    if what in ASSEMBLIES:
        _leave_out_own_machine_code()
    for kind in kinds:
        if what in ASSEMBLIES:
            (Path(folder) / kind).write_text(assembly(what, kind))
        else:
            save_file(results(kind), Path(folder) / kind)
    print(*(name for name in FEATURES if has_feature(name)))


if __name__ == "__main__":
    main()
