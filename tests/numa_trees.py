"""Made-up sysfs trees of machines with NUMA nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

GIB = 1 << 30
# Two sockets of four nodes, eight cores with two threads each.
EIGHT = {n: f"{8 * n}-{8 * n + 7},{64 + 8 * n}-{64 + 8 * n + 7}" for n in range(8)}


def write_tree(
    root: Path,
    cpulists: Mapping[int, str],
    node_bytes: Mapping[int, int] | None = None,
    distances: Mapping[int, Sequence[int]] | None = None,
) -> Path:
    """cpulists[n] is node n's; a node has 64 GiB, all of it free, or what `node_bytes` says."""
    for node, cpulist in cpulists.items():
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True, exist_ok=True)
        kib = (node_bytes or {}).get(node, 64 * GIB) >> 10
        (folder / "cpulist").write_text(f"{cpulist}\n")
        (folder / "meminfo").write_text(
            f"Node {node} MemTotal:  {kib} kB\nNode {node} MemFree:   {kib} kB\n"
            f"Node {node} Active(file):  0 kB\nNode {node} Inactive(file):  0 kB\n"
        )
        if distances:
            (folder / "distance").write_text(" ".join(map(str, distances[node])) + "\n")
    return root
