"""Compiles a system's kernels ahead of time, by services without weights, in other processes.

The compiled kernels are in the disk cache then, where the system's own processes find them.

LLVM takes several hundred megabytes to compile a service's kernels, and keeps that memory. With a
memory budget (--cpu-memory) one process therefore goes first, and runs one token, several tokens
and part of a prompt. Where all is in memory, compilers begin while Ray still starts, one for each
kind of process: services that need a kernel meanwhile wait for them.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from hotcold.actors.exchange.doorbell_exchange import ArenaExchange
from hotcold.actors.exchange.service import Service
from hotcold.actors.processes.child_process import (
    begin_process,
    end_with_parent,
    give_back_freed_memory,
)
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.failures import NotFiniteError
from hotcold.actors.protocol.messages import NO_MODEL, CacheSpec, ServiceSpec, SystemConfig
from hotcold.actors.protocol.step_sizes import MATRIX_TOKENS
from hotcold.actors.protocol.topology import Topology
from hotcold.actors.setup.shards import arena_layout, served_config, service_specs
from hotcold.actors.setup.storage import offloaded_share
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig, RopeConfig
from hotcold.model.files.artifact import ModelIdentity, sampled_digest
from hotcold.model.files.atomic_write import write_atomic
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.numba_kernels.kernel_cache import sources_digest
from hotcold.numba_kernels.one_compiler import never_collect
from hotcold.numba_kernels.own_cache import host_cpu, own_folder
from hotcold.placement.machine.core_affinity import CoreAffinity
from hotcold.placement.machine.pinning import find_cores

# A fifth and a tenth of the time beside what is not nice: a service may wait for a kernel.
_NICENESS, _LATER_NICENESS = 7, 10


def precompile_once(system: SystemConfig) -> None:
    """Compile the kernels of `system` in another process, once per machine and kind of system.

    Does nothing without a memory budget, or where the kernel cache cannot be written. If that
    process fails, the system's own processes compile.
    """
    marker = None if system.storage is None else _missing_marker(system)
    if marker is None:
        return
    with suppress(OSError):
        process = begin_process(__name__, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(system.as_json())
        if process.wait() == 0:
            write_atomic(marker, b"")


def compiler_of(system: SystemConfig) -> tuple[str, bytes] | None:
    """A module that compiles what a first token of `system` needs, and its standard input.

    None where all is there. For a start without a memory budget: services wait for what is being
    compiled.
    """
    return None if _missing_marker(system) is None else (__name__, system.as_json())


def _compile_parts(system: SystemConfig, marker: Path) -> None:
    """Compile in a child for each kind of process; `marker` is written once tokens need no more."""
    # A CPU service takes the longest: it has a core for itself where there are two.
    parts = (
        (0, _compile_cpu_service),
        (_NICENESS, _compile_attention),
        (_NICENESS, _compile_driver),
    )
    done, tell = os.pipe()

    def run(niceness: int, part: Callable[[SystemConfig], Callable[[], object]]) -> None:
        os.nice(niceness)
        never_collect()
        rest = part(system)
        os.write(tell, b"x")
        os.nice(_LATER_NICENESS)
        rest()

    children = [_begin_child(partial(run, *part)) for part in parts]
    os.close(tell)
    if sum(len(os.read(done, 1)) for _ in parts) == len(parts):
        with suppress(OSError):  # a command says that nothing can be kept (`tell_if_full`)
            write_atomic(marker, b"")
    for child in children:
        os.waitpid(child, 0)


# Each compiles what a first token needs, and returns what compiles the rest.


def _compile_cpu_service(system: SystemConfig) -> Callable[[], object]:
    service = _unattached(system, lambda topology: topology.cpu_services[0])
    service.compile()
    return service.prepare_prompts


def _compile_attention(system: SystemConfig) -> Callable[[], object]:
    service = _unattached(system, lambda topology: topology.cache_services[0])
    service.compile()
    return lambda: None


def _compile_driver(system: SystemConfig) -> Callable[[], object]:
    from hotcold.actors.driver.driver import compile_driver

    _, specs, layout = _plan(system)
    compile_extras = compile_driver(system, layout, Topology(tuple(specs)))

    def compile_rest() -> None:  # also of attention, as it is done with the driver before that is
        _unattached(system, lambda topology: topology.cache_services[0]).prepare_prompts()
        compile_extras()

    return compile_rest


def _missing_marker(system: SystemConfig) -> Path | None:
    """The file that will mark such a system's kernels as compiled.

    None where it is there, or there is no kernel cache.
    """
    cpu = host_cpu(), *(os.environ.get(f"NUMBA_CPU_{name}", "") for name in ("NAME", "FEATURES"))
    options = system.mode, system.weight_dtype, system.kv_dtype, system.has_down_norms, system.draft
    files = ModelIdentity.of(system.model_path).digest, sampled_digest(system.predictors_path)
    key = [*files, *cpu, *options]
    key += [system.down_transposed, system.storage is not None]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    try:
        marker = own_folder("numba", f"precompiled-{sources_digest()}") / digest
    except OSError:
        return None
    return None if marker.exists() else marker


class _ThreadWatch:
    """The `doorbell_exchange.Watch` of services that are threads of this process."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = services

    def check(self, services: Sequence[int], num_polls: int) -> None:
        for index in services:
            self._services[index].check([index], num_polls)

    def explain(self, service: int) -> str:
        return self._services[service].explain(service)


