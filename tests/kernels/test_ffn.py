"""The sparse FFN against the reference, and that silent neurons really are left out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hotcold.model.config.model_config import SPARSE_ACTIVATION_FNS
from hotcold.numba_kernels.checks import ACTIVATION_CODES
from hotcold.numba_kernels.decode.activations import Thresholds
from hotcold.numba_kernels.formats import Q4_K, Q5, Q5_K, Q6, ROW_FORMATS
from tests.kernels import reference
from tests.kernels.arrays import BITS, random_bits, random_floats
from tests.kernels.numba_calls import sparse_ffn

pytestmark = pytest.mark.sweep(kind=["f32", "f16"])

WIDTHS = [1, 3, 16, 17, 100]
HEIGHTS = [1, 2, 5, 97]


@dataclass(frozen=True)
class Case:
    """Arguments of one call."""

    gate: np.ndarray
    up: np.ndarray | None
    down: np.ndarray
    x: np.ndarray
    ids: np.ndarray | None = None
    gate_bias: np.ndarray | None = None
    up_bias: np.ndarray | None = None
    activation_fn: str = "relu"
    threshold: float = 0.0
    token_masks: np.ndarray | None = None
    thresholds: Thresholds | None = None
    down_norms: np.ndarray | None = None

    def run(self, package: Any, skip_silent: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Call the package's sparse_ffn."""
        masks = {} if self.token_masks is None else {"token_masks": self.token_masks}
        return package.sparse_ffn(
            self.gate,
            self.up,
            self.down,
            self.x,
            self.ids,
            **masks,
            gate_bias=self.gate_bias,
            up_bias=self.up_bias,
            activation_fn=self.activation_fn,
            threshold=self.threshold,
            skip_silent=skip_silent,
            thresholds=self.thresholds,
            down_norms=self.down_norms,
        )

    def sizes(self) -> np.ndarray:
        """Sums of the absolute values of all that is added up: what rounding is relative to."""
        ids = slice(None) if self.ids is None else self.ids
        gates = self._size(self.gate, self.gate_bias)[:, ids]
        gates = gates**2 if self.activation_fn == "relu2" else gates
        ups = 1 if self.up is None else self._size(self.up, self.up_bias)[:, ids]
        return (gates * ups) @ np.abs(reference.widened(self.down))[ids]

    def _size(self, weights: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        return np.abs(self.x) @ np.abs(reference.widened(weights)).T + np.abs(
            0 if bias is None else bias
        )


def make_case(
    kind: str,
    height: int,
    width: int,
    num_tokens: int = 1,
    *,
    gated: bool = True,
    bias: bool = False,
) -> Case:
    seed = height * 1000 + width
    gate, up, down = (random_bits(seed + i, BITS[kind], height, width) for i in range(3))
    return Case(
        gate,
        up if gated else None,
        down,
        random_floats(seed + 4, num_tokens, width),
        gate_bias=random_floats(seed + 5, height) if bias else None,
        up_bias=random_floats(seed + 6, height) if bias and gated else None,
    )


def assert_right(backend: SimpleNamespace, case: Case) -> None:
    expected, fired = case.run(reference)
    for skip_silent in (True, False):
        found, found_fired = case.run(backend, skip_silent)
        assert found.dtype == np.float32 and found.shape == expected.shape
        assert (np.abs(found - expected) <= 4e-6 * case.sizes()).all()
        assert found_fired.dtype == np.int32
        if skip_silent and case.activation_fn in SPARSE_ACTIVATION_FNS:
            assert found_fired.tolist() == fired.tolist()
        elif skip_silent:  # what is next to zero is zero in one of them and not in the other
            assert found_fired.size
        else:
            all_ids = range(case.gate.shape[0]) if case.ids is None else case.ids
            assert found_fired.tolist() == list(all_ids)


def some_ids(height: int) -> list[np.ndarray]:
    order = np.random.default_rng(height).permutation(height).astype(np.int32)
    sizes = {0, 1, height // 2, height}
    return [np.sort(order[:size]) for size in sorted(sizes)] + [order]


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("gated", [True, False], ids=["reglu", "two-matrix"])
@pytest.mark.parametrize("width", WIDTHS)
def test_sparse_ffn(backend: SimpleNamespace, kind: str, gated: bool, width: int) -> None:
    for number, (height, num_tokens) in enumerate(product(HEIGHTS, (1, 3))):
        # Both with every two of width, height and number of tokens.
        bias = (WIDTHS.index(width) + number // 2 + number) % 2 == 1
        case = make_case(kind, height, width, num_tokens, gated=gated, bias=bias)
        for ids in (None, *some_ids(height)):
            assert_right(backend, replace(case, ids=ids))


@pytest.mark.parametrize("kind", BITS)
def test_wide(backend: SimpleNamespace, kind: str) -> None:
    case = make_case(kind, 41, 4096)
    assert_right(backend, case)
    assert_right(backend, replace(case, ids=np.arange(1, 41, 3, dtype=np.int32)))


@pytest.mark.parametrize("activation_fn", ACTIVATION_CODES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 9])
def test_activation_functions(
    backend: SimpleNamespace, activation_fn: str, gated: bool, num_tokens: int
) -> None:
    case = make_case("f32", 97, 17, num_tokens, gated=gated, bias=True)
    threshold = {"fatrelu": 1.5, "clamped_silu": 0.8}.get(activation_fn, 0.0)
    case = replace(case, activation_fn=activation_fn, threshold=threshold)
    assert_right(backend, case)
    assert_right(backend, replace(case, ids=np.arange(3, 90, 2, dtype=np.int32)))


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("num_tokens", [1, 3, 17, 32])
def test_drelu_fires_where_gate_and_up_do(
    backend: SimpleNamespace, kind: str, num_tokens: int
) -> None:
    """Of several blocks of neurons; down rows of those that do not fire hold NaN."""
    case = replace(make_case(kind, 700, 256, num_tokens, bias=True), activation_fn="drelu")
    assert case.gate_bias is not None and case.up_bias is not None
    shift = np.float32(8 * np.sqrt(256) * np.abs(reference.widened(case.gate)).mean())
    case = replace(case, gate_bias=case.gate_bias - shift / 4, up_bias=case.up_bias - shift / 8)
    expected, fired = case.run(reference)
    assert 0 < fired.size < 700
    unread = np.setdiff1d(np.arange(700), fired)
    down = case.down.copy()
    down[unread] = np.nan if kind == "f32" else {"f16": 0x7E00, "bf16": 0x7FC0}[kind]
    found, found_fired = replace(case, down=down).run(backend)
    assert found_fired.tolist() == fired.tolist()
    assert (np.abs(found - expected) <= 4e-6 * case.sizes()).all()
    for t in range(num_tokens):
        alone, _ = replace(case, x=case.x[t : t + 1]).run(backend)
        assert (alone[0] == found[t]).all()


@pytest.mark.parametrize("activation_fn", ACTIVATION_CODES)
def test_activation_far_from_zero(backend: SimpleNamespace, activation_fn: str) -> None:
    limit = 7.0 if activation_fn == "clamped_silu" else 0.0
    values = np.array([-1e4, -200, -90, -20, -5, -1e-3, 0, 1e-3, 5, 20, 200, 1e4], np.float32)
    case = Case(
        gate=values[:, None],
        up=None,
        down=np.eye(values.size, dtype=np.float32)[:, :1] * 0 + 1,
        x=np.ones((1, 1), np.float32),
        activation_fn=activation_fn,
        threshold=limit,
    )
    for i in range(values.size):
        found, _ = replace(case, ids=np.array([i], np.int32)).run(backend)
        expected = reference.activate(values[i : i + 1].astype(np.float64), activation_fn, limit)
        np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("listed", [True, False])
def test_silent_neurons_are_never_read_beyond_their_gate(
    backend: SimpleNamespace, gated: bool, listed: bool
) -> None:
    """Their up and down rows hold NaN, which would show in the sum even when weighted by zero."""
    case = make_case("f32", 97, 33, 2, gated=gated, bias=True)
    ids = np.sort(np.random.default_rng(0).permutation(97)[:60]).astype(np.int32)
    case = replace(case, ids=ids if listed else None)
    expected, fired = case.run(reference)
    assert 0 < fired.size < 97
    unread = np.setdiff1d(np.arange(97), fired)
    for matrix in (case.up, case.down):
        if matrix is not None:
            matrix[unread] = np.nan
    found, found_fired = case.run(backend)
    assert found_fired.tolist() == fired.tolist()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    if not listed:
        assert np.isnan(case.run(backend, skip_silent=False)[0]).all()


def test_a_neuron_silent_for_one_token_of_two_is_kept(backend: SimpleNamespace) -> None:
    ones = np.ones((1, 1), np.float32)
    case = Case(gate=ones, up=None, down=ones, x=np.array([[-1], [2]], np.float32))
    out, fired = case.run(backend)
    assert fired.tolist() == [0] and out.tolist() == [[0], [2]]


def test_nothing_fires(backend: SimpleNamespace) -> None:
    case = make_case("f16", 97, 16, gated=True)
    case = replace(case, gate_bias=np.full(97, -1e6, np.float32))
    out, fired = case.run(backend)
    assert not fired.size and not out.any()


def test_nan_input_is_not_swallowed(backend: SimpleNamespace) -> None:
    case = make_case("f32", 5, 17)
    x = case.x.copy()
    x[0, 3] = np.nan
    out, fired = replace(case, x=x).run(backend)
    assert np.isnan(out).all() and fired.size == 5


def random_masks(num_ids: int, num_tokens: int) -> np.ndarray:
    """Random sets of tokens; the first is empty, the second holds all, bits beyond are noise."""
    masks = np.random.default_rng(num_ids).integers(0, 1 << 32, num_ids, np.uint32)
    masks[:1], masks[1:2] = np.uint32(0xFFFFFFFF) << np.uint32(num_tokens % 32), 0xFFFFFFFF
    return masks


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("gated", [True, False], ids=["reglu", "two-matrix"])
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 31])
def test_tokens_choose_their_own_neurons(
    backend: SimpleNamespace, kind: str, gated: bool, num_tokens: int
) -> None:
    """The output is that of each token alone, over the neurons that list it."""
    case = make_case(kind, 97, 33, num_tokens, gated=gated, bias=True)
    for num_ids in (1, 4, 50, 97):
        ids = np.random.default_rng(num_ids).permutation(97)[:num_ids].astype(np.int32)
        masks = random_masks(num_ids, num_tokens)
        expected, fired = np.zeros((num_tokens, 33)), np.zeros(97, bool)
        for t in range(num_tokens):
            own = ids[(masks >> np.uint32(t)) & np.uint32(1) != 0]
            expected[t], own_fired = replace(case, x=case.x[t : t + 1], ids=own).run(reference)
            fired[own_fired] = True
        chosen = replace(case, ids=ids, token_masks=masks)
        for skip_silent in (True, False):
            found, found_fired = chosen.run(backend, skip_silent)
            assert (np.abs(found - expected) <= 4e-6 * chosen.sizes()).all()
            assert found_fired.tolist() == (ids[fired[ids]] if skip_silent else ids).tolist()


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_threads_together(kind: str, num_tokens: int) -> None:
    """The output is the reference's, and bit-equal every time, whichever thread is faster."""
    case = make_case(kind, 1013, 600, num_tokens, bias=True)
    ids = np.sort(np.random.default_rng(3).permutation(1013)[:700]).astype(np.int32)
    for chosen in (case, replace(case, ids=ids), replace(case, ids=ids[:0])):
        for num_threads in (2, 3):
            team = SimpleNamespace(sparse_ffn=partial(sparse_ffn, num_threads=num_threads))
            assert_right(team, chosen)
            again = [chosen.run(team)[0].tobytes() for _ in range(5)]
            assert len(set(again)) == 1


def test_a_neuron_active_for_no_token_is_not_read(backend: SimpleNamespace) -> None:
    case = make_case("f32", 97, 33, 2, bias=True)
    assert case.up is not None
    ids = np.arange(97, dtype=np.int32)
    masks = np.where(ids % 2, np.uint32(3), np.uint32(4))  # there is no token 2
    case.up[::2] = case.down[::2] = np.nan
    out, fired = replace(case, ids=ids, token_masks=masks).run(backend)
    assert np.isfinite(out).all() and fired.size and (fired % 2 == 1).all()


@pytest.mark.parametrize("dtype", [Q4_K, Q5, Q5_K, Q6], ids=str)
def test_rows_that_kernels_cannot_add_up(dtype: np.dtype) -> None:
    assert not ROW_FORMATS[dtype].is_summed
