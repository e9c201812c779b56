"""A fleet of two systems on two nodes each, which lose their second ones."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, suppress

import psutil
import pytest

pytest.importorskip("ray.serve")
from tests.cluster.head import running_head
from tests.cluster.test_fleet_batch import KINDS, fleet_of, texts_alone, until
from tests.e2e.fleet.doors import Stream

pytestmark = pytest.mark.thorough


def actors(nodes: Iterable[psutil.Process], title: str) -> dict[psutil.Process, psutil.Process]:
    """An actor whose title begins so, by its node; nodes without one are left out."""
    found = {}
    for node in nodes:
        for one in node.children(recursive=True):
            with suppress(psutil.Error):
                if " ".join(one.cmdline()).startswith(f"ray::{title}"):
                    found[node] = one
    return found


def end(node: psutil.Process) -> None:
    """Kill all processes of a node."""
    for one in [node, *node.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            one.kill()


def test_a_system_that_loses_a_node_comes_again() -> None:
    """Its streams go on, token for token as in one process; the second one has none."""
    alone, streams = texts_alone(), list[Stream]()
    with running_head(0) as head, ExitStack() as stack:
        nodes = [stack.enter_context(head.joined(1)) for _ in range(4)]
        with fleet_of(head, "--nnodes", "2", "--no-page") as door:
            relays = actors(nodes, "RelayActor")
            assert len(relays) == 2
            # Without the door: what that one held would break off.
            others = [node for node in relays if not actors([node], "Serve")]
            idle_s = {node: sum(relays[node].cpu_times()) for node in others}
            busy: list[psutil.Process] = []
            while not busy:
                streams.append(Stream(door, KINDS[-1 - len(streams) % 4] | {"ignore_eos": True}))
                assert streams[-1].has_begun.wait(120)
                used_s = {node: sum(relays[node].cpu_times()) - idle_s[node] for node in others}
                busy = [node for node, used in used_s.items() if used > 0.1]
            end(busy[0])
            assert any(one.is_alive() for one in streams)
            for number, one in enumerate(streams):
                assert one.end()[0] == alone[-1 - number % 4]
            for lost in [busy[0], *(relays.keys() - {busy[0]})]:
                end(lost)
                nodes.remove(lost)
                nodes.append(stack.enter_context(head.joined(1)))
                until(lambda: len(actors(nodes, "RelayActor")) == 2)
        for node in [*nodes, head.process]:
            end(node)
