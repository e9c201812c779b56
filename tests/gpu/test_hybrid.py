"""Hot neurons, attention and head on a real GPU, cold neurons on the CPU: the CPU's own tokens.

python -m pytest -n 0 tests/gpu/test_hybrid.py
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.attention.cuda import shared
from hotcold.actors.attention.cuda.device import Device
from hotcold.actors.attention.cuda.fit import open_device
from hotcold.cuda_kernels.device import list_gpus
from tests.actors.cuda_in_process import CudaInProcess, a_third
from tests.actors.in_process import InProcessSystem
from tests.actors.test_cuda_service import FAR, far_difference
from tests.actors.test_cuda_whole_layers import (
    SIZES,
    SUPPORTED,
    all_but,
    assert_same,
    every_layer,
    steps,
)
from tests.actors.test_shared_layers import LOWRANK, SIGN, assert_shared, random_predictors
from tests.actors.test_stored_beside_gpu import StoredBesideGpu
from tests.actors.test_stored_neurons import assert_same_bits, packed
from tests.conftest import TinyCheckpoint
from tests.quantized_models import make_model as make_quantizable
from tests.reference import reference_logits, relative_difference
from tests.tiny_models import ON_THE_CPU, VARIANTS

_GPUS, _REASON = list_gpus()
pytestmark = pytest.mark.gpu
if not _GPUS:
    pytest.skip(f"no GPU: {_REASON}", allow_module_level=True)

Tiny = Callable[..., TinyCheckpoint]
_GIB = 1 << 30

DENSE = [name for name in VARIANTS if name not in ON_THE_CPU]


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device()


def test_rows_with_gaps_arrive(device: Device) -> None:
    """As rows of Q6 are uploaded, which are padded: by a copy of two dimensions."""
    rows = np.random.default_rng(0).integers(0, 256, (7, 2100), np.uint8)
    target = device.empty((7, 2112), np.uint8)
    device.upload(target[:, :2100], rows)
    np.testing.assert_array_equal(device.xp.asnumpy(target)[:, :2100], rows)


@pytest.mark.parametrize("variant", DENSE)
def test_logits_equal_transformers(tiny: Tiny, variant: str, device: Device) -> None:
    checkpoint = tiny(variant)
    with CudaInProcess(checkpoint.path, 2, hot=a_third, device=device) as system:
        for mode in ("dense", "exact"):
            for sizes in ([1], [2, 8, 3, 5], [40], [34, 5, 1]):
                found = system.logits(mode, checkpoint.ids, sizes)
                assert relative_difference(found, checkpoint.logits) < 1e-3, sizes


@pytest.mark.parametrize("weight_dtype", ["q8", "q4_1", "q4"])
@pytest.mark.parametrize("name", ["q-llama", "q-opt-postnorm", "q-falcon-grouped"])
def test_quantized_weights(name: str, weight_dtype: str, tmp_path: Path, device: Device) -> None:
    path, ids = make_quantizable(name, tmp_path / "model"), np.arange(3, 43)
    with InProcessSystem(path, weight_dtype=weight_dtype) as system:
        expected = system.logits("exact", ids, [1, 7])
    with CudaInProcess(path, weight_dtype=weight_dtype, hot=a_third, device=device) as system:
        assert relative_difference(system.logits("exact", ids, [1, 7]), expected) < 0.02
        assert relative_difference(system.logits("exact", ids, [40]), expected) < 0.1


@pytest.mark.parametrize("variant", SUPPORTED)
def test_mixtures(tiny: Tiny, variant: str, device: Device) -> None:
    """Some neurons of each expert there, and all of them."""
    path, ids = tiny(variant).path, tiny(variant).ids
    expected = reference_logits(path, ids)
    for mode, hot, sizes in (("exact", a_third, [34, 5, 1]), ("dense", every_layer, [1, 8, 31])):
        with CudaInProcess(path, 2, hot=hot, device=device) as system:
            assert relative_difference(system.logits(mode, ids, sizes), expected) < 1e-3


@pytest.mark.parametrize("variant", [*DENSE, *SUPPORTED])
def test_whole_layers_at_once(tiny: Tiny, variant: str, device: Device) -> None:
    """The bits of the same layers one by one."""
    checkpoint = tiny(variant)
    for hot in (every_layer, all_but(0)):
        with CudaInProcess(checkpoint.path, 2, hot=hot, device=device) as system:
            assert assert_same(system, checkpoint.ids) == 1


@pytest.mark.parametrize("variant", [*DENSE, *SUPPORTED])
@pytest.mark.parametrize("num_services", [1, 3])
def test_shared_layers(
    tiny: Tiny, variant: str, num_services: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of the same layers one by one."""
    monkeypatch.setattr(shared, "LIMIT_NS", 60_000_000_000)  # services may have to compile
    checkpoint = tiny(variant)
    with CudaInProcess(checkpoint.path, num_services, hot=a_third, device=device) as system:
        assert_shared(system, checkpoint.ids, SIZES)


