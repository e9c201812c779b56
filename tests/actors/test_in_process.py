"""The services and the engine in one process, against transformers, for every variant."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from hotcold.numba_kernels.ir.target import has_feature
from tests.actors.in_process import InProcessSystem
from tests.reference import relative_difference
from tests.tiny_checkpoint import Tiny
from tests.tiny_models import MIXTURES, VARIANTS, VOCAB_SIZE

# How many tokens each step takes, in turn. Steps take up to 32, prompts more.
WAYS = ([2, 8, 3, 7, 4, 5, 6], [40], [35, 1, 1])
MODES = ["dense", "exact"]


def as_on_a_cpu_with(monkeypatch: pytest.MonkeyPatch, *features: str) -> None:
    """Prompts are multiplied as on a CPU that has no other features for it."""
    monkeypatch.setattr("hotcold.actors.cpu.matmul.matmul_features", lambda: frozenset(features))


@pytest.mark.sweep(keep=10)
@pytest.mark.parametrize("variant", [*VARIANTS, *MIXTURES])
def test_logits_equal_transformers(tiny: Tiny, variant: str) -> None:
    """In steps and prompts of any size, whose bits do not depend on it."""
    checkpoint = tiny(variant)
    text = np.random.default_rng(3).integers(0, VOCAB_SIZE, 128)
    with InProcessSystem(checkpoint.path, num_services=3, num_threads=2) as system:
        for mode in MODES:
            for way in WAYS:
                found = system.logits(mode, checkpoint.ids, way)
                assert found.dtype == np.float32
                assert relative_difference(found, checkpoint.logits) < 1e-4, (mode, way)
                assert not system.python_answers
            alone = system.logits(mode, checkpoint.ids[:24], [1])
            for way in ([2, 8, 3, 7], [24]):
                assert np.array_equal(system.logits(mode, checkpoint.ids[:24], way), alone)
        prompt = system.logits("dense", text, [64])
        assert relative_difference(prompt, checkpoint.logits_of(text)) < 1e-4
        for way in ([33, 62, 33], [60, 34, 34]):
            assert np.array_equal(system.logits("dense", text, way), prompt), way


@pytest.mark.parametrize(
    "variant", ["opt-postnorm", "falcon-grouped", "qwen2-moe", "smallthinker", "gemma4-a4b"]
)
def test_questions_can_be_copied_and_asked_again(tiny: Tiny, variant: str) -> None:
    """What the exchange over actor calls carries is all that a service reads and writes."""
    checkpoint = tiny(variant)
    ids = checkpoint.ids.tolist()
    with InProcessSystem(checkpoint.path, 3, 2, copying=True) as system:
        system.request_by_python()
        engine, request = system.engine("exact"), system.exchange.request

        def twice(services: Sequence[int]) -> int:
            request(services)
            return request(services)

        for first, last in ((0, 34), (34, 39), (39, 40)):
            step = range(first, last)
            plain = engine.step(ids[first:last], step, [0] * len(step), len(step)).copy()
            assert relative_difference(plain, checkpoint.logits[first:last]) < 1e-4
            system.exchange.request = twice  # type: ignore[method-assign]
            again = engine.step(ids[first:last], step, [0] * len(step), len(step)).copy()
            system.exchange.request = request  # type: ignore[method-assign]
            np.testing.assert_array_equal(again, plain)


# Weights in 16 bits are widened exactly; a float16 cache rounds keys and values.
@pytest.mark.parametrize(
    ("variant", "dtype", "kv_dtype", "bound"),
    [
        ("llama-mlp-bias", "bfloat16", "float32", 1e-5),
        ("opt-postnorm", "float16", "float16", 4e-3),
        pytest.param("glm4-moe", "bfloat16", "float32", 1e-5, marks=pytest.mark.thorough),
    ],
)
def test_half_precision(
    tiny: Tiny,
    variant: str,
    dtype: str,
    kv_dtype: str,
    bound: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = tiny(variant, dtype)
    with InProcessSystem(checkpoint.path, 2, 1, kv_dtype=kv_dtype) as system:
        for way in ([1], [3, 5]):
            found = system.logits("exact", checkpoint.ids, way)
            assert relative_difference(found, checkpoint.logits) < bound, way
    as_on_a_cpu_with(monkeypatch)
    with InProcessSystem(checkpoint.path, 2, 1, kv_dtype=kv_dtype) as system:
        found = system.logits("exact", checkpoint.ids, [40])
        assert relative_difference(found, checkpoint.logits) < bound


@pytest.mark.parametrize(
    ("feature", "variant", "dtype", "most"),
    [
        ("avx512bf16", "llama-gqa", "bfloat16", 2),
        ("amx-bf16", "opt-postnorm", "float16", 2),
        ("avx512vnni", "llama-gqa", "float16", 1 / 4),
    ],
)
def test_prefill_rounds_like_bfloat16_of_transformers(
    tiny: Tiny,
    feature: str,
    variant: str,
    dtype: str,
    most: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or less, in int16. By own kernels, and by AMX's sums in tiles."""
    if not has_feature(feature):
        pytest.skip(f"a CPU without {feature}")
    as_on_a_cpu_with(monkeypatch, *({"avx512bf16", feature} if "bf16" in feature else {feature}))
    checkpoint = tiny(variant, dtype)
    kv_dtype = "float16" if variant == "opt-postnorm" else "float32"
    with InProcessSystem(checkpoint.path, 2, 1, kv_dtype=kv_dtype) as system:
        for way in ([40], [34, 6]):
            found = system.logits("exact", checkpoint.ids, way)
            difference = relative_difference(found, checkpoint.logits)
            assert difference < most * checkpoint.bfloat16_difference, way


def test_stop_ends_all_threads(tiny: Tiny) -> None:
    checkpoint = tiny("llama-gqa", "float16")
    before = set(threading.enumerate())
    system = InProcessSystem(checkpoint.path, 3, 2, kv_dtype="float16")
    system.logits("exact", checkpoint.ids, [35, 1])
    assert len(set(threading.enumerate()) - before) >= 8
    system.stop()
    assert set(threading.enumerate()) <= before


def test_request_numbers_start_anew(tiny: Tiny) -> None:
    """Doorbells are 32-bit words: a system that runs for weeks comes to their end."""
    checkpoint = tiny("llama-relu")
    last = 2**31 - 1
    with InProcessSystem(checkpoint.path, 2, 2, first_number=last - 20) as system:
        found = system.logits("exact", checkpoint.ids, [1])
        assert relative_difference(found, checkpoint.logits) < 1e-4
        assert system.exchange.next_number < last - 20
