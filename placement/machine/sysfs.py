"""Processor, NUMA nodes and huge pages, from /proc and /sys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hotcold.model.limits import memory_nodes, parse_core_list, read_text
from hotcold.model.weights.memory import read_numbers

# Those that kernels use, as spelled in /proc/cpuinfo.
RELEVANT_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
)
_NEEDED_FEATURES = ("avx2", "fma", "f16c")


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node; offline cores are in none."""

    node_id: int
    cores: tuple[int, ...]
    total_bytes: int
    free_bytes: int
    distances: tuple[int, ...] = ()  # to each online node in order, 10 is its own; () if unsaid
    file_bytes: int = 0  # file cache, which the kernel drops when memory is needed


@dataclass(frozen=True)
class Cpu:
    """The processor's name, and which of RELEVANT_FEATURES it has."""

    name: str
    features: tuple[str, ...]


UNKNOWN_CPU = Cpu("unknown", ())


def read_cpu(root: Path = Path("/")) -> Cpu:
    """Read proc/cpuinfo below `root`; UNKNOWN_CPU without one."""
    entries = _key_values(root / "proc/cpuinfo")
    flags = set(entries.get("flags", "").split())
    return Cpu(
        name=entries.get("model name", UNKNOWN_CPU.name),
        features=tuple(name for name in RELEVANT_FEATURES if name in flags),
    )


def read_numa_nodes(root: Path = Path("/")) -> tuple[NumaNode, ...]:
    """Read sys/devices/system/node below `root`, in order; () without such a folder.

    Nodes without memory (some boards) or without cores (memory expanders) are included. A node
    whose memory a cpuset forbids counts as one without memory.
    """
    allowed = memory_nodes(root)
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    nodes = [_read_node(folder) for folder in folders]
    if allowed is not None:
        nodes = [
            node
            if node.node_id in allowed
            else replace(node, total_bytes=0, free_bytes=0, file_bytes=0)
            for node in nodes
        ]
    return tuple(sorted(nodes, key=lambda node: node.node_id))


def missing_features(cpu: Cpu, architecture: str) -> tuple[str, ...]:
    """The features that compiled kernels need and an x86-64 `cpu` lacks; () elsewhere.

    Without F16C, LLVM calls a function for float16 that no library here has, and aborts the
    process. UNKNOWN_CPU is assumed to have all.
    """
    if architecture != "x86_64" or cpu == UNKNOWN_CPU:
        return ()
    return tuple(name for name in _NEEDED_FEATURES if name not in cpu.features)


def read_huge_page_setting(root: Path = Path("/"), name: str = "enabled") -> str:
    """A setting of transparent huge pages; "unknown" where the kernel has none.

    "enabled" is always, madvise or never; "defrag" is when memory is compacted for them.
    """
    text = read_text(root / "sys/kernel/mm/transparent_hugepage" / name)
    _, bracket, rest = text.partition("[")
    return rest.partition("]")[0] if bracket else "unknown"


def _read_node(folder: Path) -> NumaNode:
    memory = read_numbers(folder / "meminfo", skip=2)  # "Node 0 MemFree:  123 kB"
    return NumaNode(
        node_id=int(folder.name.removeprefix("node")),
        cores=parse_core_list(read_text(folder / "cpulist")),
        total_bytes=memory.get("MemTotal", 0) << 10,
        free_bytes=memory.get("MemFree", 0) << 10,
        distances=tuple(map(int, read_text(folder / "distance").split())),
        file_bytes=(memory.get("Active(file)", 0) + memory.get("Inactive(file)", 0)) << 10,
    )


def _key_values(path: Path) -> dict[str, str]:
    entries: dict[str, str] = {}
    for line in read_text(path).splitlines():
        key, colon, value = line.partition(":")
        if colon:
            entries.setdefault(key.strip(), value.strip())
    return entries
