"""Layers that a GPU has as a whole are one request: the bits of the same layers one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver.engine import Engine
from hotcold.actors.protocol.failures import NotFiniteError
from hotcold.actors.protocol.topology import Topology
from hotcold.actors.telemetry.snapshot import NeuronWatch
from hotcold.model.config.model_config import ModelConfig
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS
from hotcold.numba_kernels.loops.mailbox import (
    ATTENTION,
    FFN,
    HEAD,
    LAYER,
    LAYERS,
    OPERATION,
    SharedBuffers,
)
from tests.actors.batching import random_predictor
from tests.actors.cuda_in_process import CudaInProcess, emulated_devices
from tests.actors.numpy_device import NumpyDevice
from tests.conftest import TinyCheckpoint
from tests.quantized_models import make_model
from tests.tiny_models import MIXTURES, ON_THE_CPU

Tiny = Callable[..., TinyCheckpoint]
SUPPORTED = [name for name in MIXTURES if name not in ON_THE_CPU]
SIZES = [1, 1, 3, 8, 2, 1, 32, 1]  # graphs are made at the second use
WHOLE_STEPS = [1, 1, 2, 8, 2, 1]  # for the emulation: copies of tokens would write to one place


def every_layer(num_layers: int, ffn_size: int) -> list[np.ndarray]:
    """Hot neurons: all."""
    return [np.arange(ffn_size, dtype=np.int32)] * num_layers


def all_but(*layers: int) -> Callable[[int, int], list[np.ndarray]]:
    """Hot neurons: all, but of these layers every second one."""

    def hot(num_layers: int, ffn_size: int) -> list[np.ndarray]:
        ids = np.arange(ffn_size, dtype=np.int32)
        return [ids[::2] if layer in layers else ids for layer in range(num_layers)]

    return hot


def asked(system: CudaInProcess) -> list[tuple[int, int]]:
    """Operations that the GPU service is asked for from now on, with their layers."""
    service, found = system.services[0], []
    answer = service.answer_in_python

    def noted() -> None:
        request = system.exchange.buffers.requests[0]
        found.append((int(request[OPERATION]), int(request[LAYER])))
        answer()

    service.answer_in_python = noted  # type: ignore[method-assign]
    return found


def counts_of(engine: Engine) -> list[Any]:
    """How many neurons, and how often which experts, so far."""
    times = engine.times
    return [times.num_neurons, times.num_ups, times.num_gates, engine.block_counts.tolist()]


def steps(engine: Engine, ids: Sequence[int], sizes: Sequence[int]) -> list[np.ndarray]:
    """Logits of all tokens, in steps of `sizes`."""
    found, first = [], 0
    for size in sizes:
        step = range(first, first + size)
        found.append(engine.step([ids[at] for at in step], step, [0] * size, size).copy())
        first += size
    return found


def watched(system: CudaInProcess) -> tuple[ModelConfig, SharedBuffers, Topology]:
    """What `NeuronWatch` needs of it."""
    return system.config, system.exchange.buffers, system.topology


def assert_same(system: CudaInProcess, tokens: np.ndarray, sizes: Sequence[int] = SIZES) -> int:
    """Logits and counts; returns how many requests for whole layers a token made."""
    ids, requests = np.resize(tokens, sum(sizes)).tolist(), asked(system)
    num_joined = list[int]()
    for mode in ("exact", "dense"):
        found, counts = [], []
        for joins in (False, True):
            engine = system.engine(mode)
            engine.joins_layers, engine.shares_layers = joins, False
            requests.clear()
            found.append(steps(engine, ids, sizes))
            num = [operation for operation, _ in requests].count(LAYERS)
            assert joins or not num
            num_joined += [num] * joins
            counts.append(counts_of(engine))
        for one_by_one, joined in zip(*found, strict=True):
            np.testing.assert_array_equal(joined, one_by_one)
        assert counts[0] == counts[1]
    assert num_joined == [num_joined[0] // len(sizes) * len(sizes)] * 2
    return num_joined[0] // len(sizes)


@pytest.mark.parametrize("variant", ["opt-postnorm", "olmo2", "glm4", "exaone4", "qwen2-moe"])
def test_the_same_bits(tiny: Tiny, variant: str) -> None:
    checkpoint = tiny(variant)
    with CudaInProcess(checkpoint.path, 2, hot=every_layer) as system:
        assert assert_same(system, checkpoint.ids) == 1


# Parallel layers with biases, a factor of the residual, normed FFN outputs.
@pytest.mark.parametrize("variant", ["falcon-bias", "minicpm", "gemma3"])
def test_the_same_bits_of_cudas_own_kernels(tiny: Tiny, variant: str) -> None:
    checkpoint = tiny(variant)
    with CudaInProcess(checkpoint.path, hot=every_layer, device=emulated_devices()()) as system:
        assert assert_same(system, checkpoint.ids, WHOLE_STEPS) == 1


def test_inputs_are_quantized_where_they_are_written(tmp_path: Path) -> None:
    """By norms and by attention, in no kernel of their own; an FFN asked for alone has one."""
    path, ids = make_model("q-llama-heads", tmp_path / "model"), np.arange(3, 30)
    options: dict[str, Any] = {"weight_dtype": "q8", "device": emulated_devices()()}
    with CudaInProcess(path, hot=every_layer, **options) as system:
        assert assert_same(system, ids, WHOLE_STEPS) == 1
        launcher, files = system.device.kernels._launcher, list[str]()
        launch = launcher.launch

        def noting(entry: Any, *arguments: Any) -> None:
            files.append(entry.file)
            launch(entry, *arguments)

        launcher.launch = noting
        engine, counts = system.engine("exact"), []
        for joins, size in ((True, 4), (False, 16)):  # no graph is of so many tokens
            engine.joins_layers = joins
            files.clear()
            steps(engine, ids.tolist(), [size])
            counts.append((files.count("gates"), files.count("quantize")))
        num_layers = system.config.num_layers
        assert counts == [(num_layers, 0), (num_layers, num_layers)]


def mixed_steps(num_slots: int) -> list[list[tuple[int, int]]]:
    """Steps as (position, slot) of each token: prompts of unequal lengths, then all of them at once
    in batches of every size up to 32; a prompt's tokens beside other sequences' in the end.
    """
    lengths = [1 + 5 * slot % 17 for slot in range(num_slots)]
    found = [[(at, slot) for at in range(lengths[slot])] for slot in range(num_slots)]
    for size in range(1, num_slots + 1):
        found.append([(lengths[slot], slot) for slot in range(size)])
        lengths[:size] = [length + 1 for length in lengths[:size]]
    ends = [(lengths[slot], slot) for slot in range(1, num_slots)][: 32 - 3]
    return [*found, [(lengths[0] + at, 0) for at in range(3)] + ends]


@pytest.mark.parametrize("variant", ["llama-gqa", "gpt-oss"])
def test_sequences_at_unequal_positions(tiny: Tiny, variant: str) -> None:
    """Joined as one by one, to the bit, at every size of a step."""
    checkpoint, found, counts = tiny(variant), [], []
    options: dict[str, Any] = {"num_slots": 32, "max_tokens": 32}
    with CudaInProcess(checkpoint.path, hot=every_layer, **options) as system:
        requests = asked(system)
        for joins in (False, True):
            engine, requests[:] = system.engine("exact"), []
            engine.joins_layers, logits = joins, []
            for step in mixed_steps(32):
                ids = [int(checkpoint.ids[(at + 3 * slot) % 40]) for at, slot in step]
                places, slots = [at for at, _ in step], [slot for _, slot in step]
                logits.append(engine.step(ids, places, slots, min(8, len(step))).copy())
            found.append(logits)
            counts.append(counts_of(engine))
            assert ((LAYERS, 0) in requests) == joins and ((ATTENTION, 0) in requests) != joins
    for one_by_one, joined in zip(*found, strict=True):
        np.testing.assert_array_equal(joined, one_by_one)
    assert counts[0] == counts[1] and counts[0][0] > 0


@pytest.mark.parametrize(("refuses_registration", "copying"), [(False, False), (True, True)])
def test_beside_layers_that_the_gpu_has_in_part(
    tiny: Tiny, refuses_registration: bool, copying: bool
) -> None:
    checkpoint, device = tiny("smollm3"), NumpyDevice(refuses_registration=refuses_registration)
    options: dict[str, Any] = {"device": device, "copying": copying, "first_layer": 1}
    with CudaInProcess(checkpoint.path, 2, hot=all_but(0, 3), **options) as system:
        requests, engine = asked(system), system.engine("exact")
        engine.shares_layers = False
        engine.step([5], [0], [0])
        parts = [(ATTENTION, 0), (FFN, 0), (LAYERS, 1), (ATTENTION, 3), (FFN, 3), (LAYERS, 4)]
        assert [each for each in requests if each[0] != HEAD] == parts
        assert assert_same(system, checkpoint.ids) == 2


def test_what_a_predictor_chooses_is_cold(tiny: Tiny) -> None:
    """It chooses among the CPU's neurons: whole layers have none, and are one request."""
    checkpoint, sizes, found = tiny("llama-relu"), [1, 1, 3, 2], []
    apart = [(ATTENTION, 0), (FFN, 0), (ATTENTION, 1), (FFN, 1), (ATTENTION, 2), (FFN, 2)]
    together = [(LAYERS, 0), (ATTENTION, 1), (FFN, 1), (LAYERS, 2)]
    with CudaInProcess(checkpoint.path, hot=all_but(1)) as system:
        requests, watch = asked(system), NeuronWatch(*watched(system))
        watch.watch(600)
        predictor = random_predictor(system, "sign")
        for joins, wanted in ((False, [*apart, (HEAD, 2)]), (True, together)):
            engine = system.engine("dense", predictor)
            engine.joins_layers = joins
            requests.clear()
            found.append((steps(engine, checkpoint.ids.tolist(), sizes), engine.times.num_gates))
            assert requests == wanted * len(sizes)
        counts, num_gates = watch.read(), found[0][1]
        watch.watch(0)
        all_cold = steps(system.engine("dense"), checkpoint.ids.tolist(), sizes)
    assert found[0][1] == found[1][1]
    for one_by_one, joined, unchosen in zip(found[0][0], found[1][0], all_cold, strict=True):
        np.testing.assert_array_equal(joined, one_by_one)
        assert (joined != unchosen).any()  # some cold neurons were left out
    # Of each step all hot neurons, and of the cold ones those that were listed.
    assert not counts.mean_gates[[0, 2]].any() and counts.mean_gates[1].sum() > 0
    cold_gates = counts.mean_gates.sum() * len(sizes)
    assert num_gates == pytest.approx(counts.num_hot.sum() * len(sizes) + cold_gates)


