"""Who fires, and on what, beside what hooks in transformers see."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hotcold.actors.cpu.cpu_service import CpuService
from hotcold.actors.driver.driver import Driver
from hotcold.actors.driver.profiling import counts_by_neuron
from hotcold.actors.exchange.service import Service
from hotcold.actors.protocol.failures import RequestError
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.setup.shards import service_specs
from hotcold.model.config.build import read_config
from tests import tiny_models
from tests.actors.batching import complete, greedy
from tests.actors.in_process import InProcessSystem
from tests.patched_models import load_model
from tests.tiny_checkpoint import Tiny
from tests.tiny_models import VOCAB_SIZE, make_tiny

POSITIONS, STEP = 64, 16
# What computes the FFN's first product, and its last, of a transformers layer.
FIRST_AND_LAST = {
    "opt": ("fc1", "fc2"),
    "falcon": ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    "nemotron": ("mlp.up_proj", "mlp.down_proj"),
    "nemotron_h": ("mixer.up_proj", "mixer.down_proj"),
}
LLAMAS = ("mlp.gate_proj", "mlp.down_proj")


def fired(services: list[Service]) -> list[np.ndarray]:
    """Each CPU service's counts."""
    return [service.fired_counts for service in services if isinstance(service, CpuService)]


@contextmanager
def profiled(path: Path, copying: bool = False) -> Iterator[tuple[Driver, Callable[[], Any]]]:
    """A driver on two services of two threads each, and what gathers their counts."""
    settings: dict[str, Any] = {"num_positions": POSITIONS, "max_tokens": STEP, "copying": copying}
    with InProcessSystem(path, num_services=2, num_threads=2, **settings) as system:
        config = SystemConfig(
            str(path), num_cpu_actors=2, num_threads=4, context_length=POSITIONS, kv_dtype="float32"
        )
        specs = service_specs(config, system.config)[1:]
        driver = Driver(config, system.exchange, system.topology)
        yield (
            driver,
            lambda: counts_by_neuron(system.config, specs, fired(system.services[1:])),
        )
        driver.close()


def reference(path: Path, windows: list[list[int]]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Counts (L, N), and the FFN inputs (L, T, d) of each window, by transformers."""
    model = load_model(path, torch.float32)
    config = read_config(path)
    layers = next(
        part for name, part in model.named_modules() if name.split(".")[-1] in ("layers", "h")
    )
    first, last = FIRST_AND_LAST.get(config.family, LLAMAS)
    with_ffn = [layer for layer in layers if first in dict(layer.named_modules())]
    numbers = [number for number, size in enumerate(config.ffn_sizes) if size]
    opening = [] if config.bos_token_id is None else [config.bos_token_id]
    counts = np.zeros((config.num_layers, config.ffn_size), np.int64)
    inputs = []
    for ids in windows:
        found = np.zeros((config.num_layers, len(ids), config.hidden_size), np.float32)

        def fire(layer: int, out: torch.Tensor) -> None:
            rows = out.reshape(-1, config.ffn_size)[len(opening) :]
            counts[layer] += (rows != 0).sum(0).numpy()

        def enter(layer: int, x: torch.Tensor, into: np.ndarray = found) -> None:
            into[layer] = x.reshape(-1, config.hidden_size)[len(opening) :].numpy()

        hooks = []
        for i, layer in zip(numbers, with_ffn, strict=True):
            hooks.append(
                layer.get_submodule(last).register_forward_pre_hook(
                    lambda _m, x, i=i: fire(i, x[0])
                )
            )
            hooks.append(layer.get_submodule(first).register_forward_hook(
                lambda _m, x, _out, i=i: enter(i, x[0])))  # fmt: skip
        with torch.no_grad():
            model(torch.tensor([opening + ids]))
        for hook in hooks:
            hook.remove()
        inputs.append(found)
    return counts, inputs


DEEP = tiny_models.Variant(tiny_models._llama, num_hidden_layers=12)  # more than ten layers


@pytest.mark.parametrize(
    ("variant", "copying", "has_bos"),
    [
        ("opt-postnorm", False, True),
        ("falcon-relu", False, True),
        ("bamboo", True, True),
        ("nemotron", False, True),
        ("nemotron-h", False, True),
        ("deep", False, False),
    ],
)
def test_counts_and_inputs_are_those_of_transformers(
    variant: str, copying: bool, has_bos: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny_models.VARIANTS, "deep", DEEP)
    path = make_tiny(variant, tmp_path)
    if not has_bos:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"bos_token_id": None}))
    assert (read_config(path).bos_token_id is not None) == has_bos
    random = np.random.default_rng(3)
    windows = [random.integers(0, VOCAB_SIZE, size).tolist() for size in (40, 63, 1)]
    recorded = [[0, 5, 15, 16, 17, 39], list(range(63)), []]
    counts, inputs = reference(path, windows)
    with_ffn = np.array(read_config(path).ffn_sizes) > 0
    with profiled(path, copying) as (driver, fired_counts):
        for ids, chosen, expected in zip(windows, recorded, inputs, strict=True):
            found = driver.profile_window(ids, chosen)
            assert found.dtype == np.uint16 and found.shape == expected[:, chosen].shape
            found, expected = found[with_ffn], expected[with_ffn]
            np.testing.assert_allclose(
                found.view(np.float16).astype(np.float32), expected[:, chosen], rtol=2e-3, atol=1e-3
            )
        assert fired_counts().dtype == np.int64
        np.testing.assert_array_equal(fired_counts(), counts)
    assert 0 < counts.mean() < 104  # some fire, some do not


def test_requests_and_profiling_leave_each_other_alone(
    tiny: Tiny,
) -> None:
    checkpoint = tiny("llama-relu")
    request = greedy(checkpoint.ids[:10], 20)
    with profiled(checkpoint.path) as (driver, fired_counts):
        assert fired_counts().sum() == 0
        driver.profile_window([3, 4, 5], [])
        before = fired_counts()
        assert complete(driver, request).ids == checkpoint.greedy_ids[:20]
        np.testing.assert_array_equal(fired_counts(), before)
        driver.profile_window([3, 4, 5], [])
        np.testing.assert_array_equal(fired_counts(), 2 * before)


def test_windows_that_do_not_fit_and_overflow_are_refused(tmp_path: Path) -> None:
    path = make_tiny("llama-relu", tmp_path)
    with (
        profiled(path) as (driver, _),
        pytest.raises(RequestError, match="window of 65 tokens does not fit in a context of 64"),
    ):
        driver.profile_window([1] * POSITIONS, [])
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 1e38
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with (
        profiled(path) as (driver, _),
        pytest.raises(RequestError, match="not finite"),
    ):
        driver.profile_window([1, 2, 3], [])
