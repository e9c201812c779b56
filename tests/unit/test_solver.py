"""The placement against enumeration of all placements, and what must hold of every placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotcold.model.byte_sizes import binary_text
from hotcold.model.errors import MemoryBudgetError
from hotcold.model.weights.sizes import kv_cache_bytes
from hotcold.placement.profile import Rates
from hotcold.placement.solver.cost import (
    Groups,
    PlanDevice,
    PredictorCost,
    hotness,
    make_groups,
    make_problem,
    part_costs,
)
from hotcold.placement.solver.divide import solve_divided
from hotcold.placement.solver.problem import (
    ATTENTION,
    HEAD,
    PREDICTOR,
    Problem,
    merge_cpu_devices,
    part_bytes_on,
)
from hotcold.placement.solver.solver import Solution, solve
from tests.placement_cases import llama_config, random_problem


def best_of_all(problem: Problem) -> float:
    """The least seconds over every placement that fits; infinite without one."""
    devices, gpus = problem.num_devices, problem.num_gpus
    budget = problem.budget_bytes.tolist()
    layers = [layer_choices(problem, layer) for layer in range(problem.num_layers)]
    best = float("inf")
    for parts in product(range(-1, gpus), repeat=len(problem.part_bytes)):
        if not first_are_on_host(problem, parts):
            continue
        held = [0] * devices
        host, seconds = 0, exchanges_of(problem, parts) * problem.exchange_s
        for part, device in enumerate(parts):
            seconds += problem.part_seconds[part][gpus if device < 0 else device]
            if device < 0:
                host += int(problem.part_bytes[part])
            else:
                held[device] += int(problem.part_bytes[part])
        for chosen in product(*layers):
            used = [held[d] + sum(entry[1][d] for entry in chosen) for d in range(devices)]
            fits = all(a <= b for a, b in zip(used, budget, strict=True))
            if fits and sum(used[gpus:]) + host <= sum(budget[gpus:]):
                best = min(best, seconds + sum(entry[0] for entry in chosen))
    return best


def places_of(problem: Problem, parts: Sequence[int], kind: str) -> list[int]:
    return [p for p, own in zip(parts, problem.part_kinds, strict=True) if own == kind]


def first_are_on_host(problem: Problem, parts: Sequence[int]) -> bool:
    """Whether attention on the host, if any, is that of the first layers."""
    attention = places_of(problem, parts, ATTENTION)
    return attention == sorted(attention)


def exchanges_of(problem: Problem, parts: Sequence[int]) -> int:
    """One with a GPU, and two for each layer that something keeps from it, one for the head."""
    attention, (head,), predictors = (
        places_of(problem, parts, kind) for kind in (ATTENTION, HEAD, PREDICTOR)
    )
    apart = [min(both) < 0 for both in zip(attention, predictors or attention, strict=True)]
    return problem.num_gpus + 2 * sum(apart) + (head < 0)


def layer_choices(problem: Problem, layer: int) -> list[tuple[float, list[int]]]:
    """Seconds and bytes on each device of every way to place one layer's groups."""
    found = []
    for places in product(range(problem.num_devices), repeat=problem.group_sizes.shape[1]):
        work, count = [0.0] * problem.num_devices, [0] * problem.num_devices
        for group, device in enumerate(places):
            work[device] += problem.group_seconds[layer][group][device]
            count[device] += int(problem.group_sizes[layer, group])
        found.append((max(work), [n * problem.neuron_bytes for n in count]))
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("num_layers", "num_groups", "num_gpus", "has_predictors"),
    [(2, 3, 0, False), (2, 3, 1, False), (2, 3, 1, True), (3, 2, 1, False), (3, 2, 1, True),
     (4, 2, 1, False), (3, 1, 0, True)],
)  # fmt: skip
def test_nothing_better_exists(
    seed: int, num_layers: int, num_groups: int, num_gpus: int, has_predictors: bool
) -> None:
    rng = np.random.default_rng(seed)
    sizes = (64,) * (num_groups - 1) + (40 if seed % 2 else 64,)
    tightness = float(rng.choice([1.15, 1.4, 3.0]))
    problem = random_problem(
        rng, num_layers, sizes, num_gpus, 1, has_predictors=has_predictors, tightness=tightness
    )
    best = best_of_all(problem)
    if not np.isfinite(best):
        with pytest.raises(MemoryBudgetError, match="bytes"):
            solve(problem, mip_gap=0.0)
        return
    found = solve(problem, mip_gap=0.0)
    check(problem, found)
    assert found.objective_s == pytest.approx(best, rel=1e-5)
    assert found.bound_s <= best * (1 + 1e-5)


