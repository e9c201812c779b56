"""What Linux says of the processor and its NUMA nodes, read from /proc and /sys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# What kernels here can make use of, as /proc/cpuinfo spells it.
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
    """One NUMA node: its logical cores, its memory in bytes, how far other nodes' memories are.

    Offline cores are in no node.
    """

    node_id: int
    cores: tuple[int, ...]
    total_bytes: int
    free_bytes: int
    distances: tuple[int, ...] = ()  # to each online node in order, 10 is its own; () if unsaid
    file_bytes: int = 0  # of files, which the kernel gives up for whoever needs memory


@dataclass(frozen=True)
class Cpu:
    """The processor's name, and which of RELEVANT_FEATURES it has."""

    name: str
    features: tuple[str, ...]


UNKNOWN_CPU = Cpu("unknown", ())


def read_cpu(root: Path = Path("/")) -> Cpu:
    """Read proc/cpuinfo below `root`; a processor that says nothing is "unknown"."""
    entries = _key_values(root / "proc/cpuinfo")
    flags = set(entries.get("flags", "").split())
    return Cpu(
        name=entries.get("model name", UNKNOWN_CPU.name),
        features=tuple(name for name in RELEVANT_FEATURES if name in flags),
    )


def read_numa_nodes(root: Path = Path("/")) -> tuple[NumaNode, ...]:
    """Read sys/devices/system/node below `root`, in order; empty where there is no such folder.

    Nodes without memory (as on some boards) and without cores (memory expanders) are kept.
    """
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    nodes = [_read_node(folder) for folder in folders]
    return tuple(sorted(nodes, key=lambda node: node.node_id))


def missing_features(cpu: Cpu, architecture: str) -> tuple[str, ...]:
    """What compiled kernels cannot do without, of x86-64 CPUs, and `cpu` lacks; () elsewhere.

    LLVM widens float16 with F16C; without it, kernels need a function that no library here has,
    and LLVM ends the process. A CPU of which nothing is known is taken to have all.
    """
    if architecture != "x86_64" or cpu == UNKNOWN_CPU:
        return ()
    return tuple(name for name in _NEEDED_FEATURES if name not in cpu.features)


def read_huge_page_setting(root: Path = Path("/"), name: str = "enabled") -> str:
    """Return the setting `name` of transparent huge pages; "unknown" where the kernel says none.

    "enabled" is always, madvise or never; "defrag" says when memory is made free for them.
    """
    text = _read(root / "sys/kernel/mm/transparent_hugepage" / name)
    _, bracket, rest = text.partition("[")
    return rest.partition("]")[0] if bracket else "unknown"


def read_cpu_quota(root: Path = Path("/")) -> float | None:
    """Return how many CPUs' time the container's cgroup may use; None without a limit.

    cgroup v2 has "quota period" in cpu.max, v1 a file for each; microseconds.
    """
    folder = root / "sys/fs/cgroup"
    words = _read(folder / "cpu.max").split()
    if not words:
        words = [_read(folder / f"cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
        return None  # "max", -1, or no such file
    return int(words[0]) / int(words[1])


def parse_core_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list as Linux writes it: "0-3,8" is 0, 1, 2, 3, 8."""
    cores: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def _read_node(folder: Path) -> NumaNode:
    memory = {}
    for line in _read(folder / "meminfo").splitlines():  # "Node 0 MemFree:  123 kB"
        words = line.split()
        if len(words) >= 4:
            memory[words[2].rstrip(":")] = int(words[3]) * 1024
    return NumaNode(
        node_id=int(folder.name.removeprefix("node")),
        cores=parse_core_list(_read(folder / "cpulist")),
        total_bytes=memory.get("MemTotal", 0),
        free_bytes=memory.get("MemFree", 0),
        distances=tuple(map(int, _read(folder / "distance").split())),
        file_bytes=memory.get("Active(file)", 0) + memory.get("Inactive(file)", 0),
    )


def _key_values(path: Path) -> dict[str, str]:
    entries: dict[str, str] = {}
    for line in _read(path).splitlines():
        key, colon, value = line.partition(":")
        if colon:
            entries.setdefault(key.strip(), value.strip())
    return entries


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
