"""The router's kernel beside the reference in float64, in steps and prompts of any size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from hotcold.actors.attention.arrays import router_numbers
from hotcold.cuda_kernels.kernels import MAX_TOKENS
from hotcold.cuda_kernels.neurons import DeviceRouter
from hotcold.model.config.layer_spec import FfnSpec, RouterSpec
from hotcold.numba_kernels.decode.router import choose_experts, route_tokens
from hotcold.numba_kernels.router_arrays import RouterArrays
from tests.kernels import backends
from tests.kernels.device_calls import DeviceCalls, device_matrix
from tests.kernels.layer_numbers import device_layer, layer_numbers
from tests.reference_experts import expert_weights

SPARE = 2  # blocks of a layer that has more of them
WIDTH, TOKENS, BEFORE = 70, 37, 5  # BEFORE: rows of a layer before the one that is computed
SPECS: dict[str, dict[str, Any]] = {
    "softmax": {"score": "softmax", "norms_chosen": False},
    "normed": {"score": "softmax", "norms_chosen": True, "scale": 0.5},
    "of-chosen": {"score": "softmax_of_chosen", "norms_chosen": False, "has_bias": True},
    "sigmoid": {"score": "sigmoid", "norms_chosen": True, "has_selection_bias": True, "scale": 1.7},
    "sigmoid-alone": {"score": "sigmoid", "norms_chosen": False, "scale": 2.5},
    "biased-softmax": {"score": "softmax", "norms_chosen": True, "has_selection_bias": True},
    "groups": {
        "score": "sigmoid",
        "norms_chosen": True,
        "has_selection_bias": True,
        "num_groups": 4,
        "num_chosen_groups": 2,
    },
    "softmax-groups": {
        "score": "softmax",
        "norms_chosen": False,
        "num_groups": 6,
        "num_chosen_groups": 4,
    },
}


class Router:
    """Random weights of a router in layer 1, with numbers as kernels take them."""

    def __init__(self, shared: str = "", **facts: Any) -> None:
        rng = np.random.default_rng(3)
        self.spec = RouterSpec(
            **{"num_experts": 12, "num_chosen": 4, "gates_shared": shared == "gated"} | facts
        )
        count, total = self.spec.num_experts, BEFORE + self.spec.num_experts
        self.numbers = layer_numbers(**router_numbers(_ffn(self.spec, bool(shared))))

        def normal(size: int | tuple[int, int], is_there: bool = True) -> np.ndarray:
            found = rng.standard_normal(size, np.float32)
            return found if is_there else np.empty(0, np.float32)

        self.arrays = RouterArrays(
            starts=np.array([0, BEFORE, total], np.int64),
            rows=normal((total, WIDTH)) / np.float32(4),
            bias=normal(total, self.spec.has_bias),
            selection_bias=normal(total, self.spec.has_selection_bias),
            shared=normal((2, WIDTH * self.spec.gates_shared)) / np.float32(4),
            input_scale=np.empty((2, 0), np.float32),
            expert_scale=normal(total, self.spec.scales_experts),
        )
        self.num_blocks = count + bool(shared)

    def weights(self, x: np.ndarray, ffn_input: np.ndarray | None = None) -> np.ndarray:
        """What the kernel makes of tokens x (T, d): (T, B + 1), with a block of wider layers."""
        found = np.full((len(x), self.num_blocks + 1), np.nan, np.float32)
        logits = np.full((len(x), self.spec.num_experts), np.nan, np.float32)
        ffn_input = x if ffn_input is None else ffn_input
        route_tokens(self.numbers, self.arrays, 1, x, ffn_input, logits, found)
        return found

    def expected(self, x: np.ndarray) -> np.ndarray:
        """The reference's (T, E) float64."""

        def part(values: np.ndarray) -> torch.Tensor | None:
            return torch.from_numpy(values[BEFORE:]).double() if values.size else None

        rows, bias, selection_bias = self.arrays[1:4]
        router = part(rows)
        assert router is not None
        tokens = torch.from_numpy(x).double()
        found = expert_weights(self.spec, router, part(bias), part(selection_bias), tokens)
        scale = part(self.arrays.expert_scale)
        return (found if scale is None else found * scale).numpy()