@pytest.mark.parametrize(("kv_dtype", "most"), [("float32", 1e-4), ("float16", 5e-3)])
@pytest.mark.parametrize("variant", FAR)
def test_far_positions_of_prompts(
    tiny: Tiny, variant: str, kv_dtype: str, most: float, device: Device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert far_difference(tiny(variant).path, kv_dtype, device, monkeypatch) < most


@pytest.mark.parametrize("kinds", [SIGN, LOWRANK])
def test_neurons_that_the_gpu_lists(
    tiny: Tiny, kinds: Any, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the driver's predictors."""
    monkeypatch.setattr(shared, "LIMIT_NS", 60_000_000_000)
    checkpoint, sizes = tiny("llama-relu"), SIZES
    predicted = random_predictors(checkpoint, tmp_path, kinds=kinds)
    ids, path = np.resize(checkpoint.ids, sum(sizes)).tolist(), predicted.path
    with CudaInProcess(
        checkpoint.path, 2, hot=a_third, predictors_path=path, device=device
    ) as system:
        found = [steps(predicted.engine(system, shares), ids, sizes) for shares in (False, True)]
    for one_by_one, together in zip(*found, strict=True):
        np.testing.assert_array_equal(together, one_by_one)


def test_memory_of_other_programs(device: Device) -> None:
    """It is none of this process's."""
    before = device.used_bytes()
    command = "import cupy, sys; a = cupy.empty(1 << 29, 'u1'); print(flush=True); sys.stdin.read()"
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", command], **pipes) as other:
        assert other.stdout is not None and other.stdout.readline() == b"\n"
        free = device.free_bytes()
        assert device.used_bytes() == before
        other.communicate()
    assert device.free_bytes() > free


@pytest.mark.parametrize("weight_dtype", ["", "q8"])
def test_neurons_brought_to_the_gpu(tmp_path: Path, weight_dtype: str, device: Device) -> None:
    path, ids = make_quantizable("q-llama", tmp_path / "model"), np.arange(40)
    with CudaInProcess(
        path, 3, 1, hot=a_third, bundle_bytes=4096, weight_dtype=weight_dtype, device=device
    ) as system:
        engine = system.engine("exact")
        plain = engine.step(ids.tolist(), range(40), [0] * 40, 40).copy()
        engine.neuron_upload_tokens = 1
        found = engine.step(ids.tolist(), range(40), [0] * 40, 40)
        # Either way rounds the inputs of products to 16 bits: with AMX to bfloat16.
        assert relative_difference(found, plain) < (0.1 if weight_dtype else 2e-2)


def test_a_request_does_not_depend_on_its_company(tiny: Tiny, device: Device) -> None:
    """To the last bit, in steps that are filled up and in steps that are not."""
    checkpoint = tiny("llama-gqa", "float16")
    one, other = checkpoint.ids[:12].tolist(), checkpoint.ids[20:32].tolist()
    with CudaInProcess(
        checkpoint.path, hot=a_third, device=device, kv_dtype="float16", num_slots=4
    ) as system:
        engine = system.engine("exact")
        alone = [engine.step([token], [at], [0]).copy() for at, token in enumerate(one)]
        for company in (1, 2, 3):
            for at in range(12):
                tokens = [other[at]] * company + [one[at]]
                slots = [*range(1, company + 1), 0]
                found = engine.step(tokens, [at] * (company + 1), slots)
                np.testing.assert_array_equal(found, alone[at])


@pytest.mark.parametrize("variant", ["llama-gqa", "opt-postnorm"])
def test_cold_neurons_on_storage(tiny: Tiny, variant: str, device: Device) -> None:
    """The bits of the same cold neurons in memory; few tokens at once, and a long prompt."""
    path = tiny(variant).path
    packed(path)
    plain = CudaInProcess(path, 2, hot=a_third, device=device)
    stored = StoredBesideGpu(path, 2, hot=a_third, device=device, more_slots=13)
    assert_same_bits(plain, [stored], ["exact", "dense"])