def _attention_service(spec: ServiceSpec, config: ModelConfig) -> Service:
    """Reads one row of each matrix; the others are zero pages, which take no memory."""
    from hotcold.actors.attention.arrays import attention_arrays
    from hotcold.actors.attention.attention_service import AttentionService
    from hotcold.model.config.weight_formats import requested_dtype
    from hotcold.model.weights.attention import read_attention
    from hotcold.model.weights.embedding import read_head
    from hotcold.model.weights.tensor_reader import TensorReader

    assert spec.cache is not None
    checkpoint = Checkpoint(spec.path, keeps_pages=False)

    def service(name: str, cache: CacheSpec) -> AttentionService:
        """With weights of the dtype `name`."""
        with TensorReader(checkpoint, dtype=requested_dtype(name), max_rows=1) as reader:
            attention, head = read_attention(reader, config), read_head(reader, config)
        arrays = attention_arrays(config, cache, attention, head, _any_frequencies)
        return AttentionService(spec.name, spec.index, spec.num_threads, arrays)

    found = service(spec.system.weight_dtype, spec.cache)
    if spec.draft is not None and spec.drafts is None:
        found.draft = service(spec.draft.system.weight_dtype, spec.cache)
    return found


def _any_frequencies(rope: RopeConfig, head_dim: int, num_positions: int) -> np.ndarray:
    """In place of the rope's own, for which torch would be imported."""
    return np.ones(rope.rotary_dim(head_dim) // 2, np.float32)


def _cpu_service(spec: ServiceSpec, config: ModelConfig) -> Service:
    """Reads one row of each matrix; with neurons on storage, as many as its largest layer has."""
    from hotcold.actors.cpu.cpu_service import CpuService, load_cpu_service
    from hotcold.actors.cpu.dense_service import load_dense_service
    from hotcold.actors.cpu.offloaded_service import load_offloaded_service

    def on_bytes(num_bytes: int) -> None: ...

    assert spec.neuron_ids is not None
    target = replace(spec, system=replace(spec.system, draft=NO_MODEL))
    if spec.storage is None:
        load: Callable[..., CpuService] = (
            load_dense_service if spec.system.down_transposed else load_cpu_service
        )
        service: Service = load(target, config, on_bytes, max_rows=1)
    else:
        share = offloaded_share(spec, served_config(spec.system, config))
        sizes, predictors = [ids.size for ids in spec.neuron_ids], spec.storage.predictors
        rates = np.ones(sum(sizes), np.float32)
        share = replace(share, num_gates=max(sizes), num_up_downs=max(sizes), rates=rates)
        ahead = Path(predictors) if predictors else None
        service = load_offloaded_service(target, config, share, ahead, on_bytes)
    if spec.draft is not None:
        few = [ids[:1] for ids in spec.neuron_ids]  # compiled code does not depend on how many
        draft, model = replace(spec.draft, neuron_ids=few), spec.system.draft_model(config)
        service.draft = load_cpu_service(draft, model, on_bytes, keeps_pages=False)
    return service


def _service(spec: ServiceSpec, config: ModelConfig) -> Service:
    return (_cpu_service if spec.is_cpu_service else _attention_service)(spec, config)


def _plan(system: SystemConfig) -> tuple[ModelConfig, list[ServiceSpec], ArenaLayout]:
    config = read_config(system.model_path)
    served = served_config(system, config)
    return config, service_specs(system, served), arena_layout(system, served)


def _unattached(system: SystemConfig, which: Callable[[Topology], int]) -> Service:
    """One of the system's services, without threads and weights."""
    config, specs, layout = _plan(system)
    service = _service(specs[which(Topology(tuple(specs)))], config)
    service.prepare_unattached(layout)
    return service


def precompile(system: SystemConfig) -> None:
    """Run what the processes of `system` will run. Errors: HotcoldError."""
    from hotcold.actors.driver.driver import Driver

    config, specs, layout = _plan(system)
    arena, services = layout.new_arena(), []
    for spec in specs:
        service = _service(spec, config)
        cores = None if spec.share is None else find_cores(spec.share, spec.num_threads)
        service.affinity = CoreAffinity(cores) if cores else None
        service.attach(layout, arena)
        service.try_out()
        services.append(service)
    exchange = ArenaExchange(layout.buffers(arena), _ThreadWatch(services))

    def prepare() -> None:
        for service in services:
            service.prepare_prompts()

    driver = Driver(system, exchange, Topology(tuple(specs)), prepare)
    engine, length = driver.engine, driver.generator.context_length

    def run() -> None:
        tokens = min(MATRIX_TOKENS, length, engine.max_tokens)
        for count in (2, tokens):  # several tokens, and a part of a prompt
            with suppress(NotFiniteError):
                driver.begin_step(0, count)
                engine.place([0] * count, range(count), [0] * count)
                engine.run_layer(0, count, 1)
                engine.logits(count, 1)

    driver.between_requests(run)
    driver.generator.compile_extras()


def _begin_child(function: Callable[[], object]) -> int:
    """Call `function` in a forked child, which ends then; returns its process id."""
    parent = os.getpid()
    if child := os.fork():
        return child
    try:
        end_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        give_back_freed_memory()
        function()
        os._exit(0)  # threads wait for requests
    finally:
        os._exit(1)


def _main() -> None:
    """Compile for the system on standard input; what fails is left to the system's own processes.

    With a memory budget for each kind of service first: that leaves less to the process that has
    all. Else in a child for each, what a first token needs and then a first long prompt.
    """
    end_with_parent()
    system = SystemConfig.from_json(sys.stdin.buffer.read())
    if system.storage is None:
        marker = _missing_marker(system)
        if marker is not None:
            _compile_parts(system, marker)
        return
    parts = _compile_attention, _compile_cpu_service, precompile  # one after the other
    sys.exit(sum(os.waitpid(_begin_child(partial(part, system)), 0)[1] != 0 for part in parts))


if __name__ == "__main__":
    _main()
