"""How fast a model larger than memory would be, by how much memory it gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.setup.account import account, expected_gpu
from hotcold.actors.setup.gpu_share import num_cold_neurons
from hotcold.actors.setup.storage_shares import routed_layers, token_reads
from hotcold.model.bundles.direct_io import PAGE_BYTES
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.byte_sizes import binary_text, size_text
from hotcold.model.config.model_config import ModelConfig
from hotcold.placement.machine.measure_disk import measure_bursts, measure_disk
from hotcold.placement.profile import ActivationProfile
from hotcold.placement.storage import Disk, token_seconds

Stored = Callable[[int], tuple[SystemConfig, ModelConfig]]  # of so many bytes of memory
_SIZES = 5  # of memory, from what was asked for to all
_MAX_SMALL, _LARGE = 16 << 10, 64 << 10  # reads by which the disk is measured


@dataclass(frozen=True)
class OffloadPlan:
    """The expected speed with one size of memory; `most_tokens_per_s` is the disk's limit.

    Units:  bytes; milliseconds and bytes a token; tokens a second
    """

    cpu_memory_bytes: int
    reads_ahead: bool
    of_experts: bool  # which are read whole
    by_profile: bool  # what is read; else by other models
    num_gates: int
    num_up_downs: int
    num_neurons: int
    num_on_gpu: int
    read_bytes: float
    read_ms: float
    tokens_per_s: float
    most_tokens_per_s: float


def offload_plans(
    stored: Stored,
    given: int,
    profile: ActivationProfile | None,
    memory_s: float,
    num_sizes: int = _SIZES,
    head_s: float = 0.0,
) -> list[OffloadPlan]:
    """`num_sizes` plans, from `given` bytes of memory to the model's size; [] where it fits.

    `stored` makes the system of each. `memory_s` is what a token takes with everything in memory,
    `head_s` what the head takes of it. The disk is measured on the file of neurons, if it exists.
    Errors:  MemoryBudgetError naming the least that would do
    """
    system, config = stored(given)
    if system.storage is None:
        return []
    all_bytes = account(replace(system, storage=None), config, is_sure=True).total_bytes
    file = Path(system.storage.path)
    disk = measured_disk(file, config) if file.exists() else Disk()
    step, plans = (all_bytes - 1 - given) / (num_sizes - 1), []
    for size in (given + int(step * i) for i in range(num_sizes)):
        system, config = stored(size)
        storage = system.storage
        if storage is None:
            break
        share = expected_gpu(system, config)
        num_cold = num_cold_neurons(share, config)
        reads = token_reads(profile, share, config, storage)
        disk_s = disk.least_seconds(reads)
        token_s = token_seconds(memory_s, disk, reads, system.num_threads, head_s)
        plans.append(
            OffloadPlan(
                cpu_memory_bytes=size,
                reads_ahead=bool(storage.predictors),
                of_experts=config.experts is not None,
                by_profile=_knows(profile, config),
                num_gates=min(num_cold, storage.num_gates),
                num_up_downs=min(num_cold, storage.num_up_downs),
                num_neurons=config.num_neurons,
                num_on_gpu=config.num_neurons - num_cold,
                read_bytes=reads.num_bytes,
                read_ms=1e3 * disk_s,
                tokens_per_s=1 / max(token_s, 1e-9),
                most_tokens_per_s=1 / max(disk_s, 1e-9),
            )
        )
    return plans


def measured_disk(file: Path, config: ModelConfig) -> Disk:
    """By reads of a gate's size, and by larger ones; of experts by those of an expert's bundles."""
    geometry = BundleGeometry.of(config)
    if config.experts is not None:
        size = _whole_pages(geometry.bundle_bytes)
        number = geometry.blocks[routed_layers(config)[0]][0].num_bundles
        return Disk(0.0, *measure_bursts(file, size, number))
    sizes = min(_MAX_SMALL, _whole_pages(geometry.gate_bytes)), _LARGE
    small, large = zip(sizes, measure_disk(file, sizes), strict=True)
    return Disk.of_rates(small, large)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _knows(profile: ActivationProfile | None, config: ModelConfig) -> bool:
    """Whether a profile counted what is read."""
    if profile is None or profile.is_stated:
        return False
    return config.experts is None or profile.known_distances is not None


def offload_text(plans: list[OffloadPlan]) -> str:
    """A line for each size."""
    source = "by the profile and the disk"
    if not all(plan.by_profile for plan in plans):
        of_experts = "how soon this one's experts are chosen again"
        missing = of_experts if plans[0].of_experts else "how often this one's neurons fire"
        source = (
            f"by the disk and other models, as no profile says {missing} (`hotcold profile` counts)"
        )
    lines = [f"neurons stay on storage; of a token, {source}:"]
    for plan in plans:
        num_cold = plan.num_neurons - plan.num_on_gpu
        gates, up_downs = plan.num_gates / plan.num_neurons, plan.num_up_downs / plan.num_neurons
        in_memory = f"{gates:.0%} of the gates and {up_downs:.0%} of the other rows in memory"
        if plan.of_experts:
            in_memory = f"{up_downs:.0%} of the experts in memory"
        elif plan.num_gates >= num_cold:
            in_memory = f"all gates and {up_downs:.0%} of the other rows in memory"
        on_gpu = f"{plan.num_on_gpu / plan.num_neurons:.0%} on the GPU, " if plan.num_on_gpu else ""
        memory = binary_text(plan.cpu_memory_bytes).replace(" ", "")
        lines.append(
            f"  --cpu-memory {memory}: {in_memory}, {on_gpu}"
            f"{size_text(plan.read_bytes)} read in {plan.read_ms:.0f} ms: expect "
            f"{plan.tokens_per_s:.1f} tokens/s (the disk allows {plan.most_tokens_per_s:.1f})"
        )
    return "\n".join(lines)
