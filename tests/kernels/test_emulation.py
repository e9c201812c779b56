"""The emulation of CUDA on the CPU detects invalid accesses and races."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotcold.cuda_kernels.source import Entry
from tests.kernels.arrays import random_floats
from tests.kernels.backends import emulated_calls
from tests.kernels.device_calls import device_matrix
from tests.kernels.emulation.build import build_text, kernel_table
from tests.kernels.emulation.launcher import EmulatedLauncher, aligned
from tests.kernels.quantized_rows import random_rows

# Each takes an array of 256 floats; the blocks have 64 threads.
KERNELS = {
    "reverse": """
        __shared__ float seen[64];
        seen[threadIdx.x] = load_own(data + threadIdx.x);
        __syncthreads();
        store(data + threadIdx.x, seen[63 - threadIdx.x]);""",
    "warp_total": """
        float sum = load_own(data + threadIdx.x);
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        unsigned even = __ballot_sync(~0u, threadIdx.x % 2 == 0);
        store(data + threadIdx.x, sum + (even == 0x55555555u ? 0.5f : 0.0f));""",
    "read_beyond": "load(data + 193 + threadIdx.x);",
    "write_before": "store(data - 1 + threadIdx.x, 1.0f);",
    "misaligned": "load(reinterpret_cast<const uint4*>(data + 2));",
    "two_writers": "store(data + threadIdx.x / 2, 1.0f);",
    "read_of_another": "store(data + threadIdx.x, 1.0f); load_own(data + (threadIdx.x ^ 1));",
    "stale_read": "store(data + threadIdx.x, 1.0f); load(data + threadIdx.x);",
    "barrier_of_some": "if (threadIdx.x < 40) __syncthreads();",
    "exchange_of_some": "if (threadIdx.x % 32 < 7) __shfl_xor_sync(~0u, 1.0f, 1);",
    "mixed_exchange": "__shfl_xor_sync(~0u, 1.0f, threadIdx.x % 32 < 7 ? 1 : 2);",
}
PROBLEMS = {
    "read_beyond": "outside of all arrays .*thread 63",
    "write_before": "outside of all arrays .*thread 0",
    "misaligned": "not aligned",
    "two_writers": "two threads write",
    "read_of_another": "what another thread wrote",
    "stale_read": "a read of what is written",
    "barrier_of_some": "never come",
    "exchange_of_some": "never come",
    "mixed_exchange": "exchange different things",
}


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> EmulatedLauncher:
    bodies = [
        f"inline void {name}([[maybe_unused]] float* data) {{{body}}}"
        for name, body in KERNELS.items()
    ]
    table = kernel_table({name: name for name in KERNELS})
    text = "\n".join(['#include "emulation.h"', *bodies, table])
    try:
        return EmulatedLauncher(build_text(tmp_path_factory.mktemp("bad"), text))
    except FileNotFoundError as problem:
        pytest.skip(str(problem))


def run(launcher: EmulatedLauncher, name: str, data: np.ndarray) -> None:
    launcher.launch(Entry("", name), (1, 1, 1), 64, [launcher.pointer(data)])


def test_barriers(launcher: EmulatedLauncher) -> None:
    data = aligned(np.arange(256, dtype=np.float32))
    run(launcher, "reverse", data)
    assert data[:65].tolist() == [*range(63, -1, -1), 64]
    data[:64] = np.arange(64)
    run(launcher, "warp_total", data)
    assert data[:64].tolist() == [496.5] * 32 + [1520.5] * 32


@pytest.mark.parametrize("name", PROBLEMS)
def test_mistakes_are_errors(launcher: EmulatedLauncher, name: str) -> None:
    data = aligned(np.zeros(256, np.float32))
    with pytest.raises(RuntimeError, match=PROBLEMS[name]):
        run(launcher, name, data)
    test_barriers(launcher)  # threads that stopped amid the failed kernel are gone


def test_arguments_of_other_types_are_errors(launcher: EmulatedLauncher) -> None:
    with pytest.raises(RuntimeError, match="other types"):
        launcher.launch(Entry("", "reverse"), (1, 1, 1), 64, [np.float32(1)])
    with pytest.raises(RuntimeError, match="no such kernel"):
        launcher.launch(Entry("", "missing"), (1, 1, 1), 64, [])


@pytest.mark.parametrize("num_tokens", [1, 3, 32])
def test_the_order_of_threads_and_blocks_changes_nothing(
    emulated_library: Path, num_tokens: int
) -> None:
    """Without a barrier that is needed it would."""
    rows = [random_rows(seed, "q8", 90, 512).rows for seed in (1, 2, 3)]
    x, weight = random_floats(4, num_tokens, 512), random_floats(5, 512)
    queries, cache = random_floats(6, 8, 64), random_floats(7, 2, 2, 300, 64)
    found = []
    for is_reversed in (False, True):
        calls = emulated_calls(emulated_library, is_reversed)
        out, fired = calls.sparse_ffn(rows[0], rows[1], rows[2], x)
        heads = calls.decode_attention(queries, cache[0], cache[1], 290)
        norm = calls.layer_norm(x[0], weight, weight, 1e-5)
        halves = np.zeros((90, 512), np.uint16)
        calls.kernels.widen(device_matrix(rows[0], aligned), 0, 90, halves)
        found.append([out, fired, heads, norm, halves])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert halves.any()
