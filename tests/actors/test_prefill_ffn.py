"""The FFN of prefill, of dense layers and of mixtures, in float64; a token's bits are as alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from hotcold.actors.cpu import prefill_ffn as of_prompts
from hotcold.actors.cpu.matmul import Matmul
from hotcold.actors.cpu.prefill_ffn import LayerPredictors, prompt_ffn
from hotcold.model.config.activations import SPARSE_ACTIVATION_FNS, activated, activated_up
from hotcold.numba_kernels.block_rows import BlockRows, block_places
from hotcold.numba_kernels.checks import ACTIVATION_CODES
from hotcold.numba_kernels.decode.activations import activation
from hotcold.numba_kernels.decode.selection import NO_WEIGHTS
from hotcold.numba_kernels.ffn_arrays import (
    NO_NORMS,
    ExpertPredictors,
    FfnArrays,
    TransposedArrays,
)
from hotcold.numba_kernels.load.convert import to_float32
from hotcold.numba_kernels.load.quantize import quantize_rows
from tests.kernels.arrays import BITS, random_bits, random_floats
from tests.kernels.neurons import block_rows
from tests.kernels.quantized_rows import KINDS, SUMMED, random_rows
from tests.kernels.reference import narrowed

pytestmark = [pytest.mark.usefixtures("one_torch_thread"), pytest.mark.sweep]
WIDTH, CHOSEN = 256, 2
# A dense layer; then five experts, one of them not in the shard, and a shared one.
SIZES = np.array([[512, 0, 0, 0, 0, 0], [256, 256, 0, 256, 256, 768]])
STARTS = np.concatenate([[0], np.cumsum(SIZES)])
LIMITS = {"fatrelu": 0.5, "clamped_silu": 1.0}


@pytest.fixture(scope="module")
def matmul() -> Iterator[Matmul]:
    made = Matmul(2, [])
    yield made
    made.close()


def rows_of(seed: int, kind: str, height: int, width: int) -> np.ndarray:
    """Random rows of a format, whose products with vectors of ones are about one."""
    if kind in KINDS:
        return random_rows(seed, kind, height, width).rows
    if kind == "f32":
        return random_floats(seed, height, width) / 8
    bits = random_bits(seed, BITS[kind], height, width)
    return bits


def a_shard(layout: str, kind: str, has_bias: bool = True) -> FfnArrays | TransposedArrays:
    """Two layers, whose down rows are a neuron's or, "transposed", an output's."""
    total, starts = int(SIZES.sum()), np.stack([STARTS[:7], STARTS[6:]])

    def biases(seed: int, *shape: int) -> np.ndarray:
        return random_floats(seed, *shape) / 8 if has_bias else np.empty(0, np.float32)

    down_bias = biases(6, 2, 6, WIDTH) if has_bias else np.empty((2, 6, 0), np.float32)
    gate, up = (rows_of(seed, kind, total, WIDTH) for seed in (1, 2))
    fields: dict[str, Any] = {
        "starts": starts, "gate": gate, "up": up, "gate_bias": biases(4, total),
        "up_bias": biases(5, total), "down_bias": down_bias, "down_norms": NO_NORMS,
    }  # fmt: skip
    if layout == "rows":
        return FfnArrays(down=rows_of(3, kind, total, WIDTH), **fields)
    kinds = ["q4_1", "q6"] if kind == "q4_k" else [kind, kind]  # experts in two formats
    matrices = [
        [rows_of(10 + block, kinds[block % 2], WIDTH, size) for block, size in enumerate(layer)]
        for layer in SIZES
    ]
    return TransposedArrays(down=block_rows(matrices), **fields)


def routed(seed: int, num_tokens: int) -> np.ndarray:
    """Weights of random experts and of the shared one, some tokens without it; as in a layer."""
    draw = np.random.default_rng(seed)
    weights = np.zeros((num_tokens, 6), np.float32)
    for own in weights:
        skewed = draw.random(5) * [1, 1, 1, 1, 8]
        own[np.argsort(-skewed)[:CHOSEN]] = draw.uniform(0.2, 1, CHOSEN)
    weights[:, 5] = draw.uniform(0, 1, num_tokens) * (draw.random(num_tokens) < 0.9)
    return weights


def of_float64(
    arrays: FfnArrays | TransposedArrays,
    layer: int,
    name: str,
    x: np.ndarray,
    weights: np.ndarray,
    predictors: ExpertPredictors | None = None,
) -> np.ndarray:
    """The layer's output, token by token and expert by expert."""
    out = np.zeros((len(x), WIDTH))
    if not weights.size:
        weights = np.ones((len(x), arrays.starts.shape[1] - 1))

    def wide(rows: np.ndarray) -> np.ndarray:
        return to_float32(rows).astype(np.float64)

    for block, (first, last) in enumerate(pairwise(arrays.starts[layer])):
        ids = np.flatnonzero(weights[:, block])
        if arrays.down_bias.size:
            out += weights[:, block, None] * arrays.down_bias[layer, block]
        if first == last or not ids.size:
            continue
        part, exact = slice(first, last), x[ids].astype(np.float64)
        limit, has_bias = LIMITS.get(name, 0.0), arrays.gate_bias.size > 0
        gates = exact @ wide(arrays.gate[part]).T + (arrays.gate_bias[part] if has_bias else 0)
        h = activated(name, torch.from_numpy(gates), limit).numpy() * weights[ids, block, None]
        if len(arrays.up):
            ups = exact @ wide(arrays.up[part]).T + (arrays.up_bias[part] if has_bias else 0)
            h = h * activated_up(name, torch.from_numpy(ups), limit).numpy()
        if predictors is not None and len(predictors.outer.matrix(layer, block)):
            own = slice(*predictors.inner_starts[layer, block : block + 2])
            hidden = np.maximum(exact @ wide(predictors.inner[own]).T, 0)
            h = h * (hidden @ wide(predictors.outer.matrix(layer, block)).T > 0)
        if isinstance(arrays, TransposedArrays):
            out[ids] += h @ wide(arrays.down.matrix(layer, block)).T
        else:
            out[ids] += h @ wide(arrays.down[part])
    return out