def test_a_request_can_be_sent_again(tiny: Tiny) -> None:
    checkpoint = tiny("llama-gqa")
    with CudaInProcess(checkpoint.path, hot=every_layer) as system:
        requests, buffers = asked(system), system.exchange.buffers
        expected = system.engine("exact").step([5, 6], [0, 1], [0, 0]).copy()
        engine, again = system.engine("exact"), 0
        original = system.services[0].answer_in_python

        def twice() -> None:
            nonlocal again
            again += buffers.requests[0, OPERATION] == LAYERS
            original()
            original()

        system.services[0].answer_in_python = twice  # type: ignore[method-assign]
        np.testing.assert_array_equal(engine.step([5, 6], [0, 1], [0, 0]), expected)
        assert again == 1 and len(requests) == 6


def begun_ahead(system: CudaInProcess) -> list[bool]:
    """Of each step from now on whether it was begun before it was asked for."""
    ahead, found = system.services[0].next_step, list[bool]()  # type: ignore[attr-defined]
    takes = ahead.takes

    def noted(*given: Any) -> bool:
        found.append(takes(*given))
        return found[-1]

    ahead.takes = noted
    return found


def answered(engine: Engine, num_tokens: int, greedily: bool, slot: int = 0) -> np.ndarray:
    """Logits of a sequence of one token after the other: the likeliest, or random ones."""
    found, random = list[np.ndarray](), np.random.default_rng(1)
    for at in range(num_tokens):
        token = int(found[-1].argmax()) if found and greedily else int(random.integers(100))
        found.append(engine.step([token], [at], [slot]).copy())
    return np.concatenate(found)


