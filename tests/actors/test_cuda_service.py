"""The GPU service's logic on a device made of NumPy, compared with transformers' own answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver.engine import Engine
from hotcold.actors.protocol.failures import RequestError, is_lost_device
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS
from hotcold.numba_kernels.serve.mailbox import (
    ALL_NEURONS,
    COUNT_FFN,
    FFN,
    GATE_THRESHOLD,
    LAYER,
    NUM_COMPUTED,
    NUM_IDS,
    NUM_TOKENS,
    OPERATION,
    PRODUCT_THRESHOLD,
    threshold_words,
)
from tests.actors.batching import random_predictor
from tests.actors.cuda_in_process import CudaInProcess, a_third, emulated_devices
from tests.actors.in_process import InProcessSystem
from tests.actors.numpy_device import NumpyDevice
from tests.conftest import TinyCheckpoint
from tests.quantized_models import make_model
from tests.unit.test_reference import relative_difference

Tiny = Callable[..., TinyCheckpoint]
# Tokens of each step, in turn: graphs of several sizes, steps that are filled up, and prompts.
WAYS = ([1], [2, 8, 3, 5], [40], [34, 5, 1])
# Every order of a layer, biases, grouped heads, a projected head, each activation.
VARIANTS = [
    *("llama-gqa", "opt-prenorm", "opt-postnorm", "falcon-grouped-1norm", "falcon-gelu"),
    *("gemma2", "gemma3", "olmo2", "phi3-windows", "nemotron"),
]


@pytest.fixture(scope="module", params=VARIANTS)
def system(request: pytest.FixtureRequest, tiny: Tiny) -> Iterator[CudaInProcess]:
    with CudaInProcess(tiny(request.param).path, num_services=2, hot=a_third) as running:
        running.tiny = tiny(request.param)  # type: ignore[attr-defined]
        yield running


def test_logits_equal_transformers(system: CudaInProcess) -> None:
    checkpoint: TinyCheckpoint = system.tiny  # type: ignore[attr-defined]
    for mode, sizes in product(("dense", "exact"), WAYS):
        found = system.logits(mode, checkpoint.ids, sizes)
        assert relative_difference(found, checkpoint.logits) < 1e-4, (mode, sizes)


@pytest.mark.parametrize(
    ("variant", "first_layer", "has_head"),
    [("llama-gqa", 1, True), ("opt-postnorm", 2, False), ("falcon-bias", 0, False)],
)
def test_what_the_gpu_has_no_room_for_is_on_the_host(
    tiny: Tiny, variant: str, first_layer: int, has_head: bool
) -> None:
    checkpoint = tiny(variant)
    options: dict[str, Any] = {"hot": a_third, "first_layer": first_layer, "has_head": has_head}
    with CudaInProcess(checkpoint.path, num_threads=2, **options) as system:
        for sizes in ([1], [3, 5], [40]):
            found = system.logits("exact", checkpoint.ids, sizes)
            assert relative_difference(found, checkpoint.logits) < 1e-4
    assert not system.device.registered


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(tiny: Tiny, dtype: str) -> None:
    checkpoint = tiny("llama-mlp-bias", dtype)
    kv_dtype = "float16" if dtype == "float16" else "float32"
    with CudaInProcess(checkpoint.path, kv_dtype=kv_dtype, hot=a_third) as system:
        found = system.logits("exact", checkpoint.ids, [3, 5])
        assert relative_difference(found, checkpoint.logits) < 4e-3
        found = system.logits("exact", checkpoint.ids, [40])  # its products round activations
        difference = relative_difference(found, checkpoint.logits)
        assert difference < 2 * checkpoint.bfloat16_difference


@pytest.mark.parametrize(
    ("name", "weight_dtype"), [("q-llama-tied", "q4"), ("q-falcon-grouped", "q8")]
)
def test_quantized_weights(name: str, weight_dtype: str, tmp_path: Path) -> None:
    """As the CPU's service with the same weights, which rounds activations to eight bits."""
    path, ids = make_model(name, tmp_path / "model"), np.arange(3, 43)
    found = []
    for kind, hot in ((InProcessSystem, None), (CudaInProcess, a_third)):
        with kind(path, hot=hot, weight_dtype=weight_dtype) as system:
            found.append([system.logits("exact", ids, sizes) for sizes in ([1], [7], [40])])
    for expected, logits in zip(*found, strict=True):
        assert relative_difference(logits, expected) < 0.1
        assert (logits.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.8


def test_predicted_modes_compute_hot_neurons_unasked(tiny: Tiny) -> None:
    """Cold neurons are those that the predictor chooses; the same as a CPU's service."""
    checkpoint, found = tiny("llama-relu"), []
    for kind in (InProcessSystem, CudaInProcess):
        with kind(checkpoint.path, 2, hot=a_third) as system:
            predictor = random_predictor(system, "lowrank")
            found.append(system.logits("exact", checkpoint.ids, [1, 4], predictor=predictor))
    assert relative_difference(found[1], found[0]) < 1e-4
    assert relative_difference(found[1], checkpoint.logits) > 1e-2  # it does leave neurons out


def test_memory_that_cannot_be_registered_is_copied_through(tiny: Tiny) -> None:
    checkpoint, device = tiny("opt-postnorm"), NumpyDevice(refuses_registration=True)
    with CudaInProcess(checkpoint.path, hot=a_third, device=device) as system:
        for sizes in ([1], [3, 5], [40]):
            found = system.logits("exact", checkpoint.ids, sizes)
            assert relative_difference(found, checkpoint.logits) < 1e-4


def ask_ffn(engine: Engine, operation: int, num_tokens: int) -> None:
    """Ask for all neurons of layer 0."""
    requests = engine.exchange.buffers.requests
    requests[:, OPERATION], requests[:, LAYER], requests[:, NUM_TOKENS] = operation, 0, num_tokens
    requests[:, NUM_IDS] = ALL_NEURONS
    thresholds = [GATE_THRESHOLD, PRODUCT_THRESHOLD]
    requests[:, thresholds] = threshold_words(engine.mode.thresholds)[0]
    engine.exchange.request(range(requests.shape[0]))


def test_hot_neurons_begin_with_attention_only_if_they_are_the_same(tiny: Tiny) -> None:
    """Another mode, other tokens, or a layer asked again are computed again."""
    checkpoint = tiny("llama-relu")
    with CudaInProcess(checkpoint.path, hot=a_third) as system:
        engine, buffers = system.engine("exact"), system.exchange.buffers
        engine.step(checkpoint.ids[:2].tolist(), [0, 1], [0, 0])
        buffers.ffn_input[:2] = np.random.default_rng(0).standard_normal(
            buffers.ffn_input[:2].shape
        )
        ask_ffn(engine, FFN, 2)
        expected = buffers.partials[0, :2].copy()
        assert 0 < buffers.replies[0, NUM_COMPUTED] < 30
        dense = system.engine("dense")
        for target in (engine, engine, dense):
            ask_ffn(target, FFN, 2)
            np.testing.assert_array_equal(buffers.partials[0, :2], expected)
        assert buffers.replies[0, NUM_COMPUTED] == 30


def test_a_step_that_is_filled_up_computes_no_more_neurons(tiny: Tiny) -> None:
    checkpoint = tiny("llama-relu")
    counts = []
    for kind in (InProcessSystem, CudaInProcess):
        with kind(checkpoint.path, hot=a_third) as system:
            engine = system.engine("exact")
            engine.step(checkpoint.ids[:11].tolist(), range(11), [0] * 11)
            counts.append(engine.times.num_neurons)
    assert counts[0] == counts[1]


def test_services_count_who_fires(tiny: Tiny) -> None:
    checkpoint, counts = tiny("llama-relu"), []
    for kind in (InProcessSystem, CudaInProcess):
        with kind(checkpoint.path, hot=a_third) as system:
            engine = system.engine("dense")
            for sizes in (KERNEL_TOKENS + 8, 5):
                engine.place(checkpoint.ids[:sizes].tolist(), range(sizes), [0] * sizes)
                engine.run_layer(0, sizes, 1)
                ask_ffn(engine, COUNT_FFN, sizes)
            fired = system.services[0].fired_counts  # type: ignore[attr-defined]
            hot = system.hot_ids() or []  # in loading order, which differs
            ids = [ids + layer * system.config.ffn_size for layer, ids in enumerate(hot)]
            counts.append(fired[np.argsort(np.concatenate(ids))])
    np.testing.assert_array_equal(counts[0], counts[1])
    assert counts[0].sum() > 0


def test_a_failing_launch_is_one_line(tiny: Tiny) -> None:
    checkpoint = tiny("llama-relu")
    with CudaInProcess(checkpoint.path, hot=a_third) as system:
        system.logits("exact", checkpoint.ids, [1])
        failing = system.device.num_launches + 9
        system.device.fails_at = lambda launch: launch == failing
        for _ in range(2):  # and it stays
            with pytest.raises(RequestError, match="the GPU failed: cudaErrorIllegal") as caught:
                system.logits("exact", checkpoint.ids, [1])
            assert "\n" not in str(caught.value)
            assert is_lost_device(str(caught.value))


# --- over the CUDA kernels themselves, emulated on the CPU ---------------------------------------

Devices = Callable[[], NumpyDevice]


@pytest.fixture(scope="module")
def device() -> Devices:
    """Makes devices whose kernels are CUDA's."""
    return emulated_devices()


@pytest.mark.parametrize(
    "variant", ["llama-gqa", "opt-postnorm", "falcon-grouped", "gemma2", "olmo2", "smollm3"]
)
def test_logits_of_cudas_kernels(tiny: Tiny, variant: str, device: Devices) -> None:
    checkpoint = tiny(variant)
    with CudaInProcess(checkpoint.path, hot=a_third, device=device()) as system:
        for sizes in ([1, 1, 2], [34, 4, 2]):  # whole steps: copies would write to one place
            found = system.logits("exact", checkpoint.ids, sizes)
            assert relative_difference(found, checkpoint.logits) < 1e-4


@pytest.mark.parametrize(
    ("name", "weight_dtype"),
    [("q-llama", "q4"), pytest.param("q-falcon-grouped", "mxfp4", marks=pytest.mark.thorough)],
)
def test_quantized_weights_with_cudas_kernels(
    name: str, weight_dtype: str, tmp_path: Path, device: Devices
) -> None:
    """As the CPU's service: vectors are quantized alike."""
    path, ids = make_model(name, tmp_path / "model"), np.arange(3, 20)
    found = []
    for kind in (InProcessSystem, partial(CudaInProcess, device=device())):
        with kind(path, weight_dtype=weight_dtype) as system:
            found.append(system.logits("exact", ids, [1, 4]))
    assert relative_difference(found[1], found[0]) < 0.02


def test_a_request_does_not_depend_on_its_company(tiny: Tiny, device: Devices) -> None:
    """To the last bit, whatever stands beside it in a step; and hot neurons too."""
    checkpoint = tiny("llama-gqa", "float16")
    one, other = checkpoint.ids[:6].tolist(), checkpoint.ids[20:26].tolist()
    with CudaInProcess(
        checkpoint.path, hot=a_third, device=device(), kv_dtype="float16", num_slots=2
    ) as system:
        engine = system.engine("exact")
        alone = [engine.step([token], [at], [0]).copy() for at, token in enumerate(one)]
        for at in range(6):
            tokens, positions, slots = [other[at], one[at]], [at, at], [1, 0]
            found = engine.step(tokens, positions, slots)
            np.testing.assert_array_equal(found, alone[at])