def output(
    matmul: Matmul,
    arrays: FfnArrays | TransposedArrays,
    layer: int,
    name: str,
    x: np.ndarray,
    weights: np.ndarray,
    **options: Any,
) -> np.ndarray:
    """By the products."""
    out = np.full((len(x), WIDTH), np.nan, np.float32)
    function = activation(name, LIMITS.get(name, 0.0))
    prompt_ffn(
        matmul, arrays, layer, x, function, out,
        **{"skip_silent": True, "block_weights": weights, **options},
    )  # fmt: skip
    return out


def predictors_of(kind: str) -> ExpertPredictors:
    """Of the second layer's experts, the last of which has none."""
    ranks = np.zeros_like(SIZES)
    ranks[1, :4] = [128, 256, 0, 384]
    ends = np.concatenate([[0], np.cumsum(ranks)])
    dtype = rows_of(19, kind, 1, WIDTH).dtype
    heights = np.where(ranks > 0, SIZES, 0)
    places, (size, _) = block_places(heights, ranks, (dtype, dtype), ranks < 0)
    outer = BlockRows(np.zeros(size, dtype), np.zeros(0, dtype), places)
    for block in (0, 1, 3):
        own = rows_of(20 + block, kind, int(SIZES[1, block]), int(ranks[1, block]))
        outer.matrix(1, block)[:] = own
    inner = rows_of(19, kind, int(ranks.sum()), WIDTH)
    return ExpertPredictors(inner, np.stack([ends[:7], ends[6:]]), outer)


@pytest.mark.parametrize("kind", ["f32", "q8"])
def test_predictors_say_which_neurons_count(matmul: Matmul, kind: str) -> None:
    arrays, predictors = a_shard("rows", kind), predictors_of(kind)
    x, weights = random_floats(7, 300, WIDTH), routed(8, 300)
    given = {"predictors": LayerPredictors(predictors, 1)}
    together = output(matmul, arrays, 1, "drelu", x, weights, **given)
    exact = of_float64(arrays, 1, "drelu", x, weights, predictors)
    error = np.abs(together - exact).max(axis=1)
    # The sign of a sum about zero may be another, of few tokens' neurons.
    assert np.median(error) < (1e-6 if kind == "f32" else 0.03) * np.abs(exact).max()
    everything = of_float64(arrays, 1, "drelu", x, weights)
    assert np.median(np.abs(together - everything).max(axis=1)) > 0.1 * np.abs(exact).max()
    for company in ([0], [299], [3, 5], np.arange(40, 200)):
        found = output(matmul, arrays, 1, "drelu", x[company], weights[company], **given)
        assert found.tobytes() == together[company].tobytes()


