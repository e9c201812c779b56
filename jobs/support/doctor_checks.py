"""The checks of `hotcold doctor`, each with a Finding."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hotcold.actors.protocol.ray_memory import object_store_bytes
from hotcold.actors.setup.account import Account
from hotcold.actors.setup.modes import has_thresholds, own_thresholds, promise
from hotcold.model.byte_sizes import size_text
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError
from hotcold.placement.machine.description import Machine
from hotcold.placement.machine.memory_pages import ServiceMemory, probe_huge_pages
from hotcold.placement.machine.pinning import may_bind_memory
from hotcold.placement.machine.survey import MachineSurvey
from hotcold.placement.machine.sysfs import Cpu, missing_features

if TYPE_CHECKING:
    from hotcold.numba_kernels.ir.tile_ir import Tiles

Level = Literal["ok", "note", "problem"]
_SLOW_EXCHANGE_US = 300.0  # several times what waking a core costs
# Of a service's memory, what may be on any node: Python and libraries, which are loaded before the
# process is bound, and pages that two threads share.
_FAR_BYTES, _FAR_SHARE = 512 << 20, 0.02
_SLOW_NODE = 0.6  # of the fastest node's rate per core
_ALLOW_HUGE_PAGES = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
_COMPACT_MEMORY = "echo 1 > /proc/sys/vm/compact_memory"
_NICENESS_VARIABLE = "RAY_worker_niceness"


@dataclass(frozen=True)
class Finding:
    """The result of one check. A problem's text says what to do."""

    level: Level
    subject: str
    text: str


def check_machine(machine: MachineSurvey) -> Iterator[Finding]:
    """Yield the findings that need no model."""
    yield _versions()
    processor = _processor(machine)
    yield processor
    if processor.level != "problem":
        yield Finding("ok", "kernels", kernel_paths())
    yield _gpus(machine)
    yield from _limits(machine)
    yield _nodes(machine)
    yield _huge_pages(machine)
    yield _shared_memory(machine)
    yield _niceness()


def check_thresholds(path: Path, config: ModelConfig) -> Iterator[Finding]:
    """Yield whether --mode threshold can be used, for models that it is for."""
    if not has_thresholds(config):
        return
    subject = "--mode threshold"
    try:
        found = own_thresholds(path, config)
    except ArtifactError as problem:
        yield Finding("problem", subject, str(problem))
        return
    if found is None:
        yield Finding("note", subject, "needs thresholds; make them with `hotcold profile`")
    else:
        yield Finding("ok", subject, promise(found, config))


def check_measured(measured: Machine) -> list[Finding]:
    """Unusual measured figures, or that there are none."""
    found = {}
    rates = {node.name: node.read_gb_per_s / node.num_cores for node in measured.nodes}
    slow = [name for name, rate in rates.items() if rate < _SLOW_NODE * max(rates.values())]
    if slow:
        found["memory read"] = (
            f"{', '.join(slow)}: a core reads less than on other nodes; memory channels empty?"
        )
    if measured.exchange_us > _SLOW_EXCHANGE_US:
        found["exchange"] = (
            f"{measured.exchange_us:.0f} µs are many; if other programs ran then, measure again "
            "with --fresh"
        )
    if measured.was_busy:
        found["busy"] = (
            f"other programs took {measured.busy_cores:.1f} cores while this was measured; with "
            "nothing else running measure again with --fresh"
        )
    assumed = [gpu.name for gpu in measured.gpus if not gpu.measured]
    if assumed:
        names = ", ".join(assumed)
        found["GPU memory"] = f"{names} could not be measured; plans assume slow memory"
    if not found:
        return [Finding("ok", "memory read", f"{measured.read_gb_per_s:.1f} GB/s by all nodes")]
    return [Finding("note", subject, text) for subject, text in found.items()]


def check_model(machine: MachineSurvey, need: Account) -> Finding:
    """Say whether the model's parts fit in the memory that is available."""
    spare_bytes = machine.available_bytes - need.total_bytes
    if spare_bytes >= 0:
        return Finding("ok", "model", f"fits, {size_text(spare_bytes)} to spare")
    text = f"{size_text(-spare_bytes)} too large: free memory, or give a smaller --context"
    if need.total_bytes - need.kv_cache_bytes > machine.available_bytes:
        text = f"{size_text(-spare_bytes)} too large: free memory, or take a smaller model"
    return Finding("problem", "model", text)


