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

FEATURES = {"this": None, "plain": (), "vnni": ("avx512vnni",)}
# The features that their products differ by: `matmul_kinds` has the table.
MODELS = {
    ("llama-gqa", "bfloat16", ""): ["this", "plain", "vnni"],
    ("gemma2", "float16", ""): ["this"],
    ("opt-postnorm", "float32", ""): ["this"],
    ("q-llama-wide", "float16", "q4"): ["this", "plain"],
    ("q-opt", "float16", "q4_1"): ["this"],
}


@pytest.mark.parametrize("mode", ["exact", "dense"])
@pytest.mark.parametrize(
    ("variant", "stored", "weights", "features"),
    [
        pytest.param(*model, features, id="-".join([name, *model]))
        for model, own in MODELS.items()
        for name, features in FEATURES.items()
        if name in own
    ],
)
def test_bits_do_not_depend_on_the_cuts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    variant: str,
    stored: str,
    weights: str,
    features: tuple[str, ...] | None,
) -> None:
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
            found = [logits, attention.keys.copy(), attention.values.copy()]
            attention.keys[:] = attention.values[:] = 0
            return found

        whole = run([length])
        assert np.isfinite(whole[0]).all() and whole[1].any()
        for sizes in CUTS[length]:
            for array, expected in zip(run(sizes), whole, strict=True):
                assert array.tobytes() == expected.tobytes(), sizes