FEW_KINDS = [
    (kind, name) for kind in ("f16", "bf16", "q8", "q4") for name in ("relu", "drelu", "silu")
]
LAYOUTS = [("rows", kind) for kind in [*BITS, *SUMMED]] + [("transposed", k) for k in KINDS]


@pytest.mark.parametrize("name", ["silu", "relu", "drelu", "clamped_silu"])
@pytest.mark.parametrize(("layout", "kind"), LAYOUTS)
def test_a_token_among_others_is_as_alone(
    matmul: Matmul, layout: str, kind: str, name: str
) -> None:
    """Right in float64, and the same bits with other numbers of tokens in each expert."""
    arrays = a_shard(layout, kind)
    x, weights = random_floats(7, 512, WIDTH), routed(8, 512)
    together = output(matmul, arrays, 1, name, x, weights)
    exact = of_float64(arrays, 1, name, x, weights)
    share = np.abs(together - exact).max() / np.abs(exact).max()
    # What a clamp cuts off makes the output smaller, and rounding of the input no smaller.
    rounding = 0.06 if name == "clamped_silu" else 0.03
    assert share < (1e-6 if kind == "f32" else rounding)
    ids = np.arange(512)
    for company in ([0], [511], [3, 5], ids[:9], ids[::7], ids[40:300], ids[::-1]):
        found = output(matmul, arrays, 1, name, x[company], weights[company])
        assert found.tobytes() == together[company].tobytes()


@pytest.mark.parametrize(("layout", "kind"), [("rows", "f32"), ("transposed", "q8")])
def test_a_dense_layer_of_a_mixture(matmul: Matmul, layout: str, kind: str) -> None:
    arrays, x = a_shard(layout, kind), random_floats(7, 70, WIDTH)
    only_first = np.eye(1, 6).repeat(70, axis=0)
    exact = of_float64(arrays, 0, "silu", x, only_first)
    exact += arrays.down_bias[0, 1:].sum(axis=0)
    found = output(matmul, arrays, 0, "silu", x, np.empty((0, 0), np.float32))
    assert np.abs(found - exact).max() < (1e-6 if kind == "f32" else 0.03) * np.abs(exact).max()


def test_neurons_are_counted_where_their_expert_was_chosen(matmul: Matmul) -> None:
    arrays, x, weights = a_shard("rows", "f32"), random_floats(7, 90, WIDTH), routed(9, 90)
    counts = np.zeros(int(SIZES[1].sum()), np.int64)
    output(matmul, arrays, 1, "relu", x, weights, counts=counts, skip_silent=False)
    first = arrays.starts[1, 0]
    gates = x.astype(np.float64) @ arrays.gate[first:].T + arrays.gate_bias[first:]
    fired = (gates > 0) & (np.repeat(weights, SIZES[1], axis=1) != 0)
    assert np.abs(counts - fired.sum(axis=0)).sum() <= 2  # of gates about zero
    assert counts.sum() > 1000


def test_no_expert_but_the_chosen_ones_is_read(matmul: Matmul) -> None:
    arrays, x = a_shard("rows", "f32"), random_floats(7, 40, WIDTH)
    weights = routed(8, 40)
    weights[:, 1] = 0
    expected = output(matmul, arrays, 1, "silu", x, weights)
    first, last = arrays.starts[1, 1:3]
    assert isinstance(arrays, FfnArrays)
    for rows in (arrays.gate, arrays.up, arrays.down):
        rows[first:last] = np.nan
    assert output(matmul, arrays, 1, "silu", x, weights).tobytes() == expected.tobytes()


def few_and_many(num_tokens: int) -> np.ndarray:
    """Tokens for which hardly any neuron of `a_layer` fires; for every third one most do."""
    x = random_floats(7, num_tokens, WIDTH) / 2
    x[:, 0] = np.where(np.arange(num_tokens) % 3, -12, 12)
    return x


