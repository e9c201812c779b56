"""A GPU service on a device made of NumPy gives what transformers gives, or the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.attention.cuda import prompt
from hotcold.actors.driver.engine import Engine
from hotcold.actors.protocol.failures import RequestError, is_lost_device
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS
from hotcold.numba_kernels.loops.mailbox import (
    ALL_NEURONS,
    BYTES_READ,
    COUNT_FFN,
    FFN,
    GATE_THRESHOLD,
    LAYER,
    NUM_IDS,
    NUM_TOKENS,
    OPERATION,
    PRODUCT_THRESHOLD,
    SEND,
    threshold_words,
)
from tests.actors.batching import random_predictor
from tests.actors.cuda_in_process import CudaInProcess, a_third, emulated_devices
from tests.actors.in_process import InProcessSystem
from tests.actors.numpy_device import NumpyDevice
from tests.actors.test_stored_experts import StoredExperts, answers, packed, small_bundles
from tests.conftest import TinyCheckpoint
from tests.mxfp4_models import make_mxfp4
from tests.quantized_models import make_model
from tests.reference import reference_logits, relative_difference
from tests.tiny_models import VOCAB_SIZE

Tiny = Callable[..., TinyCheckpoint]
# Tokens of each step, in turn: graphs of several sizes, steps that are filled up, and prompts.
WAYS = ([1], [2, 8, 3, 5], [40], [34, 5, 1])
# Every order of a layer, biases, grouped heads, a projected head, each activation.
VARIANTS = [
    *("llama-gqa", "opt-postnorm", "falcon-grouped-1norm", "falcon-gelu"),
    *("gemma3", "olmo2", "phi3-windows", "nemotron"),
]


@pytest.fixture(scope="module", params=VARIANTS)
def system(request: pytest.FixtureRequest, tiny: Tiny) -> Iterator[CudaInProcess]:
    with CudaInProcess(tiny(request.param).path, num_services=2, hot=a_third) as running:
        running.tiny = tiny(request.param)  # type: ignore[attr-defined]
        yield running


@pytest.mark.sweep(system=["llama-gqa", "opt-postnorm", "falcon-gelu"])
def test_logits_equal_transformers(system: CudaInProcess) -> None:
    checkpoint: TinyCheckpoint = system.tiny  # type: ignore[attr-defined]
    for mode, sizes in product(("dense", "exact"), WAYS):
        found = system.logits(mode, checkpoint.ids, sizes)
        assert relative_difference(found, checkpoint.logits) < 1e-4, (mode, sizes)


FAR = ["llama-gqa", "gemma2", "gpt-oss", "phi3-windows"]


def far_difference(path: Path, kv_dtype: str, device: Any, patch: pytest.MonkeyPatch) -> float:
    """From the reference, of prompts whose positions are far, a few tokens at a time."""
    patch.setattr(prompt, "FAR", 60)
    patch.setattr(prompt, "_PRODUCT_BYTES", 30_000)
    ids = np.random.default_rng(2).integers(0, VOCAB_SIZE, 128)
    far, softmax = list[int](), device.kernels.weigh_positions

    def noted(*arguments: Any) -> None:
        far.append(1)
        softmax(*arguments)

    patch.setattr(device.kernels, "weigh_positions", noted)
    with CudaInProcess(path, kv_dtype=kv_dtype, device=device) as system:
        found = system.logits("exact", ids, [40, 36, 4, 48])
    assert far
    return relative_difference(found, reference_logits(path, ids))


@pytest.mark.parametrize(("kv_dtype", "most"), [("float32", 1e-4), ("float16", 5e-3)])
@pytest.mark.parametrize("variant", FAR)
def test_far_positions_of_prompts(
    tiny: Tiny, variant: str, kv_dtype: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With softcaps, sinks and windows; by CUDA's own kernels, too."""
    device = emulated_devices()() if variant == "gpt-oss" else NumpyDevice()
    assert far_difference(tiny(variant).path, kv_dtype, device, monkeypatch) < most


@pytest.mark.sweep(variant=["llama-gqa", "opt-postnorm"])
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


def test_quantized_weights(tmp_path: Path) -> None:
    """As the CPU's service with the same weights, which rounds activations to eight bits."""
    path, ids = make_model("q-llama-tied", tmp_path / "model"), np.arange(3, 43)
    found = []
    for kind, hot in ((InProcessSystem, None), (CudaInProcess, a_third)):
        with kind(path, hot=hot, weight_dtype="q4") as system:
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


