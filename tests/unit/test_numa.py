"""Which nodes and cores services get, on made-up machines."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.setup.choose import NUMA_ROOT, choose_system
from hotcold.actors.setup.preflight import SystemOptions, read_model
from hotcold.actors.setup.shards import service_specs
from hotcold.model.errors import UsageError
from hotcold.placement.machine.numa import (
    NodeCores,
    node_groups,
    nodes_with_memory,
    place_of_all,
    place_services,
    thread_counts,
)
from hotcold.placement.machine.pinning import HostShare, find_cores, find_place, not_pinned_because
from hotcold.placement.machine.sysfs import read_numa_nodes
from hotcold.placement.solver.plan_devices import make_plan_devices
from tests.numa_trees import GIB, cores_as_nodes, write_tree
from tests.placement_cases import make_machine
from tests.tiny_models import make_tiny

# Two sockets of four nodes, eight cores with two threads each.
EIGHT = {n: f"{8 * n}-{8 * n + 7},{64 + 8 * n}-{64 + 8 * n + 7}" for n in range(8)}
TWO = {0: "0-3", 1: "4-7"}


def nodes_of(root: Path, cores: range | tuple[int, ...] = range(128)) -> tuple[NodeCores, ...]:
    return nodes_with_memory(read_numa_nodes(root), tuple(cores))


def test_one_service_a_node(tmp_path: Path) -> None:
    nodes = nodes_of(write_tree(tmp_path, EIGHT))
    places = place_services(nodes, thread_counts(nodes, 8, 128))
    assert [place.nodes for place in places] == [(n,) for n in range(8)]
    assert places[2].cores == (*range(16, 24), *range(80, 88))
    assert [len(place.thread_cores) for place in places] == [16] * 8
    assert all(len(cores) == 1 for place in places for cores in place.thread_cores)


def test_fewer_services_take_neighbouring_nodes(tmp_path: Path) -> None:
    nodes = nodes_of(write_tree(tmp_path, EIGHT))
    places = place_services(nodes, thread_counts(nodes, 3, 128))
    assert [place.nodes for place in places] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    assert [len(place.cores) for place in places] == [32, 48, 48]
    assert [len(place.thread_cores) for place in places] == [32, 48, 48]  # by cores, not equal


def test_more_services_split_a_nodes_cores(tmp_path: Path) -> None:
    nodes = nodes_of(write_tree(tmp_path, TWO))
    places = place_services(nodes, thread_counts(nodes, 4, 8))
    assert [place.nodes for place in places] == [(0,), (1,), (0,), (1,)]
    assert [place.cores for place in places] == [(0, 1), (4, 5), (2, 3), (6, 7)]


def test_few_threads_may_use_all_cores_of_their_node(tmp_path: Path) -> None:
    nodes = nodes_of(write_tree(tmp_path, TWO))
    assert thread_counts(nodes, 2, 3) == (2, 1)
    first, second = place_services(nodes, (2, 1))
    assert first.thread_cores == ((0, 1, 2, 3),) * 2
    assert second.thread_cores == ((4, 5, 6, 7),)


def test_a_mask_and_offline_cores_leave_cores_out(tmp_path: Path) -> None:
    nodes = nodes_of(write_tree(tmp_path, {0: "0,2-3", 1: "4-7", 2: "8-9"}), (0, 2, 4, 5, 6, 7))
    assert nodes == (NodeCores(0, (0, 2)), NodeCores(1, (4, 5, 6, 7)))
    assert thread_counts(nodes, 2, 6) == (2, 4)  # as many as cores on both


def test_cores_without_memory_go_to_the_nearest_node(tmp_path: Path) -> None:
    far = {0: [10, 20, 40], 2: [20, 10, 12], 5: [40, 12, 10]}  # by position, not by number
    root = write_tree(tmp_path, {0: "0-1", 2: "2-3", 5: "4-5"}, {5: 0}, far)
    assert nodes_of(root) == (NodeCores(0, (0, 1)), NodeCores(2, (2, 3, 4, 5)))


def test_memory_without_cores_has_no_service(tmp_path: Path) -> None:
    assert nodes_of(write_tree(tmp_path, {0: "0-1", 1: ""})) == (NodeCores(0, (0, 1)),)


def test_no_tree_is_no_nodes(tmp_path: Path) -> None:
    assert nodes_of(tmp_path) == ()
    assert thread_counts((), 3, 7) == (3, 2, 2)
    with pytest.raises(ValueError, match="no nodes"):
        place_services((), (1,))


@given(st.integers(1, 9), st.integers(1, 12))
def test_every_node_has_a_service(num_nodes: int, num_services: int) -> None:
    groups = node_groups(num_nodes, num_services)
    assert len(groups) == num_services
    assert {node for group in groups for node in group} == set(range(num_nodes))
    sizes = [len(group) for group in groups]
    assert max(sizes) - min(sizes) <= 1


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


def test_the_gpu_service_shares_cores_thread_by_thread(tmp_path: Path) -> None:
    root = write_tree(tmp_path, TWO)
    nodes = nodes_of(root)
    places = place_services(nodes, thread_counts(nodes, 4, 8))
    assert place_of_all(places, 8).thread_cores == tuple((core,) for core in range(8))
    assert place_of_all(places, 3).thread_cores == (tuple(range(8)),) * 3


def test_when_nothing_is_pinned(tmp_path: Path) -> None:
    two, one = (NodeCores(0, (0,)), NodeCores(1, (1,))), (NodeCores(0, (0, 1)),)
    assert not_pinned_because("auto", two, None) == ""
    assert "quota" in not_pinned_because("auto", two, 2.0)
    assert "one NUMA node" in not_pinned_because("auto", one, None)
    assert not_pinned_because("on", one, 1.0) == ""
    assert not_pinned_because("on", (), None)
    assert not_pinned_because("off", two, None)
    assert find_place(HostShare((1,), 0, "on", str(tmp_path)), 1) is None


def test_the_planner_uses_all_nodes() -> None:
    machine = make_machine((), (4000, 8000, 16000))
    one, two = (make_plan_devices(machine, num_cpu_actors=count) for count in (1, 2))
    assert one[0].free_bytes == 28000
    assert one[0].rows_gb_per_s == sum(node.rows_gb_per_s for node in machine.nodes)
    assert [column.free_bytes for column in two] == [4000, 24000]
    assert two[1].gather_gb_per_s == sum(node.gather_gb_per_s for node in machine.nodes[1:])


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


def test_one_node_is_assigned_as_before(tmp_path: Path) -> None:
    config = read_model(make_tiny("llama-relu", tmp_path / "model"))
    root = cores_as_nodes(tmp_path / "root", 1)
    system = SystemConfig(str(tmp_path / "model"), num_cpu_actors=3, num_threads=7)
    here = [spec.num_threads for spec in service_specs(system, config)]
    there = SystemConfig(**{**vars(system), "numa_root": str(root)})
    assert here == [spec.num_threads for spec in service_specs(there, config)] == [7, 3, 2, 2]


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
