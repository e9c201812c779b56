"""Expected reads from storage for a token, given which rows are kept in memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.config.model_config import ModelConfig

_RUN_BYTES = 256 << 10  # of one read of neighbours
LISTED = 2.0  # neurons that a predictor lists for each that fires
# Of a core: a read, and of its bytes the checksum and the copy into a slot.
_READ_CPU_S, _BYTE_CPU_S = 4e-6, 1 / 4e9
# Of a token's experts so many were not chosen by one of the n tokens before: _NEW / n ** _FADES.
# That is 45% chosen again at the next token, and 80% within eight, as measured of Qwen3-30B-A3B.
_NEW, _FADES = 0.55, 0.49
_SUMMED = 1024  # tokens; the sum over more is taken as an integral
_HIDDEN = 0.7  # share of the shorter of a token's compute and reads of neurons that overlap
_READ_A_MISS = 1.1  # experts read for each that is missed: some are read ahead in vain


@dataclass(frozen=True)
class Reads:
    """Reads for one token: their number, and bytes.

    hidden: the share of the shorter of compute and reads that overlap; 0 of whole experts: what is
    read beside compute is as much as reading slows that
    """

    number: float
    num_bytes: float
    hidden: float = _HIDDEN


@dataclass(frozen=True)
class Disk:
    """A disk under many parallel reads: seconds a read plus bytes over bandwidth.

    most_bytes_per_s: in the long run, where short bursts are read faster, as a volume in a cloud or
    a cgroup with a limit lets them
    Defaults are those of a virtual disk whose host caches reads (docs/decisions.md).
    """

    read_s: float = 20e-6
    bytes_per_s: float = 1.5e9
    most_bytes_per_s: float = inf

    @classmethod
    def of_rates(cls, small: tuple[int, float], large: tuple[int, float]) -> Disk:
        """From bytes a second at two sizes of reads, (bytes, rate) each, the smaller first."""
        seconds = [size / rate for size, rate in (small, large)]
        more = max(seconds[1] - seconds[0], 1e-9)
        bytes_per_s = (large[0] - small[0]) / more
        return cls(max(0.0, seconds[0] - small[0] / bytes_per_s), bytes_per_s)

    def seconds(self, reads: Reads) -> float:
        """The time of a token's reads alone, in bursts."""
        return reads.number * self.read_s + reads.num_bytes / self.bytes_per_s

    def least_seconds(self, reads: Reads) -> float:
        """What a token takes at least, in the long run."""
        return max(self.seconds(reads), reads.num_bytes / self.most_bytes_per_s)


def token_seconds(
    memory_s: float, disk: Disk, reads: Reads, num_threads: int, head_s: float = 0.0
) -> float:
    """The time of a token with neurons on storage.

    waits = reads - reads.hidden * min(memory - head, reads)
    token = memory + waits + what reading takes of the computing threads' cores
    `memory_s` is a token's time with everything in memory, of which the head takes `head_s`: beside
    that nothing is read, as no layer follows of which it is known what it needs. While threads
    wait beside reads that overlap, their cores are free for checksums and copies of what comes, no
    more of it than comes then; the rest is time that they would have computed. Of whole experts
    they wait for these, too. No token takes less than the disk's long run.
    Source:  docs/decisions.md, Storage
    """
    disk_s = disk.seconds(reads)
    cpu_s = (reads.number * _READ_CPU_S + reads.num_bytes * _BYTE_CPU_S) / num_threads
    waits_s, free_s = disk_s, 0.0
    if reads.hidden:
        waits_s -= reads.hidden * min(max(0.0, memory_s - head_s), disk_s)
        free_s = min(waits_s, cpu_s * waits_s / max(disk_s, 1e-12))
    return max(memory_s + waits_s + cpu_s - free_s, disk.least_seconds(reads))