def _ffn(spec: RouterSpec, has_shared: bool) -> FfnSpec:
    return FfnSpec(
        activation_fn="silu",
        activation_threshold=0.0,
        has_gate=True,
        has_biases=False,
        block_sizes=(3,) * (spec.num_experts + has_shared),
        router=spec,
    )


def tokens(count: int = TOKENS) -> np.ndarray:
    return np.random.default_rng(4).standard_normal((count, WIDTH), np.float32)


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


each_way = pytest.mark.parametrize("way", ["numba", *backends.DEVICES])
each_router = pytest.mark.parametrize("facts", SPECS.values(), ids=SPECS)
Weights = Callable[..., np.ndarray]


@pytest.fixture
def weights_of(way: str, request: pytest.FixtureRequest) -> Weights:
    """weights_of(router, x, ffn_input): by Numba, or by a device."""
    if way == "numba":
        return Router.weights
    return partial(device_weights, backends.calls(way, request))


@each_way
@each_router
def test_weights_equal_the_reference(weights_of: Weights, facts: dict[str, Any]) -> None:
    for more in ({}, {"num_experts": 132, "num_chosen": 16}):
        router, x = Router(**facts | more), tokens()
        count = router.spec.num_experts
        found, expected = weights_of(router, x), router.expected(x)
        assert not found[:, count:].any()
        assert ((found[:, :count] != 0) == (expected != 0)).all()
        assert (np.count_nonzero(found, axis=1) == router.spec.num_chosen).all()
        np.testing.assert_allclose(found[:, :count], expected, rtol=5e-6)


def test_learned_numbers_scale_the_weights_of_experts() -> None:
    """On the CPU alone."""
    router, x = Router(score="softmax", norms_chosen=True, scales_experts=True), tokens()
    found, expected = router.weights(x), router.expected(x)
    assert (expected < 0).any()
    np.testing.assert_allclose(found[:, : router.spec.num_experts], expected, rtol=5e-6)


@each_way
@each_router
def test_bits_do_not_depend_on_other_tokens(weights_of: Weights, facts: dict[str, Any]) -> None:
    router, x = Router(shared="gated", num_experts=24, **facts), tokens(40)
    whole = weights_of(router, x)
    for size in (1, 3, 16):
        parts = [weights_of(router, x[t : t + size]) for t in range(0, len(x), size)]
        assert np.concatenate(parts).tobytes() == whole.tobytes()


@each_way
@each_router
def test_of_equal_experts_the_first_are_chosen(weights_of: Weights, facts: dict[str, Any]) -> None:
    router, x = Router(**facts), tokens(3)
    router.arrays.rows[:] = router.arrays.rows[0]
    router.arrays.bias[:] = 0
    router.arrays.selection_bias[:] = 0
    found = weights_of(router, x)
    assert found[:, :4].all()
    assert not found[:, 4:].any()


@each_way
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_reaches_the_output(weights_of: Weights, bad: float) -> None:
    router, x = Router(shared="plain", **SPECS["groups"]), tokens(3)
    good = weights_of(router, x)
    x[1, 5] = bad
    found = weights_of(router, x)
    assert np.isnan(found[1, :12]).all() and found[1, 12] == 1
    assert found[[0, 2]].tobytes() == good[[0, 2]].tobytes()


def chosen(router: Router, *logits: float) -> list[int]:
    """The experts chosen by these logits."""
    values, weights = np.array([logits], np.float32), np.empty((1, len(logits)), np.float32)
    choose_experts(router.numbers, router.arrays, 1, values[0], weights[0])
    return np.flatnonzero(weights[0]).tolist()


def test_close_logits_of_large_scores_stay_apart() -> None:
    """Their sigmoids are equal in float32, and so are sums of exponentials."""
    router = Router(score="sigmoid", norms_chosen=True, num_experts=3, num_chosen=1)
    assert chosen(router, 20, 20.5, 20.25) == [1]


def test_a_weight_may_come_out_as_zero() -> None:
    router = Router(score="softmax", norms_chosen=True, num_experts=3, num_chosen=2)
    assert chosen(router, 300, 0, 1) == [0]
    router = Router(score="sigmoid", norms_chosen=True, num_experts=3, num_chosen=2)
    assert chosen(router, -800, -900, -1000) == []  # and nothing is divided by 0
