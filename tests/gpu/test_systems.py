"""Whole systems with a share of their neurons on a real GPU.

One at a time: each counts what memory is free.

python -m pytest -n 0 tests/gpu/test_systems.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.protocol.messages import GenerateRequest, SystemConfig
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage
from hotcold.actors.setup.preflight import SystemOptions, prepare_system, read_model
from hotcold.actors.setup.storage import pack_model
from hotcold.actors.system import System
from hotcold.cuda_kernels.device import list_gpus
from hotcold.model.files.locate import locate_model
from hotcold.model.sampling import SamplingParams
from hotcold.model.synthetic.make import make_model
from hotcold.model.synthetic.shape import DTYPES, resolve_shape

_GPUS, _REASON = list_gpus()
pytestmark = pytest.mark.gpu
if not _GPUS:
    pytest.skip(f"no GPU: {_REASON}", allow_module_level=True)

_GIB = 1 << 30


def greedy(system: SystemConfig, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """What a system in a Ray of its own answers."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    with System.start(system) as running:
        found = [running.complete(GenerateRequest(sampling, prompt_ids=ids)).ids for ids in prompts]
        if system.device == "cuda":
            report = running.call("device_report", False)
            assert 0 < report["used_bytes"] <= system.gpu_memory_bytes
            described: SystemConfig = running.call("describe")
            assert described.device == "cuda" and described.num_hot_neurons > 0
        return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two layers of falcon-40b's shape: 1.4 GB a layer and the head."""
    shape = resolve_shape("falcon-40b-like", {"layers": 2, "vocab": 4096})
    path = tmp_path_factory.mktemp("falcon") / "model"
    make_model(path, replace(shape, density=0.05), dtype=DTYPES["f16"], seed=1)
    yield path


def test_hybrid_tokens_equal_the_cpus_on_a_trained_model() -> None:
    """The demo model, all of it and a part of it on the GPU; short and long prompts."""
    path = locate_model(None)
    prompts = [np.random.default_rng(n).integers(5, 500, size).tolist() for n, size in
               enumerate([3, 40, 200])]  # fmt: skip
    dense, _ = prepare_system(path, SystemOptions(mode="dense", device="cpu", num_cpu_actors=1))
    expected = greedy(dense, prompts, 24)
    for mode in ("dense", "exact"):
        options = SystemOptions(mode=mode, device="cuda", num_cpu_actors=1, gpu_memory_bytes=_GIB)
        system, _ = prepare_system(path, options)
        assert greedy(system, prompts, 24) == expected


def test_hybrid_within_a_budget(model: Path) -> None:
    """A share of a large layer's neurons on the GPU: the tokens of the CPU's exact mode."""
    prompt = list(range(10, 74))
    cpu, _ = prepare_system(model, SystemOptions(mode="dense", device="cpu", context_length=256))
    expected = greedy(cpu, [prompt], 16)
    options = SystemOptions(
        mode="exact", device="cuda", context_length=256, gpu_memory_bytes=2 * _GIB
    )
    system, _ = prepare_system(model, options)
    found = greedy(replace(system, neuron_upload_tokens=0), [prompt], 16)
    # Random weights: a near tie may fall otherwise after float16 products of the prompt.
    assert found[0][:4] == expected[0][:4]


def test_a_system_with_neurons_on_storage(model: Path) -> None:
    """The hottest on the GPU, of the others a layer's number in memory: the same tokens."""
    prompts = [list(range(10, 10 + size)) for size in (5, 64)]
    options = SystemOptions(
        mode="exact", device="cuda", context_length=256, gpu_memory_bytes=2 * _GIB
    )
    system, _ = prepare_system(model, options)
    system = replace(system, neuron_upload_tokens=0)
    file = pack_model(model, read_model(model))
    stored = replace(system, storage=NeuronStorage(str(file), 0, 0))
    assert greedy(stored, prompts, 16) == greedy(system, prompts, 16)
