"""Layers that a GPU shares with CPU services are one request: the bits of the same one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hotcold.actors.attention.cuda import shared
from tests.actors.cuda_in_process import CudaInProcess, a_third, emulated_devices
from tests.actors.numpy_device import NumpyDevice
from tests.actors.test_cuda_whole_layers import SIZES, WHOLE_STEPS, all_but, asked, counts_of, steps
from hotcold.numba_kernels.loops.mailbox import ATTENTION, FFN, HEAD, LAYERS
from tests.conftest import TinyCheckpoint

Tiny = Callable[..., TinyCheckpoint]
# Parallel layers with biases, a factor of the residual, mixtures, up to 5 CPU services.
CASES = [
    *(("llama-gqa", 1, 1), ("falcon-bias", 2, 1), ("minicpm", 3, 2), ("opt-postnorm", 5, 1)),
    *(("qwen2-moe", 2, 2), ("gpt-oss", 3, 1)),
]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device waits as long as services may take to compile."""
    monkeypatch.setattr(shared, "LIMIT_NS", 300_000_000_000)


def assert_shared(system: CudaInProcess, tokens: np.ndarray, sizes: list[int]) -> None:
    """Logits and counts of steps whose layers are shared, and of the same by the exchange."""
    ids, requests = np.resize(tokens, sum(sizes)).tolist(), asked(system)
    for mode in ("exact", "dense"):
        found, counts = [], []
        for shares in (False, True):
            engine = system.engine(mode)
            engine.shares_layers = shares
            requests.clear()
            found.append(steps(engine, ids, sizes))
            counts.append(counts_of(engine))
            operations = {operation for operation, _ in requests}
            assert not shares or operations == {LAYERS}
            assert shares or operations >= {ATTENTION}
        for one_by_one, together in zip(*found, strict=True):
            np.testing.assert_array_equal(together, one_by_one)
        assert counts[0] == counts[1]


@pytest.mark.parametrize(("variant", "num_services", "num_threads"), CASES)
def test_the_same_bits(tiny: Tiny, variant: str, num_services: int, num_threads: int) -> None:
    checkpoint = tiny(variant)
    with CudaInProcess(checkpoint.path, num_services, num_threads, hot=a_third) as system:
        assert_shared(system, checkpoint.ids, SIZES)


@pytest.mark.parametrize(("variant", "num_services"), [("falcon-bias", 3), ("minicpm", 1)])
def test_the_same_bits_of_cudas_own_kernels(tiny: Tiny, variant: str, num_services: int) -> None:
    checkpoint, device = tiny(variant), emulated_devices()()
    with CudaInProcess(checkpoint.path, num_services, hot=a_third, device=device) as system:
        assert_shared(system, checkpoint.ids, WHOLE_STEPS)