def a_layer(kind: str, is_gated: bool) -> FfnArrays:
    """Neurons in two blocks, with biases; a gate's first number is one."""
    gate, up, down = random_floats(8, 3, 300, WIDTH) / 16
    gate[:, 0] = 1
    gate, up, down = (as_rows(kind, matrix) for matrix in (gate, up if is_gated else up[:0], down))
    gate_bias, up_bias = random_floats(9, 2, 300) / 8
    down_bias = random_floats(10, 1, 2, WIDTH)
    starts = np.array([[0, 100, 300]])
    return FfnArrays(starts, gate, up, down, gate_bias, up_bias, down_bias, NO_NORMS)


def as_rows(kind: str, matrix: np.ndarray) -> np.ndarray:
    """A matrix in a format."""
    return quantize_rows(matrix, KINDS[kind]) if kind in KINDS else narrowed(matrix, BITS[kind])


@pytest.mark.parametrize("has_weights", [False, True], ids=["plain", "weights"])
@pytest.mark.parametrize("is_gated", [True, False], ids=["three", "two"])
@pytest.mark.parametrize(("kind", "name"), [("f32", name) for name in ACTIVATION_CODES] + FEW_KINDS)
def test_few_neurons_one_by_one_and_many_as_matmuls(
    matmul: Matmul,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    name: str,
    is_gated: bool,
    has_weights: bool,
) -> None:
    """Each token as alone, also side by side."""
    arrays, x = a_layer(kind, is_gated), few_and_many(100)
    weights = np.abs(random_floats(11, 100, 2)) if has_weights else NO_WEIGHTS
    ways: list[tuple[str, int]] = []

    def note(way: str) -> None:
        add = getattr(of_prompts._Rest, way)

        def noted(rest: Any, parts: Any, *others: Any) -> None:
            ways.append((way, parts.tokens.ids.size))
            add(rest, parts, *others)

        monkeypatch.setattr(of_prompts._Rest, way, noted)

    note("_combine")
    note("_add_fired")
    everyone = np.arange(100)
    together = output(matmul, arrays, 0, name, x, weights)
    all_ways = [("_combine", 68), ("_add_fired", 132)]  # of two blocks each
    assert ways == (all_ways if name in SPARSE_ACTIVATION_FNS else [("_combine", 200)])
    exact = of_float64(arrays, 0, name, x, weights)
    share = np.abs(together - exact).max() / np.abs(exact).max()
    assert share < (1e-5 if kind == "f32" else 0.03)
    for ids in (everyone[::3], everyone[1::3], [0], [1], everyone[::-1], [5, 3, 4]):
        own = weights[ids] if has_weights else weights
        assert output(matmul, arrays, 0, name, x[ids], own).tobytes() == together[ids].tobytes()


@pytest.mark.parametrize(
    ("name", "skip_silent", "order"),
    [
        ("relu", True, ["matmul", "up_down", "matmul"]),
        ("relu", False, ["up_down", "matmul"]),
        ("drelu", True, ["up_down", "matmul", "matmul"]),
    ],
)
def test_when_up_and_down_rows_are_awaited(
    matmul: Matmul,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    skip_silent: bool,
    order: list[str],
) -> None:
    arrays, x = a_layer("f32", is_gated=True), random_floats(2, 40, WIDTH)
    late = np.full_like(arrays.up, np.nan), np.full_like(arrays.down, np.nan)
    seen: list[str] = []
    run = matmul.run

    def noted_run() -> None:
        seen.append("matmul")
        run()

    def await_up_down() -> None:
        seen.append("up_down")
        late[0][:], late[1][:] = arrays.up, arrays.down

    options = {"skip_silent": skip_silent}
    expected = output(matmul, arrays, 0, name, x, NO_WEIGHTS, **options)
    assert np.abs(expected).max() > 1
    monkeypatch.setattr(matmul, "run", noted_run)
    without = arrays._replace(up=late[0], down=late[1])
    found = output(matmul, without, 0, name, x, NO_WEIGHTS, await_up_down=await_up_down, **options)
    np.testing.assert_array_equal(found, expected)
    assert seen == order
