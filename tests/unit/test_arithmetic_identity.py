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


def test_what_changes_it_and_what_does_not(
    tiny: Callable[..., TinyCheckpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch, size of the cache, ways of asking, services and threads change no bit."""
    path = tiny("llama-gqa", "float32").path
    system, config = SystemConfig(str(path), num_cpu_actors=2, num_threads=2), read_config(path)
    specs = service_specs(system, config)

    def identity(system: SystemConfig, specs: list[ServiceSpec], share_tokens: int = 64) -> bytes:
        topology = Topology(tuple(specs))
        return arithmetic_identity(system, config, topology, share_tokens=share_tokens)

    found = [identity(system, specs), identity(system, specs, 512)]
    systems: list[dict[str, Any]] = [
        {"mode": "dense"}, {"kv_dtype": "float32"}, {"weight_dtype": "q8"}, {"device": "cuda"},
        {"gpu_predicts": (True, False)}, {"predictors_path": __file__},
    ]  # fmt: skip
    found += [identity(replace(system, **change), specs) for change in systems]
    services: list[dict[int, dict[str, Any]]] = [
        {1: {"model_digest": "another"}},
        {0: {"neuron_ids": [np.arange(3, dtype=np.int32)] * 2}},
    ]
    for change in services:
        changed = [replace(spec, **change.get(spec.index, {})) for spec in specs]
        found.append(identity(system, changed))
    others: dict[str, Any] = {
        "max_batch": 3,
        "kv_positions": 9000,
        "exchange": "calls",
        "prefill_chunk": 128,
    }
    assert identity(replace(system, **others), specs) == found[0]
    one = replace(system, num_cpu_actors=1, num_threads=1)
    assert identity(one, service_specs(one, config)) == found[0]
    inv_freq = arithmetic.inv_freq  # torch's differ in their last bits with its instructions
    monkeypatch.setattr(arithmetic, "inv_freq", lambda *args: np.nextafter(inv_freq(*args), 0))
    found.append(identity(system, specs))
    monkeypatch.setattr(arithmetic, "matmul_features", lambda: frozenset({"other"}))
    found.append(identity(system, specs))
    assert len(set(found)) == len(found) == 12


def test_machines_change_it_where_they_are_not_alike(tiny: Callable[..., TinyCheckpoint]) -> None:
    """Not hosts' names and number; on an unlike one, which neurons are there."""
    path = tiny("llama-gqa", "float32").path
    here = arithmetic.machine_arithmetic("/")
    old = here | {"instructions": ["of another CPU"]}

    def identity(num_actors: int, **machines: Any) -> bytes:
        hosts = ("a", *machines) if machines else ()
        system = SystemConfig(str(path), num_cpu_actors=num_actors, hosts=hosts)
        config = read_config(path)
        topology = Topology(tuple(service_specs(system, config)))
        return arithmetic_identity(system, config, topology, 64, "model", machines)

    alike = identity(1), identity(2, b=here), identity(2, c=here), identity(3, b=here, c=here)
    assert len(set(alike)) == 1
    unlike = identity(2, b=old), identity(4, b=old), identity(3, b=here, c=old)
    assert len({alike[0], *unlike}) == 4
    assert identity(2, c=old) == unlike[0]


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