def test_a_budget_is_used_to_its_last_byte() -> None:
    problem = tight_problem(missing_bytes=0)
    found = solve(problem, mip_gap=0.0)
    assert (found.assignment.group_device[:, :2] == 0).all()
    check(problem, found)
    with pytest.raises(MemoryBudgetError, match="separate memories"):
        solve(tight_problem(missing_bytes=1, other_bytes=1))
    with pytest.raises(MemoryBudgetError, match=r"neurons do not fit.* 1 B are missing") as bad:
        solve(tight_problem(missing_bytes=1))
    assert "\n" not in str(bad.value)


def tight_problem(missing_bytes: int, other_bytes: int = 0) -> Problem:
    """Two layers of four groups; the GPU has room for four groups, the one column for the rest."""
    rng = np.random.default_rng(1)
    problem = random_problem(rng, 2, (64, 64, 64, 64), 1, 1)
    four = 4 * 64 * problem.neuron_bytes
    host = four + int(problem.part_bytes.sum()) + other_bytes
    return replace(
        problem,
        budget_bytes=np.array([four - missing_bytes, host]),
        part_seconds=np.tile([1.0, 0.0], (3, 1)),
        group_frequency=np.tile([0.9, 0.8, 0.1, 0.1], (2, 1)),
        group_seconds=np.tile([[0.9, 9], [0.8, 8], [0.1, 1], [0.1, 1]], (2, 1, 1)),
    )


@pytest.mark.parametrize(
    ("room", "what", "need", "left"),
    [
        (19, "attention", 20, 19),
        (1020 + 1279, "neurons", 1280, 1279),
    ],
)
def test_what_does_not_fit_is_named(room: int, what: str, need: int, left: int) -> None:
    problem = random_problem(np.random.default_rng(0), 2, (64,), 1, 1)
    with pytest.raises(MemoryBudgetError) as error:
        solve(
            replace(
                problem,
                budget_bytes=np.array([0, room]),
                part_bytes=np.array([10, 10, 1000]),
                neuron_bytes=10,
            )
        )
    text = str(error.value)
    assert what in text.split(" do not fit")[0]
    assert f"need {binary_text(need)}, {binary_text(left)} are left" in text
    assert f"{binary_text(need - left)} are missing" in text
    assert "\n" not in text


problems = st.builds(
    random_problem,
    rng=st.integers(0, 2**32 - 1).map(np.random.default_rng),
    num_layers=st.integers(1, 6),
    group_sizes=st.tuples(st.integers(1, 20), st.integers(1, 64)).map(
        lambda pair: (64,) * pair[0] + (pair[1],)
    ),
    num_gpus=st.integers(0, 1),
    num_columns=st.integers(1, 3),
    has_predictors=st.booleans(),
    tightness=st.sampled_from([1.05, 1.3, 4.0]),
    is_ragged=st.booleans(),
)


@settings(max_examples=20)
@given(problems)
def test_every_placement_keeps_the_rules(problem: Problem) -> None:
    """Cold groups in pieces for all CPU devices take about as long as on one of their speed."""
    layer_sizes = problem.group_sizes.sum(axis=1)
    layers, count = layer_sizes.size, int(layer_sizes.max())
    groups = Groups(np.tile(np.arange(count), (layers, 1)), problem.group_sizes)
    try:
        divided, pieces, found = solve_divided(problem, groups, time_limit_s=5)
    except MemoryBudgetError:
        return
    check(divided, found)
    assert (np.sort(pieces.order) == groups.order).all()
    assert (pieces.sizes.sum(axis=1) == layer_sizes).all()
    assert found.bound_s <= found.objective_s * (1 + 1e-9)
    if (problem.budget_bytes[problem.num_gpus :] > layer_sizes.sum() * 50).all():
        whole = solve(merge_cpu_devices(problem), time_limit_s=5)
        piece_s = 2 * problem.group_seconds[..., problem.num_gpus :].max() / 64
        slack = layers * problem.group_sizes.shape[1] * piece_s
        assert found.objective_s <= whole.objective_s * 1.01 + slack