def _versions() -> Finding:
    found, missing = [f"Python {platform.python_version()}"], []
    for package in ("ray", "torch", "numba"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        text = f"{', '.join(missing)} not installed: pip install -e ."
        return Finding("problem", "software", text)
    return Finding("ok", "software", ", ".join(found))


def _processor(machine: MachineSurvey) -> Finding:
    cpu = Cpu(machine.cpu_name, machine.cpu_features)
    if missing := missing_features(cpu, platform.machine()):
        text = f"no {', '.join(missing)}: kernels cannot run; take a CPU with AVX2, FMA and F16C"
        return Finding("problem", "processor", text)
    kernels = kernel_instructions()
    level: Level = "note" if kernels.startswith("AVX2") else "ok"  # half as wide as AVX-512
    return Finding(level, "processor", f"kernels use {kernels}")


def kernel_instructions() -> str:
    """Which instructions kernels are compiled to, as far as their code differs."""
    from hotcold.numba_kernels.ir.target import has_feature, has_vnni

    if has_feature("avx512f"):
        return "AVX-512 with VNNI" if has_vnni() else "AVX-512"
    if has_vnni():
        return "AVX2 with AVX-VNNI"
    return "AVX2" if has_feature("avx2") else f"plain vectors ({platform.machine()})"


def kernel_paths() -> str:
    """Which variants of kernels this CPU uses."""
    from hotcold.numba_kernels.ir.target import has_feature, has_vnni
    from hotcold.numba_kernels.ir.tile_ir import (
        FLOAT_TILES,
        QUANTIZED_TILES,
        UNPACKED_TILES,
        UNPACKS,
    )

    def tiles(shape: Tiles) -> str:
        return f"tiles of {shape.num_rows} rows x {shape.num_tokens} tokens"

    integers = "AVX2's byte products" if has_feature("avx2") else "plain products"
    integers = "VNNI" if has_vnni() else integers
    counts = "a vector popcount" if has_feature("avx512vpopcntdq") else "byte tables"
    pairs = "int16" if has_feature("avx512vnni") else ""
    pairs = "bfloat16" if has_feature("avx512bf16") else pairs
    pairs += ", in tiles of AMX" if has_feature("amx-bf16") else ""
    prompts = f"pairs of {pairs}" if pairs else "float32"
    slow = f"those slow to unpack {tiles(UNPACKED_TILES)}"
    slow = "unpacked once for four tokens or more" if UNPACKS else slow
    return (
        f"several tokens: floats in {tiles(FLOAT_TILES)}, quantized rows {tiles(QUANTIZED_TILES)}, "
        f"{slow}; "
        f"integers by {integers}; predictors' bits by {counts}; prompts by {prompts}"
    )


def _gpus(machine: MachineSurvey) -> Finding:
    if not machine.gpus:
        text = f"{machine.no_gpu_reason}; the CPU computes every neuron"
        level: Level = "note" if "no NVIDIA driver" in text else "problem"
        return Finding(level, "GPU", text)
    names = ", ".join(gpu.name for gpu in machine.gpus)
    others = "; the first is used, the others are not" if len(machine.gpus) > 1 else ""
    return Finding("ok", "GPU", f"{names}: attention, the head and hot neurons go there{others}")


def _limits(machine: MachineSurvey) -> Iterator[Finding]:
    """Yield limits on this process's cores and memory, and their effect."""
    allowed, num_threads = machine.num_allowed, len(machine.cores)
    threads = f"{num_threads} thread{'s' * (num_threads > 1)}"
    if allowed < machine.num_online:
        text = f"{allowed} of {machine.num_online} logical cores are allowed: {threads}"
        yield Finding("ok", "CPU set", text)
    if machine.cpu_quota is not None:
        text = f"{machine.cpu_quota:g} CPUs: {threads}, not pinned to a core"
        yield Finding("ok", "CPU quota", text)
    elif num_threads < allowed:
        text = f"{num_threads} on {allowed} logical cores: one a physical core, fast ones first"
        yield Finding("ok", "threads", text)
    if machine.memory_limit is not None:
        limit, free = size_text(machine.memory_limit), size_text(machine.available_bytes)
        text = f"{limit} by a control group: {free} can be taken now"
        yield Finding("ok", "memory limit", text)


def _nodes(machine: MachineSurvey) -> Finding:
    used = machine.usable_nodes
    if len(used) < 2:
        return Finding("ok", "NUMA", "one node")
    empty = [str(node.node_id) for node in used if not node.total_bytes]
    if empty:
        text = f"nodes {', '.join(empty)} have cores but no memory: their reads cross nodes"
        return Finding("problem", "NUMA", text)
    text = f"{len(used)} nodes, as many CPU services, each on its node's cores and memory"
    if not may_bind_memory():
        text = (
            f"{len(used)} nodes; the kernel refuses memory policies (a container?): memory lies "
            "where pinned threads first write it"
        )
        return Finding("note", "NUMA", text)
    return Finding("ok", "NUMA", text)


def check_services(
    services: Sequence[ServiceMemory], systems: Mapping[int, str]
) -> Iterator[Finding]:
    """Yield, for each running service, where its memory lies and whether its threads are there.

    systems: the names of running systems by the processes that hold them
    """
    for service in services:
        parts = [f"{size >> 20} MiB on node {node}" for node, size in service.node_bytes.items()]
        whose = systems.get(service.owner) or f"process {service.owner or 'unknown'}"
        text = f"of {whose}: {', '.join(parts) or 'no memory yet'}; runs on " + (
            f"node{'s' * (len(service.nodes) > 1)} {', '.join(map(str, service.nodes))}"
        )
        subject = f"service {service.pid}"
        if service.far_bytes > max(_FAR_BYTES, _FAR_SHARE * service.num_bytes):
            yield Finding("problem", subject, f"{text}: free memory there and start again")
        else:
            yield Finding("ok", subject, f"{text}: {service.local_share:.1%} local")


def _huge_pages(machine: MachineSurvey) -> Finding:
    """The kernel's setting, and what it comes to."""
    setting = f"enabled is {machine.huge_pages}, defrag {machine.huge_page_defrag}"
    if machine.huge_pages == "never":
        text = f"{setting}: weights get none and are read slower; as root, {_ALLOW_HUGE_PAGES}"
        return Finding("note", "huge pages", text)
    probe = probe_huge_pages()
    if probe is None:
        text = f"{setting}; whether weights get them could not be tried"
        return Finding("note", "huge pages", text)
    text = f"{setting}; {probe.huge_bytes >> 20} of {probe.num_bytes >> 20} MiB in huge pages"
    if probe.huge_bytes == probe.num_bytes:
        return Finding("ok", "huge pages", text)
    if machine.huge_pages == "unknown":
        return Finding("note", "huge pages", f"{text}: this kernel has none")
    refused = "the rest" if probe.huge_bytes else "them"
    text = f"{text}: the system refuses {refused}; free memory, or as root, {_COMPACT_MEMORY}"
    return Finding("note", "huge pages", text)


def _shared_memory(machine: MachineSurvey) -> Finding:
    free, needed = machine.shared_memory_free_bytes, object_store_bytes()
    text = f"{size_text(free)} free in /dev/shm, {size_text(needed)} needed"
    if free < needed:
        return Finding("problem", "shared memory", f"{text}: in a container give --shm-size=1g")
    return Finding("ok", "shared memory", text)


def _niceness() -> Finding:
    own, workers = os.nice(0), os.environ.get(_NICENESS_VARIABLE)
    if own > 0:
        text = f"this shell runs at niceness {own}, and so will everything started from it"
        return Finding("problem", "niceness", text)
    if workers not in (None, "0"):
        text = f"{_NICENESS_VARIABLE}={workers} slows Ray's workers: set it to 0"
        return Finding("problem", "niceness", text)
    if workers is None:
        text = f"set {_NICENESS_VARIABLE}=0 before a `ray start` of your own; Ray's default is 15"
        return Finding("note", "niceness", text)
    return Finding("ok", "niceness", f"{_NICENESS_VARIABLE}=0")