def missed_experts(num_slots: float, num_experts: int, num_chosen: int) -> float:
    """How many of a token's `num_chosen` experts of a layer are not among those used last.

    `num_slots` of a layer's `num_experts` are kept. After n tokens a layer has used
    num_chosen * (1 + sum over t <= n of new(t)) of them, where new(t) is the share of choices that
    the t tokens before did not make; with as many slots, new(n) is missed.
    Source:  P. J. Denning, "The Working Set Model for Program Behavior", 1968
    """
    if num_slots >= num_experts:
        return 0.0
    new = np.append(1.0, _NEW / np.arange(1.0, _SUMMED + 1) ** _FADES)
    used, kept = np.cumsum(new), num_slots / num_chosen
    if kept <= used[-1]:
        return num_chosen * float(new[np.searchsorted(used, kept)])
    power = _SUMMED ** (1 - _FADES) + (kept - float(used[-1])) * (1 - _FADES) / _NEW
    return num_chosen * _NEW * power ** (-_FADES / (1 - _FADES))


def expert_reads(share: float, num_layers: int, num_chosen: int, of_expert: Reads) -> Reads:
    """The reads for a token that misses this share of `num_chosen` experts of each layer."""
    num_read = num_layers * num_chosen * share * _READ_A_MISS
    return Reads(num_read * of_expert.number, num_read * of_expert.num_bytes, hidden=0.0)


def least_in_memory(config: ModelConfig) -> int:
    """Neurons of a mixture that need rows in memory, where experts are read whole.

    All of dense layers and shared experts, which every token uses, and the experts of a layer: the
    tokens of one step may choose all of them.
    """
    stay = most = 0
    for layer in config.layers:
        sizes, router = layer.ffn.block_sizes, layer.ffn.router
        num_experts = 0 if router is None else router.num_experts
        stay += sum(sizes[num_experts:])
        most = max(most, sum(sizes[:num_experts]))
    return stay + most


def expected_reads(
    wanted: np.ndarray, num_slots: int, read_bytes: int, in_sequence: bool = False
) -> Reads:
    """The reads for a token if the most wanted neurons are in slots.

    `wanted` (neurons of all layers,) is the rate at which each is needed, from 0 to 1. With
    `in_sequence` neighbours are read together.
    """
    missed = float(np.sort(wanted, axis=None)[: max(0, wanted.size - num_slots)].sum())
    num_bytes = missed * read_bytes
    return Reads(num_bytes / _RUN_BYTES if in_sequence else missed, num_bytes)


@dataclass(frozen=True)
class Resident:
    """How many gate rows, and up and down rows, of a bundle file are kept in memory."""

    geometry: BundleGeometry
    num_gates: int
    num_up_downs: int


def gates_first(fired: np.ndarray, resident: Resident) -> Reads:
    """The reads for a token: gates of listed neurons, up and down rows of those that fire.

    A predictor lists LISTED neurons for each that fires.
    """
    wanted = listed_rates(fired, LISTED * float(fired.mean()))
    geometry = resident.geometry
    gates = expected_reads(wanted, resident.num_gates, geometry.gate_bytes)
    up_downs = expected_reads(fired, resident.num_up_downs, geometry.up_down_bytes)
    return Reads(gates.number + up_downs.number, gates.num_bytes + up_downs.num_bytes)


def whole_bundles(fired: np.ndarray, resident: Resident) -> Reads:
    """The reads for a token if a listed neuron is read whole, unless its gate is in memory."""
    wanted = listed_rates(fired, LISTED * float(fired.mean()))
    geometry = resident.geometry
    gates = expected_reads(wanted, resident.num_gates, geometry.gate_bytes)
    up_downs = expected_reads(fired, resident.num_up_downs, geometry.up_down_bytes)
    both = max(resident.num_gates, resident.num_up_downs)
    with_gates = expected_reads(wanted, both, geometry.up_down_bytes)
    alone = expected_reads(fired, both, geometry.up_down_bytes)
    number = gates.number + up_downs.number - alone.number
    num_bytes = gates.num_bytes + with_gates.num_bytes + up_downs.num_bytes - alone.num_bytes
    return Reads(number, num_bytes)


def listed_rates(fired: np.ndarray, listed: float) -> np.ndarray:
    """The rate at which a predictor lists each neuron: all that fire, others evenly to `listed`."""
    share = max(0.0, listed - float(fired.mean())) / max(1e-9, 1 - float(fired.mean()))
    return fired + (1 - fired) * share
