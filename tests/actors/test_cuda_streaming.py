"""Cold neurons brought to a GPU for a long prompt, round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver.engine import Engine
from hotcold.actors.protocol.neuron_bundles import BundleLayout, bundle_bytes
from hotcold.actors.setup.gpu_share import UNMEASURED_TOKENS, upload_tokens
from hotcold.numba_kernels.formats import Q4, Q4_1, Q8
from hotcold.numba_kernels.serve.mailbox import FFN, OPERATION, SEND, STREAM
from tests.actors.cuda_in_process import CudaInProcess, a_third
from tests.actors.numpy_device import NumpyDevice
from tests.actors.test_placement_choice import MACHINE, WITH_GPU
from tests.conftest import TinyCheckpoint
from tests.quantized_models import make_model
from tests.unit.test_reference import relative_difference

pytestmark = pytest.mark.sweep(weight_dtype=["q4"])

Tiny = Callable[..., TinyCheckpoint]
PLACE_BYTES = 4096  # half a dozen neurons


def streaming(system: CudaInProcess) -> tuple[Engine, list[tuple[int, ...]]]:
    """An engine that brings neurons for all prompts, and a record of what it asks of services."""
    system.request_by_python()
    engine = system.engine("exact")
    asked: list[tuple[int, ...]] = []
    engine.neuron_upload_tokens = 1
    ask = system.exchange.request

    def recorded(services: Sequence[int]) -> int:
        asked.append(tuple(system.exchange.buffers.requests[list(services), OPERATION].tolist()))
        return ask(services)

    system.exchange.request = recorded  # type: ignore[method-assign]
    return engine, asked


def prefill(engine: Engine, ids: np.ndarray) -> np.ndarray:
    """Logits (T, V) of a prompt in one step."""
    return engine.step(ids.tolist(), range(ids.size), [0] * ids.size, ids.size).copy()


@pytest.mark.parametrize("hot", [None, a_third], ids=["all cold", "a third hot"])
@pytest.mark.parametrize("variant", ["llama-mlp-bias", "opt-postnorm", "falcon-bias"])
@pytest.mark.parametrize("refuses", [False, True], ids=["registered", "staged"])
def test_logits_equal_transformers(
    tiny: Tiny, variant: str, hot: Callable | None, refuses: bool
) -> None:
    checkpoint, device = tiny(variant), NumpyDevice(refuses_registration=refuses)
    options: dict[str, Any] = {"hot": hot, "bundle_bytes": PLACE_BYTES, "device": device}
    with CudaInProcess(checkpoint.path, 3, 2, **options) as system:
        engine, asked = streaming(system)
        found = prefill(engine, checkpoint.ids)
        assert relative_difference(found, checkpoint.logits) < 1e-4
        num_rounds = len([each for each in asked if SEND in each]) / system.config.num_layers
        assert num_rounds > 2 and not any(FFN in each for each in asked)
        engine.step(checkpoint.ids[:5].tolist(), range(5), [0] * 5)
        assert any(FFN in each for each in asked)  # few tokens stay with the CPU


@pytest.mark.parametrize("weight_dtype", ["q8", "q4_1", "q4"])
def test_quantized_neurons(weight_dtype: str, tmp_path: Path) -> None:
    path, ids = make_model("q-llama", tmp_path / "model"), np.arange(40)
    options: dict[str, Any] = {
        "hot": a_third,
        "bundle_bytes": PLACE_BYTES,
        "weight_dtype": weight_dtype,
    }
    with CudaInProcess(path, 2, 1, **options) as system:
        plain = prefill(system.engine("exact"), ids)
        found = prefill(streaming(system)[0], ids)
        assert relative_difference(found, plain) < 0.1


def test_a_round_asked_again_is_added_once(tiny: Tiny) -> None:
    """As after a CPU service that was replaced: all services are asked the same once more."""
    checkpoint = tiny("llama-relu")
    with CudaInProcess(checkpoint.path, 2, hot=a_third, bundle_bytes=PLACE_BYTES) as system:
        engine, _ = streaming(system)
        ask = system.exchange.request

        def twice(services: Sequence[int]) -> int:
            ask(services)
            return ask(services)

        system.exchange.request = twice  # type: ignore[method-assign]
        found = prefill(engine, checkpoint.ids)
        system.exchange.request = ask  # type: ignore[method-assign]
        assert relative_difference(found, checkpoint.logits) < 1e-4


def test_copies_run_ahead_of_products(tiny: Tiny) -> None:
    """A round's answer waits for its copies alone, and each byte is copied once."""
    checkpoint = tiny("llama-relu")
    with CudaInProcess(checkpoint.path, 1, bundle_bytes=PLACE_BYTES) as system:
        engine, asked = streaming(system)
        prefill(engine, checkpoint.ids)
        config, log = system.config, system.device.log
        ahead = [int(entry.split()[1]) for entry in log if entry.startswith("ahead")]
        neurons = 3 * config.ffn_size * config.hidden_size * 4
        assert neurons < sum(ahead) / config.num_layers < 1.5 * neurons
        assert len(ahead) == len([each for each in asked if SEND in each])
        assert [each for each in asked if STREAM in each][:2] == [(STREAM, SEND)] * 2


@pytest.mark.parametrize(
    "dtype", [np.dtype(np.float32), np.dtype(np.uint16), Q8, Q4, Q4_1], ids=str
)
@pytest.mark.parametrize(("has_up", "has_bias"), [(True, False), (False, True), (True, True)])
def test_the_places_of_a_bundle(dtype: np.dtype, has_up: bool, has_bias: bool) -> None:
    """Parts lie apart, on good addresses, within the place; what is written is read."""
    rows = np.zeros((0, 136 if dtype in (Q8, Q4) else 160 if dtype == Q4_1 else 128), dtype)
    size = bundle_bytes(3)
    bundle = BundleLayout.of(rows, rows, rows, has_bias, size, has_up)
    place = np.zeros(size, np.uint8)
    count = bundle.num_rows
    parts = [bundle.rows(place, index, count) for index in range(5)]
    assert [part is not None for part in parts] == [
        True,
        has_up,
        True,
        has_bias,
        has_bias and has_up,
    ]
    spans = sorted(
        (part.ctypes.data - place.ctypes.data, part.nbytes) for part in parts if part is not None
    )
    assert all(first % 256 == 0 for first, _ in spans) and spans[0][0] >= 8
    ends = [first + length for first, length in spans]
    assert all(end <= start for end, (start, _) in zip(ends, spans[1:], strict=False))
    assert ends[-1] == bundle.end(count) <= size
    assert sum(length for _, length in spans) > 0.99 * size
    assert bundle.rounds(2 * count + 1) == 3 and bundle.rounds(0) == 0
    assert [bundle.span(2 * count + 1, k) for k in (0, 2, 3)] == [
        (0, count),
        (2 * count, 2 * count + 1),
        (2 * count + 1, 2 * count + 1),
    ]


def test_when_it_pays() -> None:
    """16 tokens a read, two nodes of 38 GB/s, a link of 25."""
    assert upload_tokens(WITH_GPU) == 49
    assert upload_tokens(MACHINE) == upload_tokens(None) == UNMEASURED_TOKENS
