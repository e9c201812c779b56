"""The GPU service's logic on a device made of NumPy, compared with transformers' own answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from actors.failures import RequestError
from tests.actors.cuda_in_process import CudaInProcess, a_third
from tests.actors.numpy_device import NumpyDevice
from tests.conftest import TinyCheckpoint
from tests.tiny_models import VARIANTS
from tests.unit.test_reference import relative_difference

Tiny = Callable[..., TinyCheckpoint]
# Tokens of each step, in turn: graphs of several sizes, steps that are filled up, and prompts.
WAYS = {"token by token": [1], "a few at once": [2, 8, 3, 5], "many": [40], "chunks": [34, 5, 1]}


@pytest.fixture(scope="module", params=VARIANTS)
def system(request: pytest.FixtureRequest, tiny: Tiny) -> Iterator[CudaInProcess]:
    with CudaInProcess(tiny(request.param).path, num_services=2, hot=a_third) as running:
        running.tiny = tiny(request.param)  # type: ignore[attr-defined]
        yield running


@pytest.mark.parametrize("way", WAYS)
def test_logits_equal_transformers(system: CudaInProcess, way: str) -> None:
    checkpoint: TinyCheckpoint = system.tiny  # type: ignore[attr-defined]
    for mode in ("dense", "exact"):
        found = system.logits(mode, checkpoint.ids, WAYS[way])
        assert relative_difference(found, checkpoint.logits) < 1e-4
