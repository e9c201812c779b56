"""A prompt's tokens have the same bits wherever it is cut into chunks for matmul."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.protocol.step_sizes import MATRIX_TOKENS
from hotcold.numba_kernels.ir.target import has_feature
from tests.actors.in_process import InProcessSystem
from tests.actors.test_in_process import as_on_a_cpu_with
from tests.quantized_models import make_model
from tests.tiny_models import MAX_POSITIONS, VOCAB_SIZE

pytestmark = pytest.mark.sweep
LENGTH = 512
CUTS = {LENGTH: ([64], [128], [97, MATRIX_TOKENS, 70, 200, 112]), MAX_POSITIONS: ([64], [95, 33])}

FEATURES: dict[str, tuple[str, ...] | None] = {"this": None, "plain": (), "vnni": ("avx512vnni",)}
# Variant, stored dtype, dtype in memory, the features that products differ by (`matmul_kinds` has
# the table), mode: each format in each mode whose down rows lie otherwise.
CASES = [
    ("llama-gqa", "bfloat16", "", "this", "exact"),
    ("llama-gqa", "bfloat16", "", "this", "dense"),
    ("llama-gqa", "bfloat16", "", "plain", "exact"),
    ("llama-gqa", "bfloat16", "", "vnni", "dense"),
    ("gemma2", "float16", "", "this", "dense"),
    ("opt-postnorm", "float32", "", "this", "exact"),
    ("q-llama-wide", "float16", "q4", "this", "dense"),
    ("q-llama-wide", "float16", "q4", "plain", "exact"),
    ("q-opt", "float16", "q4_1", "this", "exact"),
]


@pytest.mark.parametrize(("variant", "stored", "weights", "way", "mode"), CASES)
def test_bits_do_not_depend_on_the_cuts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    stored: str,
    weights: str,
    way: str,
    mode: str,
) -> None:
    features = FEATURES[way]
    if features is not None:
        if not all(map(has_feature, features)):
            pytest.skip(f"this CPU does not have all of {features}")
        as_on_a_cpu_with(monkeypatch, *features)
    path = make_model(variant, tmp_path, stored)
    length = MAX_POSITIONS if "opt" in variant else LENGTH  # learned positions
    ids = np.random.default_rng(5).integers(0, VOCAB_SIZE, length)
    with InProcessSystem(
        path, 2, 2, num_positions=length, max_tokens=length, weight_dtype=weights
    ) as system:

        def run(sizes: list[int]) -> list[np.ndarray]:
            logits = system.logits(mode, ids, sizes)
            attention = system.services[0].arrays  # type: ignore[attr-defined]
            found = [logits, attention.keys.items.copy(), attention.values.items.copy()]
            attention.keys.items[:] = attention.values.items[:] = 0
            return found

        whole = run([length])
        assert np.isfinite(whole[0]).all() and whole[1].any()
        for sizes in CUTS[length]:
            for array, expected in zip(run(sizes), whole, strict=True):
                assert array.tobytes() == expected.tobytes(), sizes
