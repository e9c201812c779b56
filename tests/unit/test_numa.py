"""Which nodes and cores services get, on made-up machines."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotcold.actors.setup.choose import NUMA_ROOT, choose_system
from hotcold.actors.setup.preflight import SystemOptions, read_model
from hotcold.actors.setup.shards import service_specs
from hotcold.model.errors import UsageError
from hotcold.placement.machine.numa import (
    NodeCores,
    nodes_with_memory,
    place_of_all,
    place_services,
    thread_counts,
)
from hotcold.placement.machine.pinning import HostShare, find_cores, find_place
from hotcold.placement.machine.sysfs import read_numa_nodes
from tests.numa_trees import EIGHT, GIB, write_tree
from tests.tiny_models import make_tiny

TWO = {0: "0-3", 1: "4-7"}


def nodes_of(root: Path, cores: range | tuple[int, ...] = range(128)) -> tuple[NodeCores, ...]:
    return nodes_with_memory(read_numa_nodes(root), tuple(cores))


def test_services_get_the_nodes_in_turn(tmp_path: Path) -> None:
    """More of them split a node's cores; few threads may use all cores of their node."""
    nodes = nodes_of(write_tree(tmp_path / "eight", EIGHT))
    places = place_services(nodes, thread_counts(nodes, 8, 128))
    assert [place.nodes for place in places] == [(n,) for n in range(8)]
    assert places[2].cores == (*range(16, 24), *range(80, 88))
    assert [len(place.thread_cores) for place in places] == [16] * 8
    assert all(len(cores) == 1 for place in places for cores in place.thread_cores)
    nodes = nodes_of(write_tree(tmp_path / "two", TWO))
    places = place_services(nodes, thread_counts(nodes, 4, 8))
    assert [place.nodes for place in places] == [(0,), (1,), (0,), (1,)]
    assert [place.cores for place in places] == [(0, 1), (4, 5), (2, 3), (6, 7)]
    assert thread_counts(nodes, 2, 3) == (2, 1)
    first, second = place_services(nodes, (2, 1))
    assert first.thread_cores == ((0, 1, 2, 3),) * 2
    assert second.thread_cores == ((4, 5, 6, 7),)


def test_cores_without_memory_go_to_the_nearest_node(tmp_path: Path) -> None:
    far = {0: [10, 20, 40], 2: [20, 10, 12], 5: [40, 12, 10]}  # by position, not by number
    root = write_tree(tmp_path, {0: "0-1", 2: "2-3", 5: "4-5"}, {5: 0}, far)
    assert nodes_of(root) == (NodeCores(0, (0, 1)), NodeCores(2, (2, 3, 4, 5)))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 9), st.integers(0, 30))
def test_threads_and_cores_add_up(sizes: list[int], num_services: int, more: int) -> None:
    """Each thread has a core at least; where threads are cores, each core has one thread."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    nodes = [
        NodeCores(i, tuple(range(end - size, end)))
        for i, (end, size) in enumerate(zip(ends, sizes, strict=True))
    ]
    num_threads = num_services + more
    threads = thread_counts(nodes, num_services, num_threads)
    assert sum(threads) == num_threads and min(threads) >= 1
    places = place_services(nodes, threads)
    for place, count in zip(places, threads, strict=True):
        assert len(place.thread_cores) == count and all(place.thread_cores)
        own = {core for node in nodes if node.node_id in place.nodes for core in node.cores}
        assert set(place.cores) <= own
    everywhere = place_of_all(places, num_threads)
    assert len(everywhere.thread_cores) == num_threads
    assert set(everywhere.nodes) == set(range(len(nodes)))


def test_a_system_follows_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny("llama-relu", tmp_path / "model")
    config = read_model(model)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    root = write_tree(tmp_path / "root", {0: "0-1", 1: "2-5", 2: "6-7", 3: ""}, {3: 2 * GIB})
    monkeypatch.setenv(NUMA_ROOT, str(root))
    system = choose_system(model, config, SystemOptions())
    assert (system.num_cpu_actors, system.num_threads) == (2, 6)
    specs = service_specs(system, config)
    assert [spec.num_threads for spec in specs] == [6, 2, 4]
    sizes = [spec.neuron_ids[0].size for spec in specs[1:] if spec.neuron_ids]
    assert sizes[0] == pytest.approx(config.ffn_size / 3, abs=config.ffn_size / 8)  # half a share
    places = [spec.share and find_place(spec.share, spec.num_threads) for spec in specs]
    assert [place and place.nodes for place in places] == [(0, 1), (0,), (1,)]
    hosts = choose_system(model, config, SystemOptions(hosts=("a", "b")))
    assert hosts.num_cpu_actors == 4
    shares = [spec.share for spec in service_specs(hosts, config)]
    assert [share and share.index for share in shares] == [None, 0, 0, 1, 1]
    assert {share and share.threads for share in shares} == {(2, 4)}
    for options, says in (
        (SystemOptions(hosts=("a", "b"), num_cpu_actors=3), "a multiple of"),
        (SystemOptions(hosts=("a", "a")), "twice"),
    ):
        with pytest.raises(UsageError, match=says):
            choose_system(model, config, options)


@pytest.mark.parametrize(
    ("nodes", "memory", "pieces"),
    [({0: "0-5"}, {}, 1), ({0: "0-1", 1: "2-5"}, {}, 2), ({0: "0-5", 1: ""}, {}, 1),
     ({0: "0-1", 1: "2-5"}, {1: 0}, 1)],
)  # fmt: skip
def test_the_machine_decides_into_how_many_pieces_experts_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: dict[int, str], memory: dict[int, int],
    pieces: int,
) -> None:  # fmt: skip
    """Where several nodes have cores and memory, whatever part of it a system uses."""
    model = make_tiny("llama-relu", tmp_path / "model")
    config = read_model(model)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setenv(NUMA_ROOT, str(write_tree(tmp_path / "root", nodes, memory)))
    for options in (
        SystemOptions(),
        SystemOptions(num_threads=1),
        SystemOptions(num_cpu_actors=3),
        SystemOptions(hosts=("a", "b")),
    ):
        assert choose_system(model, config, options).expert_pieces == pieces


def test_threads_get_physical_cores_while_there_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of two cores with two hardware threads each, all but the last one allowed."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(7)))
    both = write_tree(tmp_path / "both", {0: "0,1,4,5", 1: "2,3,6,7"})
    single = write_tree(tmp_path / "single", {0: "0-7"})
    for root, core in itertools.product((both, single), range(8)):
        topology = root / f"sys/devices/system/cpu/cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")

    def cores_of(*threads: int) -> list[tuple[int, ...]]:
        shares = [HostShare(threads, index, "auto", str(both)) for index in range(2)]
        places = [find_place(share, threads[share.index or 0]) for share in shares]
        return [place.cores for place in places if place is not None]

    assert cores_of(2, 2) == [(0, 1), (2, 3)]
    assert cores_of(4, 3) == [(0, 1, 4, 5), (2, 3, 6)]
    for threads, cores in ((4, (0, 1, 2, 3)), (7, (0, 1, 2, 3, 4, 5, 6))):
        assert find_cores(HostShare((threads,), 0, "auto", str(single)), threads) == cores
