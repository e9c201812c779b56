"""The FFN of a prompt: when up and down rows are awaited, and which tokens are matmuls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hotcold.actors.cpu import prompt_ffn as of_prompts
from hotcold.actors.cpu.matmul import Matmul
from hotcold.actors.cpu.prompt_ffn import prompt_ffn
from hotcold.model.config.activations import SPARSE_ACTIVATION_FNS, activated, activated_up
from hotcold.numba_kernels.checks import ACTIVATION_CODES
from hotcold.numba_kernels.decode.activations import activation
from hotcold.numba_kernels.decode.selection import NO_WEIGHTS
from hotcold.numba_kernels.ffn_arrays import NO_NORMS, FfnArrays
from hotcold.numba_kernels.formats import Q8
from hotcold.numba_kernels.load.quantize import quantize_rows
from tests.kernels.arrays import BITS, random_floats
from tests.kernels.reference import narrowed

pytestmark = [pytest.mark.usefixtures("one_torch_thread"), pytest.mark.sweep]
NUM_TOKENS, WIDTH, NEURONS = 40, 32, 64
MANY, WIDE, THRESHOLD = 300, 96, 0.25


@pytest.fixture
def matmul() -> Iterator[Matmul]:
    made = Matmul(2, [])
    yield made
    made.close()


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
    draw, none = np.random.default_rng(2), np.empty(0, np.float32)
    gate, up, down = draw.standard_normal((3, NEURONS, WIDTH)).astype(np.float32)
    x = draw.standard_normal((NUM_TOKENS, WIDTH)).astype(np.float32)
    late = np.full_like(up, np.nan), np.full_like(down, np.nan)
    seen: list[str] = []
    run = matmul.run

    def noted_run() -> None:
        seen.append("matmul")
        run()

    def await_up_down() -> None:
        seen.append("up_down")
        late[0][:], late[1][:] = up, down

    def output(rows: tuple[np.ndarray, np.ndarray], **options: Any) -> np.ndarray:
        no_bias = np.empty((1, 1, 0), np.float32)
        starts = np.array([[0, NEURONS]])
        arrays = FfnArrays(starts, gate, *rows, none, none, no_bias, NO_NORMS)
        out = np.empty((NUM_TOKENS, WIDTH), np.float32)
        function = activation(name, 0.0)
        prompt_ffn(matmul, arrays, 0, x, function, out, skip_silent=skip_silent, **options)
        return out

    expected = output((up, down))
    assert np.abs(expected).max() > 1
    monkeypatch.setattr(matmul, "run", noted_run)
    np.testing.assert_array_equal(output(late, await_up_down=await_up_down), expected)
    assert seen == order


def few_and_many(num_tokens: int) -> np.ndarray:
    """Tokens for which hardly any neuron of `a_layer` fires; for every third one most do."""
    x = random_floats(7, num_tokens, WIDE)
    x[:, 0] = np.where(np.arange(num_tokens) % 3, -8, 8)
    return x


def a_layer(kind: str, is_gated: bool) -> FfnArrays:
    """Neurons in two blocks, with biases."""
    matrices = random_floats(8, 3, MANY, WIDE) / 8
    matrices[0, :, 0] = 1
    if kind == "q8":
        gate, up, down = (quantize_rows(matrix, Q8) for matrix in matrices)
    else:
        gate, up, down = (narrowed(matrix, BITS[kind]) for matrix in matrices)
    starts = np.array([[0, MANY // 3, MANY]])
    gate_bias, up_bias = random_floats(9, 2, MANY) / 8
    down_bias = random_floats(10, 1, 2, WIDE)
    up = up if is_gated else up[:0]
    return FfnArrays(starts, gate, up, down, gate_bias, up_bias, down_bias, NO_NORMS)


def of_float64(arrays: FfnArrays, name: str, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The layer's output, of float32 arrays."""
    exact, tensor = x.astype(np.float64), torch.from_numpy
    gates = exact @ arrays.gate.T.astype(np.float64) + arrays.gate_bias
    h = activated(name, tensor(gates), THRESHOLD).numpy()
    if weights.size:
        h = h * np.repeat(weights, np.diff(arrays.starts[0]), axis=1)
    if arrays.up.size:
        ups = exact @ arrays.up.T.astype(np.float64) + arrays.up_bias
        h = h * activated_up(name, tensor(ups), THRESHOLD).numpy()
    of_blocks = weights if weights.size else np.ones((len(x), 2))
    return h @ arrays.down.astype(np.float64) + of_blocks @ arrays.down_bias[0]


@pytest.mark.parametrize("has_weights", [False, True], ids=["plain", "weights"])
@pytest.mark.parametrize("is_gated", [True, False], ids=["three", "two"])
@pytest.mark.parametrize("name", list(ACTIVATION_CODES))
@pytest.mark.parametrize("kind", ["f32", "f16", "q8"])
def test_each_token_is_computed_as_alone(
    matmul: Matmul,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    name: str,
    is_gated: bool,
    has_weights: bool,
) -> None:
    """Those for which few neurons fire one by one, others as matmuls, also side by side."""
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

    def output(ids: np.ndarray) -> np.ndarray:
        own, out = weights[ids] if has_weights else weights, np.empty((len(ids), WIDE), np.float32)
        function = activation(name, THRESHOLD if name in ("fatrelu", "clamped_silu") else 0.0)
        del ways[:]
        prompt_ffn(
            matmul, arrays, 0, x[ids], function, out, skip_silent=True, block_weights=own
        )  # fmt: skip
        return out

    everyone = np.arange(100)
    together = output(everyone)
    is_sparse = name in SPARSE_ACTIVATION_FNS
    all_ways = [("_combine", 68), ("_add_fired", 132)]  # of two blocks each
    assert ways == (all_ways if is_sparse else [("_combine", 200)])
    if kind == "f32":
        exact = of_float64(arrays, name, x, weights)
        assert np.abs(together - exact).max() < 1e-5 * np.abs(exact).max()
    companies = (
        everyone[::3],
        everyone[1::3],
        everyone[:1],
        everyone[1:2],
        everyone[::-1],
        [5, 3, 4],
    )
    for ids in companies:
        assert output(np.array(ids)).tobytes() == together[ids].tobytes()
