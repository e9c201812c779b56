"""Experts with transposed down rows in few bits: float64, batch-mates, what is read, even work."""

from __future__ import annotations

import numpy as np
import pytest

from hotcold.numba_kernels.decode.activations import ALL_FIRE
from hotcold.numba_kernels.decode.candidates import list_spans, own_part
from hotcold.numba_kernels.decode.selection import NO_IDS, NO_MASKS, Selection
from hotcold.numba_kernels.ffn_arrays import TransposedArrays, starts_of
from hotcold.numba_kernels.load.convert import to_float32
from tests.kernels.arrays import random_floats
from tests.kernels.quantized_rows import random_rows
from tests.kernels.sources import Source, alone, block_rows

pytestmark = pytest.mark.sweep(name=["q4", "q4_1"])

WIDTH = 256
# Experts, the last one the shared one; in the second layer one of another service's.
SIZES = np.array([[256, 256, 256, 512], [256, 0, 256, 768]])


def arrays_of(name: str) -> TransposedArrays:
    """Gates in `name`; down rows too, those of the last block in q6."""
    rows = int(SIZES.sum())

    def quantized(seed: int, kind: str, height: int, width: int) -> np.ndarray:
        return random_rows(seed, kind, height, width).rows

    matrices = []
    for layer, sizes in enumerate(SIZES):
        kinds = [name] * 3 + ["q6"]
        matrices.append([
            quantized(10 * layer + block, kind, WIDTH, size or 256)[: WIDTH if size else 0]
            for block, (kind, size) in enumerate(zip(kinds, sizes, strict=True))
        ])  # fmt: skip
    return TransposedArrays(
        starts=starts_of(SIZES),
        gate=quantized(1, name, rows, WIDTH),
        up=quantized(2, name, rows, WIDTH),
        down=block_rows(matrices),
        gate_bias=random_floats(3, rows),
        up_bias=random_floats(4, rows),
        down_bias=random_floats(5, 2, 4, WIDTH),
    )


def weights_of(num_tokens: int, seed: int) -> np.ndarray:
    """Of two experts for each token, and of the shared one."""
    rng = np.random.default_rng(seed)
    weights = np.zeros((num_tokens, 4), np.float32)
    for row in weights:
        row[rng.choice(3, 2, replace=False)] = rng.uniform(0.2, 0.8, 2)
        row[3] = rng.uniform(0.3, 1)
    return weights


def chosen(weights: np.ndarray) -> Selection:
    return Selection(False, NO_IDS, NO_MASKS, weights)


def expected(
    arrays: TransposedArrays, layer: int, x: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """The sum over blocks of w * (down (silu(gate) * up) + bias) in float64."""
    found = np.zeros((len(x), WIDTH))
    for block in range(4):
        part = slice(*arrays.starts[layer, block : block + 2])
        w = weights[:, block, None].astype(np.float64)
        found += w * arrays.down_bias[layer, block]
        if part.start == part.stop:
            continue
        gates, ups = (
            x.astype(np.float64) @ to_float32(rows[part]).astype(np.float64).T + bias[part]
            for rows, bias in ((arrays.gate, arrays.gate_bias), (arrays.up, arrays.up_bias))
        )
        h = w * gates / (1 + np.exp(-gates)) * ups
        found += h @ to_float32(arrays.down.matrix(layer, block)).astype(np.float64).T
    return found


def computed(
    arrays: TransposedArrays, layer: int, x: np.ndarray, selection: Selection, num_threads: int
) -> np.ndarray:
    source = Source(arrays, arrays.starts, WIDTH)
    return source.ffn(layer, x, selection, ALL_FIRE, "silu", num_threads)[0]


@pytest.mark.parametrize("name", ["q4", "q8", "q4_1", "q4_k", "q5", "q5_k", "q6", "mxfp4"])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_sum_of_chosen_experts(name: str, layer: int) -> None:
    arrays = arrays_of(name)
    for num_tokens in (1, 6):
        x, weights = random_floats(6, num_tokens, WIDTH), weights_of(num_tokens, 1)
        found = computed(arrays, layer, x, chosen(weights), 2)
        wanted = expected(arrays, layer, x, weights)
        assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["q4", "q8", "q4_1", "q4_k", "q5", "q5_k", "q6", "mxfp4"])
@pytest.mark.parametrize("layer", [0, 1])
def test_bits_with_any_batch_mates_by_any_threads(name: str, layer: int) -> None:
    """Of a token that shares an expert with one, with some and with all others."""
    arrays, x = arrays_of(name), random_floats(6, 17, WIDTH)
    weights = weights_of(len(x), 2)
    selection = chosen(weights)
    own = [computed(arrays, layer, x[t : t + 1], alone(selection, t), 1) for t in range(len(x))]
    for num_tokens in (2, 3, 8, 17):
        for num_threads in (1, 2, 5):
            some = chosen(weights[:num_tokens])
            together = computed(arrays, layer, x[:num_tokens], some, num_threads)
            assert together.tobytes() == np.concatenate(own[:num_tokens]).tobytes()


def test_experts_that_no_token_chose_are_not_read() -> None:
    arrays, x, weights = arrays_of("q4_1"), random_floats(6, 5, WIDTH), weights_of(5, 3)
    weights[:, 2] = 0
    wanted = computed(arrays, 0, x, chosen(weights), 2)
    arrays.down.matrix(0, 2).view(np.uint8)[:] = 0xFF  # scales that are NaN
    part = slice(*arrays.starts[0, 2:4])
    arrays.gate[part].view(np.uint8)[:] = 0xFF
    arrays.up[part].view(np.uint8)[:] = 0xFF
    np.testing.assert_array_equal(computed(arrays, 0, x, chosen(weights), 2), wanted)
    weights[1, 2] = 0.5
    found = computed(arrays, 0, x, chosen(weights), 2)
    assert np.isnan(found[1]).all() and np.array_equal(found[2:], wanted[2:])


@pytest.mark.parametrize("num_threads", range(2, 17))
def test_any_choice_of_experts_is_even_work(num_threads: int) -> None:
    """Each thread has its part of each expert: of eight of 768 neurons, to a row of 32."""
    starts = np.arange(129) * 768
    weights = np.zeros((1, 128), np.float32)
    weights[0, np.random.default_rng(num_threads).choice(128, 8, replace=False)] = 1
    selection = chosen(weights)
    spans = list_spans.py_func(selection, starts, 1, np.zeros((128, 7), np.int64))
    counts = np.zeros(num_threads, np.int64)
    for thread in range(num_threads):
        parts = [
            own_part(span, selection, np.zeros((0, 0), np.int64), thread, num_threads)
            for span in spans
        ]
        counts[thread] = sum(last - first for first, last in parts)
    assert counts.sum() == 8 * 768
    assert counts.max() - counts.min() <= counts.sum() // 128
