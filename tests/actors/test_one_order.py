"""A token's bits depend neither on how many CPU services there are, nor on their threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.attention import attention_service
from hotcold.actors.protocol.failures import NotFiniteError
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.preflight import prepare_system
from hotcold.actors.setup.shards import can_keep_transposed, service_specs
from hotcold.numba_kernels.decode.activations import Thresholds
from hotcold.numba_kernels.ffn import in_memory, prompt_plan
from hotcold.numba_kernels.ir.target import has_feature
from hotcold.numba_kernels.loops.work_stealing import new_block_counters
from hotcold.numba_kernels.prefill import serve_prefill
from tests.actors.cuda_in_process import a_third
from tests.actors.in_process import InProcessSystem
from tests.actors.test_gguf_mixtures import quantized
from tests.actors.test_in_process import as_on_a_cpu_with
from tests.mxfp4_models import make_mxfp4
from tests.quantized_models import make_model
from tests.reference import relative_difference
from tests.tiny_checkpoint import Tiny
from tests.unit.test_down_outputs import MIXED
from tests.unit.test_gguf_model import file_of
from tests.unit.test_gguf_model import tiny as tiny_gguf

SHAPES = [(1, 3), (3, 2), (4, 1)]  # services, threads of each
SOME = Thresholds(np.float32(0.02), np.float32(0.001))
IDS = np.random.default_rng(5).integers(3, 60, 17)
LONG = np.random.default_rng(6).integers(3, 60, 120)  # in one step, and in uneven ones


@pytest.fixture(autouse=True)
def nobody_counts_beyond(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Counters that threads take work by end where they should: behind them is others' memory."""
    behind: list[np.ndarray] = []

    def new(num_kinds: int, num_threads: int) -> np.ndarray:
        whole = new_block_counters(num_kinds + 4, num_threads)
        behind.append(whole[num_kinds:])
        return whole[:num_kinds]

    for module in (attention_service, in_memory, prompt_plan, serve_prefill):
        monkeypatch.setattr(module, "new_block_counters", new)
    yield
    assert behind
    assert not any(part.any() for part in behind)


def all_logits(system: InProcessSystem, modes: tuple[str, ...]) -> Iterator[np.ndarray]:
    """Of some modes and of thresholds, token by token, several at once, and prompts."""
    some = [SOME] * system.config.num_layers
    for ids, sizes in ((IDS, [1]), (IDS, [7, 3]), (IDS, [17]), (LONG, [120]), (LONG, [33, 50, 37])):
        for mode in modes:
            thresholds = some if mode == "threshold" else None
            yield system.logits(mode, ids, sizes, thresholds=thresholds)


def check_shapes(
    start: Callable[[int, int], InProcessSystem], modes: tuple[str, ...]
) -> list[np.ndarray]:
    """The logits, which must have the same bits on all SHAPES, of a prompt in any chunks."""
    expected: list[np.ndarray] = []
    for shape in [(1, 1), *SHAPES]:
        with start(*shape) as system:
            found = list(all_logits(system, modes))
        expected = expected or found
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    num_modes = len(modes)
    for one, other in zip(expected[-num_modes:], expected[-2 * num_modes :], strict=False):
        np.testing.assert_array_equal(one, other)
    return expected


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama-relu", ""), ("q-llama", "q4"), ("opt-postnorm", ""), ("qwen3-moe", "")],
)
def test_logits_are_the_same_whoever_computes_them(
    tiny: Tiny, tmp_path: Path, name: str, dtype: str
) -> None:
    path = make_model(name, tmp_path / "model") if dtype else tiny(name).path

    def start(services: int, threads: int) -> InProcessSystem:
        return InProcessSystem(
            path, services, threads, weight_dtype=dtype, has_down_norms=True, max_tokens=120,
            num_positions=128,
        )  # fmt: skip

    expected = check_shapes(start, ("dense", "exact", "threshold"))
    for at_once in (expected[3:6], expected[6:9]):
        for one, other in zip(expected[:3], at_once, strict=True):
            np.testing.assert_array_equal(one, other)


