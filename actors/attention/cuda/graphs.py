"""Graphs of a device's kernels, made as they are needed and kept, the last used ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from hotcold.actors.attention.cuda.device import Device

# A graph of ten kernels takes some tens of KiB of the device's memory.
MAX_GRAPHS = 1024
GRAPH_BYTES = 64 << 10


class GraphCache:
    """Runs work by a graph of its own, from the second time on.

    The first time its kernels are launched one by one: they may have to be compiled, which cannot
    be done while a graph is made.
    """

    def __init__(self, device: Device, most_graphs: int = MAX_GRAPHS) -> None:
        """Keep `most_graphs`; the one that was used longest ago makes room for another."""
        self._device = device
        self._most = most_graphs
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()  # None: run once

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Put `work` on the stream; the same key is always the same launches."""
        if key not in self._graphs:
            with self._device.stream():
                work()
            self._keep(key, None)
            return
        if self._graphs[key] is None:
            self._graphs[key] = self._device.capture(work)
        self._graphs.move_to_end(key)
        self._device.launch(self._graphs[key])

    def _keep(self, key: Hashable, graph: Any) -> None:
        self._graphs[key] = graph
        if len(self._graphs) > self._most:
            self._graphs.popitem(last=False)

    def clear(self) -> None:
        """Forget all: the arrays that they work on are given up."""
        self._graphs.clear()
