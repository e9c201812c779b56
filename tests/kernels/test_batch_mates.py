"""Batch invariance: a token's results are bit-equal whatever its batch-mates."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from tests.kernels.arrays import BITS, random_bits, random_floats
from tests.kernels.quantized_rows import IN_BLOCKS, IN_LAYERS, KINDS, SUMMED, random_rows

pytestmark = pytest.mark.sweep(kind=["f32", "q4"])

FORMATS = [*BITS, *KINDS]


def random_weights(seed: int, kind: str, height: int, width: int) -> np.ndarray:
    if kind in KINDS:
        return random_rows(seed, kind, height, width).rows
    return random_bits(seed, BITS[kind], height, width)


@pytest.fixture
def is_emulated(request: pytest.FixtureRequest) -> bool:
    """Whether a GPU is emulated, a hundred times slower than kernels."""
    return request.node.callspec.params["backend"] == "emulated"


EVERY = range(2, 33)
# Of 32 tokens some of each four, in each place among eight, and both ends.
EDGES = (0, 1, 2, 3, 4, 7, 8, 13, 15, 16, 21, 23, 26, 30, 31)
SOME = (2, 3, 4, 5, 8, 9, 17, 32)  # whole tiles of tokens of every size, and with one left over


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("height", "width", "numbers"),
    [
        (1, 608, EVERY),
        (23, 608, EVERY),
        (51, 2112, SOME),
        (51, 2848, (2, 3, 4, 5)),  # the last part of columns is shorter, with a remainder
        (419, 608, (2, 3, 4, 7, 32)),  # several blocks of rows, smaller ones, and rows left over
    ],
)
def test_rows(
    backend: SimpleNamespace, is_emulated: bool, kind: str, height: int, width: int,
    numbers: Sequence[int],
) -> None:  # fmt: skip
    if kind in IN_BLOCKS:
        width = -(-width // 256) * 256  # whole blocks
    weights, x = random_weights(1, kind, height, width), random_floats(2, 32, width)
    alone = np.concatenate([backend.gemv(weights, x[t : t + 1]) for t in range(32)])
    for num_tokens in SOME if is_emulated and numbers is EVERY else numbers:
        assert (backend.gemv(weights, x[:num_tokens]) == alone[:num_tokens]).all()


@pytest.mark.parametrize("kind", [*BITS, *IN_LAYERS])
@pytest.mark.parametrize("gated", [True, False], ids=["three", "two"])
@pytest.mark.parametrize("skip_silent", [True, False])
def test_ffn(
    backend: SimpleNamespace, is_emulated: bool, kind: str, gated: bool, skip_silent: bool
) -> None:
    width = 768 if kind in IN_BLOCKS else 608
    gate, up = (random_weights(seed, kind, 71, width) for seed in (3, 4))
    down = random_weights(5, "q8" if kind in KINDS and kind not in SUMMED else kind, 71, width)
    x = random_floats(6, 32, width)
    rng = np.random.default_rng(7)
    third = up if gated else None
    for num_tokens in (1, 2, 5, 32):
        masks = rng.integers(0, 1 << 32, 71, np.uint32)
        ids = np.arange(71, dtype=np.int32)
        together, _ = backend.sparse_ffn(
            gate, third, down, x[:num_tokens], ids, masks, skip_silent=skip_silent
        )
        whole, _ = backend.sparse_ffn(gate, third, down, x[:num_tokens], skip_silent=skip_silent)
        for t in EDGES if is_emulated and num_tokens == 32 else range(num_tokens):
            own = ids[(masks >> np.uint32(t)) & np.uint32(1) != 0]
            alone, _ = backend.sparse_ffn(
                gate, third, down, x[t : t + 1], own, skip_silent=skip_silent
            )
            assert (together[t] == alone[0]).all()
            alone, _ = backend.sparse_ffn(gate, third, down, x[t : t + 1], skip_silent=skip_silent)
            assert (whole[t] == alone[0]).all()