def ask_ffn(engine: Engine, operation: int, num_tokens: int) -> None:
    """Ask for all neurons of layer 0."""
    requests = engine.exchange.buffers.requests
    requests[:, OPERATION], requests[:, LAYER], requests[:, NUM_TOKENS] = operation, 0, num_tokens
    requests[:, NUM_IDS] = ALL_NEURONS
    thresholds = [GATE_THRESHOLD, PRODUCT_THRESHOLD]
    requests[:, thresholds] = threshold_words(engine.mode.thresholds)[0]
    engine.exchange.request(range(requests.shape[0]))


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


def two_thirds(num_layers: int, num_neurons: int) -> list[np.ndarray]:
    """Hot neurons: two of three, some of each block."""
    ids = np.arange(num_neurons, dtype=np.int32)
    return [ids[ids % 3 != layer % 3] for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("variant", "hot", "slots"),
    [("llama-gqa", a_third, [1, 0]), ("gpt-oss", two_thirds, [1, 2, 3, 0])],
)
def test_a_request_does_not_depend_on_its_company(
    tiny: Tiny, device: Devices, variant: str, hot: Any, slots: list[int]
) -> None:
    """To the last bit, whatever stands beside it in a step; and hot neurons too."""
    checkpoint = tiny(variant, "float16")
    one, other = checkpoint.ids[:6].tolist(), checkpoint.ids[20:26].tolist()
    with CudaInProcess(
        checkpoint.path, hot=hot, device=device(), kv_dtype="float16", num_slots=len(slots)
    ) as system:
        engine = system.engine("exact")
        alone = [engine.step([token], [at], [0]).copy() for at, token in enumerate(one)]
        for at in range(6):
            tokens = [other[at - i] for i in range(len(slots) - 1)] + [one[at]]
            found = engine.step(tokens, [at] * len(slots), slots)
            np.testing.assert_array_equal(found, alone[at])


PLACE_BYTES = 4096  # half a dozen neurons


def streaming(system: CudaInProcess) -> tuple[Engine, list[tuple[int, ...]]]:
    """An engine that brings neurons for all prompts, and a record of what it asks of services."""
    system.request_by_python()
    engine = system.engine("exact")
    asked: list[tuple[int, ...]] = []
    engine.neuron_upload_tokens = 1
    ask = system.exchange.request

    def recorded(services: Sequence[int]) -> int:
        asked.append(tuple(system.exchange.buffers.requests[list(services), OPERATION].tolist()))
        return ask(services)

    system.exchange.request = recorded  # type: ignore[method-assign]
    return engine, asked


def prefill(engine: Engine, ids: np.ndarray) -> np.ndarray:
    """Logits (T, V) of a prompt in one step."""
    return engine.step(ids.tolist(), range(ids.size), [0] * ids.size, ids.size).copy()


@pytest.mark.parametrize(
    ("variant", "hot", "refuses"),
    [
        ("llama-mlp-bias", None, False),
        ("opt-postnorm", a_third, True),
        ("falcon-bias", a_third, False),
    ],
)
def test_neurons_that_are_brought(
    tiny: Tiny, variant: str, hot: Callable | None, refuses: bool
) -> None:
    checkpoint, device = tiny(variant), NumpyDevice(refuses_registration=refuses)
    options: dict[str, Any] = {"hot": hot, "bundle_bytes": PLACE_BYTES, "device": device}
    with CudaInProcess(checkpoint.path, 3, 2, **options) as system:
        engine, asked = streaming(system)
        found = prefill(engine, checkpoint.ids)
        assert relative_difference(found, checkpoint.logits) < 1e-4
        num_rounds = len([each for each in asked if SEND in each]) / system.config.num_layers
        assert num_rounds > 2 and not any(FFN in each for each in asked)
        engine.step(checkpoint.ids[:5].tolist(), range(5), [0] * 5)
        assert any(FFN in each for each in asked)  # few tokens stay with the CPU


def test_a_round_asked_again_is_added_once(tiny: Tiny) -> None:
    """As after a CPU service that was replaced: all services are asked the same once more."""
    checkpoint = tiny("llama-relu")
    with CudaInProcess(checkpoint.path, 2, hot=a_third, bundle_bytes=PLACE_BYTES) as system:
        engine, _ = streaming(system)
        ask = system.exchange.request

        def twice(services: Sequence[int]) -> int:
            ask(services)
            return ask(services)

        system.exchange.request = twice  # type: ignore[method-assign]
        found = prefill(engine, checkpoint.ids)
        system.exchange.request = ask  # type: ignore[method-assign]
        assert relative_difference(found, checkpoint.logits) < 1e-4


Hot = Callable[[int, int], list[np.ndarray]]