WITH_BF16 = pytest.mark.skipif(not has_feature("avx512bf16"), reason="a CPU with AVX512-BF16")


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize(
    ("cpu", "dtype"),
    [
        ("this", "float16"), ("this", "bfloat16"),
        pytest.param("avx512bf16", "float16", marks=WITH_BF16),
    ],
)  # fmt: skip
def test_prompts_of_two_bytes_a_weight(
    tmp_path: Path, cpu: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few of the neurons firing, with many, and with both among a prompt's tokens.

    On this CPU; as without AMX.
    """
    if cpu != "this":
        as_on_a_cpu_with(monkeypatch, cpu)
    path = make_model("q-llama-wide", tmp_path / "model", dtype=dtype)

    def start(services: int, threads: int) -> InProcessSystem:
        return InProcessSystem(path, services, threads, max_tokens=120, num_positions=128)

    check_shapes(start, ("dense", "exact"))


def file_in_blocks(kind: str, folder: Path) -> Path:
    """A model whose down rows are an output each."""
    if kind == "mxfp4":
        return make_mxfp4(folder)
    if kind != "dense":
        return quantized(kind, folder)
    path = folder / "tiny.gguf"
    file_of(tiny_gguf(), path, MIXED)
    return path


@pytest.mark.sweep(kind=["dense", "Q4_0"])
@pytest.mark.parametrize(
    ("kind", "pieces"),
    [("dense", 1), ("Q4_0", 2), ("Q4_K_M", 1), ("shared", 1), ("mxfp4", 2)],
)
def test_rows_of_outputs(tmp_path: Path, kind: str, pieces: int) -> None:
    """Of dense models and of mixtures, whose formats differ from layer to layer or within one."""
    path = file_in_blocks(kind, tmp_path)
    one, config = prepare_system(path, SystemOptions(context_length=128))
    one = replace(one, has_down_norms=True, expert_pieces=pieces)
    assert one.down_transposed

    def start(services: int, threads: int) -> InProcessSystem:
        system = replace(one, num_cpu_actors=services, num_threads=services * threads)
        assert can_keep_transposed(system, config)
        specs = service_specs(system, config)
        return InProcessSystem(path, specs=specs, max_tokens=120, num_positions=128)

    check_shapes(start, ("dense", "threshold"))


@pytest.mark.parametrize("variant", ["llama-relu", "opt-postnorm", "falcon-bias"])
def test_hot_neurons_without_a_gpu(tiny: Tiny, variant: str) -> None:
    """Those of the attention service are added up by stripes, too."""
    checkpoint = tiny(variant)

    def start(services: int, threads: int) -> InProcessSystem:
        return InProcessSystem(
            checkpoint.path, services, threads, hot=a_third, max_tokens=120, num_positions=128
        )

    found, *_ = check_shapes(start, ("dense", "exact"))
    assert relative_difference(found, checkpoint.logits_of(IDS)) < 1e-4


def test_biases_are_added_by_a_service_without_neurons(tiny: Tiny) -> None:
    """With twice as many services as stripes the first, which has the biases, has no stripes."""
    path, ids = tiny("opt-postnorm").path, np.arange(3, 9)
    found = []
    for services in (1, 16):
        with InProcessSystem(path, services, 1) as system:
            assert services == 1 or not any(part.size for part in system.layer_shards()[0])
            found.append(system.logits("exact", ids, [1, 5]))
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("bad", range(4))
def test_the_service_whose_numbers_are_bad_is_named(tiny: Tiny, bad: int) -> None:
    """Also after sums of services were added to each other: three share eight stripes unevenly."""
    with InProcessSystem(tiny("llama-relu").path, 3, 1, hot=None if bad else a_third) as system:
        service: Any = system.services[bad]
        (service if bad else service._hot).arrays.down[:] = np.nan
        with pytest.raises(NotFiniteError, match="in layer 0") as caught:
            system.logits("dense", np.arange(3, 5), [2])
        assert caught.value.service == bad