@pytest.mark.parametrize("variant", ["llama-gqa", "opt-postnorm", "qwen2-moe"])
def test_the_next_step_is_begun_before_it_is_asked_for(tiny: Tiny, variant: str) -> None:
    """By the likeliest token, but for a page's first; random tokens soon end that."""
    path, options = tiny(variant).path, {"num_slots": 2}
    with CudaInProcess(path, hot=every_layer, **options) as system:  # type: ignore[arg-type]
        engine, one_by_one = system.engine("exact"), system.engine("exact")
        one_by_one.joins_layers = False
        for greedily in (True, False):
            expected = answered(one_by_one, 70, greedily)
            ahead = begun_ahead(system)
            np.testing.assert_array_equal(answered(engine, 70, greedily, slot=1), expected)
            if greedily:
                assert ahead == [at not in (0, PAGE_POSITIONS) for at in range(70)]
            assert greedily or sum(ahead) < 5


def test_a_step_that_was_begun_in_vain(tiny: Tiny) -> None:
    """Another sequence, several tokens, another mode, a prompt, other pages, layers one by one."""
    checkpoint = tiny("llama-gqa")
    with CudaInProcess(checkpoint.path, hot=every_layer, num_slots=2) as system:
        engine, other = system.engine("exact"), system.engine("dense")
        apart = system.engine("exact")
        apart.joins_layers = False
        tables, ids = system.exchange.buffers.page_tables, checkpoint.ids.tolist()

        def swap_pages() -> None:
            tables[:, [0, 1]] = tables[:, [1, 0]]

        between: list[Callable[[], object]] = [
            lambda: engine.step([7], [0], [1]),
            lambda: engine.step([7, 8, 9], [0, 1, 2], [1] * 3),
            lambda: other.step([7], [5], [0]),
            lambda: engine.step(ids, range(40), [1] * 40),
            lambda: apart.step([7], [0], [1]),
            swap_pages,
        ]
        for act in between:
            system.services[0].next_step._waits = 0  # type: ignore[attr-defined]
            expected = answered(apart, 5, greedily=True)
            ahead = begun_ahead(system)
            np.testing.assert_array_equal(answered(engine, 5, greedily=True), expected)
            token = int(expected[-1].argmax())
            act()
            found = engine.step([token], [5], [0]).copy()
            assert ahead[:5] == [False, *[True] * 4] and not ahead[-1]
            np.testing.assert_array_equal(found, apart.step([token], [5], [0]))


@pytest.mark.parametrize("is_input", [False, True])
def test_what_is_not_finite_names_its_layer(is_input: bool, tmp_path: Path) -> None:
    """Also where the FFN's input alone is not, which no number of 8 bits says."""
    path, device = make_model("q-llama", tmp_path / "model"), emulated_devices()()
    options: dict[str, Any] = {"weight_dtype": "q8", "kv_dtype": "float16", "device": device}
    with CudaInProcess(path, hot=every_layer, **options) as system:
        engine, model = system.engine("exact"), system.services[0]._model  # type: ignore[attr-defined]
        before = engine.step([5], [0], [0]).copy()
        vectors = model.layers[1].vectors
        broken = vectors.ffn_norm_weight if is_input else vectors.norm_weight
        kept = broken.copy()
        broken[3] = np.inf
        for _ in range(3):
            with pytest.raises(NotFiniteError, match="in layer 1"):
                engine.step([5], [0], [0])
        broken[...] = kept
        requests = asked(system)
        np.testing.assert_array_equal(engine.step([5], [0], [0]), before)
        assert requests == [(LAYERS, 0)]