__all__ = ["small_bundles"]  # a fixture
IDS = np.random.default_rng(1).integers(0, VOCAB_SIZE, 42)


def every_one(num_layers: int, num_neurons: int) -> list[np.ndarray]:
    return [np.arange(num_neurons, dtype=np.int32)] * num_layers


def whole_experts(num_layers: int, num_neurons: int) -> list[np.ndarray]:
    """About half of the neurons, in runs that hold whole blocks; none in layer 1."""
    ids = np.arange(num_neurons, dtype=np.int32)
    return [ids[: num_neurons // 2 * (layer != 1)] for layer in range(num_layers)]


@pytest.mark.sweep(variant=["gpt-oss"])
@pytest.mark.parametrize("variant", ["qwen2-moe", "gpt-oss", "smallthinker"])
def test_logits_equal_the_reference(tiny: Tiny, variant: str, device: Devices) -> None:
    """In float64, in prompts and steps of several tokens, wherever the neurons are."""
    checkpoint = tiny(variant)
    expected = reference_logits(checkpoint.path, IDS)
    ways: list[tuple[str, Hot, list[int]]] = [
        ("exact", two_thirds, [34, 4, 2, 1, 1]),
        ("dense", every_one, [1, 8, 33]),
    ]
    for mode, hot, sizes in ways:
        with CudaInProcess(checkpoint.path, hot=hot, device=device()) as system:
            found = system.logits(mode, IDS, sizes)
            assert relative_difference(found, expected) < 1e-4


def noting(lengths: list[int], method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which notes the length of its first argument."""

    def call(first: np.ndarray, *others: Any, **options: Any) -> Any:
        lengths.append(len(first))
        return method(first, *others, **options)

    return call


def test_experts_of_a_prompt_are_computed_together(tiny: Tiny) -> None:
    """Of an expert alone are its products: what else there is, is done for as many as tokens."""
    checkpoint, device = tiny("qwen3-moe-dense"), NumpyDevice()
    with CudaInProcess(checkpoint.path, hot=every_one, device=device) as system:
        engine, experts = system.engine("dense"), system.config.experts
        assert experts is not None
        engine.step(IDS.tolist(), range(IDS.size), [0] * IDS.size)
        products, narrowed = list[int](), list[int]()
        device.multiply = noting(products, device.multiply)  # type: ignore[method-assign]
        device.narrow = noting(narrowed, device.narrow)  # type: ignore[method-assign]
        engine.step(IDS.tolist(), range(IDS.size), [0] * IDS.size)
    assert len(products) > 1.5 * len(narrowed)  # each had one of its own
    assert sum(narrowed) > experts.router.num_chosen * IDS.size


def test_part_of_the_model_on_the_host(tiny: Tiny) -> None:
    """Whose attention service has its own routers; the GPU then reads weights from the arena."""
    checkpoint = tiny("glm4-moe-groups")
    ids = checkpoint.ids[:45]
    expected = reference_logits(checkpoint.path, ids)
    options: dict[str, Any] = {"hot": two_thirds, "first_layer": 2, "has_head": False}
    with CudaInProcess(checkpoint.path, **options) as system:
        found = system.logits("exact", ids, [34, 3, 1])
        assert relative_difference(found, expected) < 1e-4


@pytest.mark.thorough
def test_mxfp4(tmp_path: Path, device: Devices) -> None:
    """gpt-oss as published: down rows are a neuron's then, and have a format whose sums are. Rows
    of 256 weights are padded on the device.
    """
    path = make_mxfp4(tmp_path, hidden_size=256)
    with CudaInProcess(path, hot=whole_experts, device=device()) as system:
        found = system.logits("dense", IDS, [34, 4, 2, 1, 1])
    assert relative_difference(found, reference_logits(path, IDS)) < 0.05


@dataclass
class StoredBesideGpu(StoredExperts, CudaInProcess):
    """Cold experts in a file."""


@pytest.mark.usefixtures("small_bundles")
def test_cold_experts_on_storage(tiny: Tiny) -> None:
    """Which nobody guesses then: the bits of the same experts in memory."""
    path = tiny("qwen3-moe-dense").path
    packed(path)
    with CudaInProcess(path, 2, 2, hot=two_thirds) as plain:
        wanted = answers(plain, ["dense"])
    with StoredBesideGpu(path, 2, 2, hot=two_thirds, num_guessed=4) as stored:
        for found, expected in zip(answers(stored, ["dense"]), wanted, strict=True):
            np.testing.assert_array_equal(found, expected)
        assert stored.counted(BYTES_READ) > 0
