"""Cold neurons brought to a GPU for a long prompt, round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver.engine import Engine
from hotcold.numba_kernels.serve.mailbox import FFN, OPERATION, SEND
from tests.actors.cuda_in_process import CudaInProcess, a_third
from tests.actors.numpy_device import NumpyDevice
from tests.conftest import TinyCheckpoint
from tests.quantized_models import make_model
from tests.unit.test_reference import relative_difference

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


@pytest.mark.parametrize(
    ("variant", "hot", "refuses"),
    [
        ("llama-mlp-bias", None, False),
        ("opt-postnorm", a_third, True),
        ("falcon-bias", a_third, False),
    ],
)
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


def test_quantized_neurons(tmp_path: Path) -> None:
    path, ids = make_model("q-llama", tmp_path / "model"), np.arange(40)
    options: dict[str, Any] = {"bundle_bytes": PLACE_BYTES, "weight_dtype": "q4_1"}
    with CudaInProcess(path, 2, 1, hot=a_third, **options) as system:
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
