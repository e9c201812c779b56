"""A prompt's gates are multiplied while up and down rows are being read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hotcold.actors.cpu.matmul import Matmul
from hotcold.actors.cpu.prompt_ffn import prompt_ffn
from hotcold.numba_kernels.decode.activations import activation
from hotcold.numba_kernels.serve.ffn_rows import NO_NORMS, FfnArrays

pytestmark = pytest.mark.usefixtures("one_torch_thread")
NUM_TOKENS, WIDTH, NEURONS = 40, 32, 64


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