@pytest.mark.parametrize(("room", "share"), [(1.0, 0.75), (0.4, 0.4)])
def test_cold_neurons_are_dealt_by_speed_and_memory(room: float, share: float) -> None:
    """Of two CPU devices the first is three times as fast; its memory may hold less than that."""
    problem = random_problem(np.random.default_rng(0), 4, (64,) * 8, 0, 2)
    neurons = int(problem.group_sizes.sum())
    held = neurons * problem.neuron_bytes
    budget = np.array([int(held * room), held + int(problem.part_bytes.sum())])
    seconds = np.tile([1e-5, 3e-5], (4, 8, 1))
    problem = replace(problem, budget_bytes=budget, group_seconds=seconds)
    groups = Groups(np.tile(np.arange(512), (4, 1)), problem.group_sizes)
    divided, _pieces, found = solve_divided(problem, groups)
    check(divided, found)
    on_first = np.where(found.assignment.group_device == 0, divided.group_sizes, 0).sum()
    assert on_first == pytest.approx(share * neurons, abs=4)


def check(problem: Problem, found: Solution) -> None:
    """Budgets to the byte, and the seconds, all counted again."""
    where, parts = found.assignment.group_device, found.assignment.part_device.tolist()
    assert where.shape == problem.group_seconds.shape[:2]
    assert ((where >= 0) & (where < problem.num_devices))[problem.group_sizes > 0].all()
    used = [0] * problem.num_devices
    seconds = exchanges_of(problem, parts) * problem.exchange_s
    for layer, places in enumerate(where.tolist()):
        count, work = [0] * problem.num_devices, [0.0] * problem.num_devices
        for group, device in enumerate(places):
            count[device] += int(problem.group_sizes[layer, group])
            work[device] += problem.group_seconds[layer, group, device]
        seconds += max(work)
        used = [a + n * problem.neuron_bytes for a, n in zip(used, count, strict=True)]
    held = part_bytes_on(problem, found.assignment)
    assert (held >= 0).all()
    assert held.sum(axis=1).tolist() == problem.part_bytes.tolist()
    assert first_are_on_host(problem, parts)
    for part, device in enumerate(parts):
        seconds += problem.part_seconds[part, device if device >= 0 else problem.num_gpus]
        if device >= 0:
            assert held[part, device] == problem.part_bytes[part]
        else:
            assert not held[part, : problem.num_gpus].any()
    assert (np.array(used) + held.sum(axis=0) <= problem.budget_bytes).all()
    assert found.objective_s == pytest.approx(seconds, rel=1e-9)


def test_a_large_model() -> None:
    """80 layers of 28672 neurons on a GPU that holds a tenth of them, and two nodes."""
    layers, neurons = 80, 28672
    config = llama_config(
        hidden_size=8192,
        intermediate_size=neurons,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    rng = np.random.default_rng(0)
    skew = rng.uniform(0.3, 1.5, (layers, 1))
    frequency = np.minimum(1, 0.1 * skew * rng.pareto(1.2, (layers, neurons)) + 0.001)
    columns = [
        PlanDevice("gpu0", True, 24 << 30, 24 << 30, 800.0, 800.0, 25.0),
        PlanDevice("cpu0", False, 130 << 30, 130 << 30, 50.0, 35.0),
        PlanDevice("cpu1", False, 130 << 30, 130 << 30, 50.0, 35.0),
    ]
    factor = np.full(layers, 2.0)
    predictor = PredictorCost("sign", np.full(layers, neurons * 1024), factor)
    kv_bytes = kv_cache_bytes(config, 4096, "float16")
    parts = part_costs(config, 4096, "float16", kv_bytes, predictor)
    rates = Rates(np.ones_like(frequency), frequency)
    groups = make_groups(config, hotness(config, rates))
    problem = make_problem(config, columns, rates, groups, "sign", parts, 15.0, factor)
    divided, _pieces, found = solve_divided(problem, groups, time_limit_s=60)
    check(divided, found)
    assert found.gap < 0.01
    on_gpu = found.assignment.group_device == 0
    assert on_gpu[:, 0].mean() > on_gpu[:, -1].mean()
