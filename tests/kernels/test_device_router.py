"""A device's router beside the reference in float64 and beside the CPU's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hotcold.cuda_kernels.kernels import MAX_EXPERTS, MAX_TOKENS
from hotcold.cuda_kernels.neurons import DeviceRouter
from hotcold.numba_kernels.router_arrays import RouterArrays
from tests.kernels.device_calls import DeviceCalls, device_matrix
from tests.kernels.layer_numbers import device_layer
from tests.kernels.test_router import BEFORE, SPECS, WIDTH, Router, tokens

SPARE = 2  # blocks of a layer that has more of them


def device_weights(
    device: DeviceCalls, router: Router, x: np.ndarray, ffn_input: np.ndarray | None = None
) -> np.ndarray:
    """(T, B + SPARE), in launches of MAX_TOKENS tokens at most."""
    put, arrays = device.to_device, router.arrays
    own = DeviceRouter(
        rows=device_matrix(arrays.rows[BEFORE:], put),
        bias=put(arrays.bias[BEFORE:]),
        selection_bias=put(arrays.selection_bias[BEFORE:]),
        shared=device_matrix(arrays.shared[1:], put) if arrays.shared.size else None,
    )
    names = router.numbers.dtype.names
    layer = device_layer(put, **{name: router.numbers[name] for name in names})
    found = []
    for first in range(0, len(x), MAX_TOKENS):
        some = slice(first, first + MAX_TOKENS)
        num_tokens = len(x[some])
        items = device.kernels.router_scratch_items(num_tokens, router.spec.num_experts)
        scratch = put(np.full(items, np.nan, np.float32))
        weights = put(np.full((num_tokens, router.num_blocks + SPARE), np.nan, np.float32))
        places = put(x[some]), put((x if ffn_input is None else ffn_input)[some])
        device.kernels.route(layer, own, *places, scratch, weights)
        found.append(device.to_host(weights))
    return np.concatenate(found)


@pytest.mark.parametrize("facts", SPECS.values(), ids=SPECS)
def test_weights_equal_the_reference(device: DeviceCalls, facts: dict[str, Any]) -> None:
    router, x = Router(**facts), tokens()
    found, expected = device_weights(device, router, x), router.expected(x)
    assert not found[:, router.spec.num_experts :].any()
    found = found[:, : router.spec.num_experts]
    assert ((found != 0) == (expected != 0)).all()
    np.testing.assert_allclose(found, expected, rtol=5e-6)


@pytest.mark.parametrize("num_experts", [2, 32, 130, 512])
def test_other_numbers_of_experts(device: DeviceCalls, num_experts: int) -> None:
    count = 1 + num_experts // 9
    facts: dict[str, Any] = {"num_experts": num_experts, "num_chosen": count}
    router, x = Router(score="softmax", norms_chosen=True, **facts), tokens(7)
    found = device_weights(device, router, x)[:, :num_experts]
    np.testing.assert_allclose(found, router.expected(x), rtol=5e-6)


@pytest.mark.parametrize("facts", SPECS.values(), ids=SPECS)
def test_bits_do_not_depend_on_other_tokens(device: DeviceCalls, facts: dict[str, Any]) -> None:
    router, x = Router(shared="gated", num_experts=24, **facts), tokens(40)
    whole = device_weights(device, router, x)
    for size in (1, 3, 16):
        parts = [device_weights(device, router, x[t : t + size]) for t in range(0, len(x), size)]
        assert np.concatenate(parts).tobytes() == whole.tobytes()


@pytest.mark.parametrize("shared", ["gated", "plain"])
def test_shared_experts_read_the_input_of_the_ffn(device: DeviceCalls, shared: str) -> None:
    x, router = tokens(), Router(shared=shared, **SPECS["sigmoid"])
    ffn_input = x[::-1].copy()
    found = device_weights(device, router, x, ffn_input)[:, : router.num_blocks]
    expected = router.weights(x, ffn_input)[:, : router.num_blocks]
    np.testing.assert_allclose(found, expected, rtol=5e-6)


@pytest.mark.parametrize("facts", SPECS.values(), ids=SPECS)
def test_of_equal_experts_the_first_are_chosen(device: DeviceCalls, facts: dict[str, Any]) -> None:
    router, x = Router(**facts), tokens(3)
    router.arrays.rows[:] = router.arrays.rows[0]
    router.arrays.bias[:] = 0
    router.arrays.selection_bias[:] = 0
    found = device_weights(device, router, x)
    assert found[:, :4].all()
    assert not found[:, 4:].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_logit_that_is_not_finite_reaches_all_weights(device: DeviceCalls, bad: float) -> None:
    router, x = Router(shared="plain", **SPECS["sigmoid"]), tokens(5)
    x[2, 3] = bad
    found, count = device_weights(device, router, x), router.spec.num_experts
    assert np.isnan(found[2, :count]).all() and found[2, count] == 1
    assert np.isfinite(np.delete(found, 2, axis=0)).all()


def test_too_many_experts(device: DeviceCalls) -> None:
    router = Router(num_experts=MAX_EXPERTS + 1, **SPECS["softmax"])
    with pytest.raises(ValueError, match="routers choose among"):
        device_weights(device, router, tokens(1))


def test_widths_without_whole_pieces(device: DeviceCalls) -> None:
    """WIDTH is such a one; here rows are read in whole pieces."""
    assert WIDTH % 4
    router, x = Router(**SPECS["sigmoid"]), tokens(9)
    cut = RouterArrays(
        router.arrays.starts,
        np.ascontiguousarray(router.arrays.rows[:, :64]),
        *router.arrays[2:4],
        router.arrays.shared,
    )
    router.arrays = cut
    x = np.ascontiguousarray(x[:, :64])
    found = device_weights(device, router, x)[:, : router.spec.num_experts]
    np.testing.assert_allclose(found, router.expected(x), rtol=5e-6)
