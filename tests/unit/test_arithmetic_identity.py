"""Which changes of a system change what its KV cache may be mistaken for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver import arithmetic
from hotcold.actors.driver.arithmetic import arithmetic_identity
from hotcold.actors.protocol.messages import ServiceSpec, SystemConfig
from hotcold.actors.protocol.topology import Topology
from hotcold.actors.setup.shards import service_specs
from hotcold.model.config.build import read_config
from tests.tiny_checkpoint import TinyCheckpoint

_Change = Callable[[SystemConfig, list[ServiceSpec]], tuple[SystemConfig, list[ServiceSpec]]]


def _identity(system: SystemConfig, specs: list[ServiceSpec], **more: Any) -> bytes:
    config = read_config(Path(system.model_path))
    return arithmetic_identity(
        system, config, Topology(tuple(specs)), **({"share_tokens": 64} | more)
    )


def _of_system(**values: Any) -> _Change:
    return lambda system, specs: (replace(system, **values), specs)


def _of_services(index: int, **values: Any) -> _Change:
    def change(
        system: SystemConfig, specs: list[ServiceSpec]
    ) -> tuple[SystemConfig, list[ServiceSpec]]:
        return system, [replace(s, **values) if s.index == index else s for s in specs]

    return change


@pytest.fixture(scope="module")
def system(tiny: Callable[..., TinyCheckpoint]) -> SystemConfig:
    return SystemConfig(str(tiny("llama-gqa", "float32").path), num_cpu_actors=2, num_threads=2)


@pytest.mark.parametrize(
    "change",
    [
        _of_system(mode="dense"),
        _of_system(kv_dtype="float32"),
        _of_system(weight_dtype="q8"),
        _of_system(device="cuda"),
        _of_services(1, model_digest="another"),
        _of_services(0, neuron_ids=[np.arange(3, dtype=np.int32)] * 2),
    ],
)
def test_what_changes_it(system: SystemConfig, change: _Change) -> None:
    specs = service_specs(system, read_config(Path(system.model_path)))
    assert _identity(*change(system, specs)) != _identity(system, specs)


def test_cuts_change_it(system: SystemConfig) -> None:
    specs = service_specs(system, read_config(Path(system.model_path)))
    found = {_identity(system, specs), _identity(system, specs, share_tokens=512)}
    assert len(found) == 2


def test_what_leaves_it(system: SystemConfig) -> None:
    """Batch, size of the cache, ways of asking, services and threads change no bit."""
    specs = service_specs(system, read_config(Path(system.model_path)))
    others = {"max_batch": 3, "kv_positions": 9000, "exchange": "calls", "prefill_chunk": 128}
    change = _of_system(**others)
    assert _identity(*change(system, specs)) == _identity(system, specs)
    one = replace(system, num_cpu_actors=1, num_threads=1)
    of_one = service_specs(one, read_config(Path(system.model_path)))
    assert _identity(one, of_one) == _identity(system, specs)


def test_frequencies_and_features_change_it(
    system: SystemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's frequencies differ in their last bits with its instructions."""
    specs = service_specs(system, read_config(Path(system.model_path)))
    found = [_identity(system, specs)]
    inv_freq = arithmetic.inv_freq
    monkeypatch.setattr(arithmetic, "inv_freq", lambda *args: np.nextafter(inv_freq(*args), 0))
    found.append(_identity(system, specs))
    monkeypatch.setattr(arithmetic, "matmul_features", lambda: frozenset({"other"}))
    found.append(_identity(system, specs))
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    "file",
    [
        "actors/protocol/step_sizes.py",
        "actors/attention/arrays.py",
        "model/config/rope.py",
        "numba_kernels/decode/attention.py",
        "cuda_kernels/device.py",
    ],
)
def test_a_changed_source_changes_it(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, read = arithmetic._sources.__wrapped__(), Path.read_bytes
    changed = arithmetic._ROOT / file
    assert changed.exists()
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: read(path) + b"#" * (path.samefile(changed))
    )
    assert arithmetic._sources.__wrapped__() != before
