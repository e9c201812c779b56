"""The error of a model that is too large, and what it says would fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hotcold.actors.setup.choose import choose_system
from hotcold.actors.setup.memory_needs import system_need
from hotcold.actors.setup.preflight import SystemOptions, prepare_system, read_model
from hotcold.model.errors import MemoryBudgetError
from hotcold.model.weights.quantized_checkpoint import write_quantized
from tests.quantized_models import make_model
from tests.tiny_models import make_tiny


def total_bytes(path: Path, dtype: str | None) -> int:
    """What `generate` with that --dtype takes, counted for it alone."""
    config = read_model(path, dtype)
    options = SystemOptions(weight_dtype=dtype)
    return system_need(choose_system(path, config, options), config).total_bytes


def advice(path: Path, limit: int, dtype: str | None = None) -> str:
    """What the error says to use under --cpu-memory `limit`."""
    with pytest.raises(MemoryBudgetError) as caught:
        prepare_system(path, SystemOptions(cpu_memory_bytes=limit, weight_dtype=dtype))
    text = str(caught.value)
    assert "\n" not in text
    return text[text.index("; use ") + len("; use ") :]


@pytest.mark.parametrize("name", ["q-llama-tied", "q-opt-postnorm", "q-falcon-grouped"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_dtype_that_fits(name: str, dtype: str, tmp_path: Path) -> None:
    path = make_model(name, tmp_path, dtype=dtype)
    names = "q8", "q4_1", "q4", "mxfp4"
    stored, q8, q4_1, q4, mxfp4 = (total_bytes(path, dtype) for dtype in (None, *names))
    assert mxfp4 < q4 < q4_1 < q8 < stored
    prepare_system(path, SystemOptions(cpu_memory_bytes=stored))
    first = "f16" if dtype == "float32" else "q8"
    limits = stored - 1, q8, q8 - 1, q4_1 - 1, q4 - 1
    for limit, found in zip(limits, (first, *names), strict=True):
        assert re.match(rf"--dtype {found}, with which it needs \d+\.\d MiB$", advice(path, limit))
        prepare_system(path, SystemOptions(cpu_memory_bytes=limit, weight_dtype=found))
    assert advice(path, mxfp4 - 1) == "a smaller model or a smaller --context"
    if dtype == "float16":
        assert advice(path, q8 - 1, "q8").startswith("--dtype q4_1")
    assert advice(path, mxfp4 - 1, "q4") == "a smaller model or a smaller --context"


def test_models_that_cannot_be_quantized(tmp_path: Path) -> None:
    path = make_tiny("llama-relu", tmp_path / "rows-of-48", dtype="float16")
    assert advice(path, total_bytes(path, None) - 1).startswith("a smaller model")
    original = make_model("q-llama", tmp_path / "original")
    write_quantized(original, tmp_path / "q8", "q8")
    for dtype in (None, "q8"):
        limit = total_bytes(tmp_path / "q8", dtype) - 1
        assert advice(tmp_path / "q8", limit, dtype).startswith("a smaller model")
        assert advice(original, limit, "q8").startswith("--dtype q4")
