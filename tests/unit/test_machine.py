"""The description of a machine: written, read, refused; measured, kept, shown by doctor."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotcold.cuda_kernels.device import Gpu
from hotcold.cuda_kernels.timing import measure_gpu_bandwidth
from hotcold.jobs.support.doctor_checks import check_measured
from hotcold.model.errors import UsageError
from hotcold.placement.machine import description
from hotcold.placement.machine.description import (
    CpuNode,
    GpuDevice,
    Machine,
    read_machine,
    write_machine,
)
from hotcold.placement.machine.measure import ASSUMED_GPU_READ_GB_PER_S, BusyWatch
from hotcold.placement.machine.measure_exchange import measure_exchange_us
from hotcold.placement.machine.measure_node import NodeRates, measure_node
from hotcold.placement.machine.survey import usable_cores
from hotcold.placement.machine.this_machine import cache_path, measured_before, this_machine
from tests.e2e.commands import run_main
from tests.numa_trees import write_tree
from tests.unit.test_survey import NODE_BYTES, write, write_big_machine

NODE = CpuNode("node0", 8, 1000, 500, 50.0, 45.0, 30.0)
GPU = GpuDevice("gpu0", "NVIDIA H100", 800, 700, 2500.0, 50.0, True)
MACHINE = Machine("EPYC", (NODE, replace(NODE, name="node1")), (GPU,), 12.5, "2026-11-21")


def test_a_machine_is_its_processor_cores_nodes_and_cards() -> None:
    assert MACHINE.identity == "EPYC, node0 of 8 cores, node1 of 8 cores, gpu0 NVIDIA H100"
    other = CpuNode("node0", 8, 2000, 1500, 60.0, 40.0, 35.0)  # more memory, measured anew
    later = replace(
        MACHINE, date="", busy_cores=1.0, exchange_us=13.0, nodes=(other, MACHINE.nodes[1]),
        gpus=(replace(GPU, read_gb_per_s=2000.0, total_bytes=790, free_bytes=600),),
    )  # fmt: skip
    assert later.identity == MACHINE.identity
    for changed in (
        replace(MACHINE, name="Xeon"),
        replace(MACHINE, gpus=()),
        replace(MACHINE, gpus=(replace(GPU, model="NVIDIA H200"),)),
        replace(MACHINE, nodes=MACHINE.nodes[:1]),
        replace(MACHINE, nodes=(replace(NODE, num_cores=9), MACHINE.nodes[1])),
    ):
        assert changed.identity != MACHINE.identity


def test_the_documented_example_is_a_description() -> None:
    text = description.__doc__ or ""
    values = json.loads(text[text.index("{") : text.rindex("}") + 1])
    machine = Machine.from_json(values, "example")
    assert machine.nodes[0].total_bytes == 200_000_000_000
    assert not machine.gpus[0].measured


def changed(change: Callable[[Any], Any]) -> dict[str, Any]:
    values = json.loads(json.dumps(MACHINE.as_json()))
    change(values)
    return values


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda v: v.pop("date"), "date is missing"),
        (lambda v: v["nodes"][1].pop("rows_gb_per_s"), "nodes[1]: rows_gb_per_s is missing"),
        (lambda v: v.update(speed=1), "'speed' is unknown"),
        (lambda v: v["nodes"][0].update({"a\nb": 1}), "'a\\nb' is unknown"),
        (lambda v: v.update(nodes={}), "nodes is {}"),
        (lambda v: v.update(name=""), "name is ''"),
        (lambda v: v.update(exchange_us=0), "exchange_us is 0"),
        (lambda v: v.update(exchange_us=10**400), "exchange_us is 1000"),
        (lambda v: v["nodes"][0].update(read_gb_per_s=float("nan")), "read_gb_per_s is nan"),
        (lambda v: v["gpus"][0].update(link_gb_per_s="50"), "link_gb_per_s is '50'"),
        (lambda v: v["nodes"][0].update(num_cores=0), "num_cores is 0"),
        (lambda v: v["nodes"][0].update(num_cores=1.5), "num_cores is 1.5"),
        (lambda v: v["nodes"][1].update(name="node0"), "nodes[1]: name 'node0' is taken"),
    ],
)
def test_refusals_name_the_key(change: Callable[[Any], Any], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        Machine.from_json(changed(change), "m.json")
    assert str(caught.value).startswith("m.json")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"{", b"\xff", b"[" * 100_000, b'{"name": 1, "name": 2}', b" " * 2**21]
)
def test_files_that_hold_no_description(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_machine(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_machine(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot be written"):
        write_machine(tmp_path, MACHINE)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Stand-ins for all measuring; the list receives the cores of each node that is measured."""
    nodes: list[tuple[int, ...]] = []

    def node(cores: tuple[int, ...], free_bytes: int, cache_bytes: int) -> NodeRates:
        nodes.append(cores)
        return NodeRates(10.0 * len(cores), 9.0 * len(cores), 5.123456 * len(cores))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("hotcold.placement.machine.measure.measure_node", node)
    monkeypatch.setattr(
        "hotcold.placement.machine.measure.measure_exchange_us", lambda cores: 20.0 + len(cores)
    )
    monkeypatch.setattr(BusyWatch, "busy_cores", lambda self: 0.0)
    monkeypatch.setattr("hotcold.placement.machine.survey.list_gpus", lambda: ((), "none"))
    return nodes


@pytest.fixture
def big_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(128)))
    monkeypatch.setattr(
        "hotcold.placement.machine.survey.available_bytes", lambda: 100 * NODE_BYTES
    )
    return write_big_machine(tmp_path)


def test_a_machine_of_eight_nodes(measured: list[tuple[int, ...]], big_root: Path) -> None:
    stages: list[str] = []
    machine = this_machine(on_stage=stages.append, root=big_root)
    # Node 7 has no memory.
    assert [node.name for node in machine.nodes] == [f"node{i}" for i in range(7)]
    assert measured == [
        (*range(8 * i, 8 * i + 8), *range(64 + 8 * i, 72 + 8 * i)) for i in range(7)
    ]
    assert machine.name == "EPYC 9654: 96 cores"
    assert machine.nodes[3] == CpuNode("node3", 16, NODE_BYTES, NODE_BYTES, 160.0, 144.0, 81.98)
    assert machine.exchange_us == 27.0
    assert machine.read_gb_per_s == 7 * 160
    assert len(stages) == 8
    assert Machine.from_json(machine.as_json(), "m") == machine


def test_a_measurement_is_kept_while_the_machine_is_the_same(
    measured: list[tuple[int, ...]], big_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while its memory grows; other cores or another processor are another machine."""
    assert measured_before(big_root) is None
    first = this_machine(root=big_root)
    assert len(measured) == 7
    write_tree(big_root, {1: "8-15,72-79"}, {1: 2 * NODE_BYTES})
    second = this_machine(root=big_root)
    assert len(measured) == 7
    assert second.identity == first.identity
    sizes = [node.total_bytes for node in first.nodes]
    sizes[1] *= 2
    assert [node.total_bytes for node in second.nodes] == sizes
    assert measured_before(big_root) == second
    this_machine(fresh=True, root=big_root)
    assert len(measured) == 14
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(128)) - {5})
    assert measured_before(big_root) is None
    this_machine(root=big_root)
    assert len(measured) == 21
    cpuinfo = big_root / "proc/cpuinfo"
    cpuinfo.write_text(cpuinfo.read_text().replace("9654", "9754"))
    assert measured_before(big_root) is None


def test_a_measurement_beside_others_is_made_once_and_again_where_asked(
    measured: list[tuple[int, ...]], big_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed, found = 0.0, []
    monkeypatch.setattr(
        "hotcold.placement.machine.measure.measure_node",
        lambda cores, *_: NodeRates(speed, speed, speed),
    )
    for now, busy, fresh in (
        (3.0, 9.0, False), (4.0, 0.0, False), (2.0, 9.0, True), (3.0, 9.0, False),
        (5.0, 9.0, True), (8.0, 0.0, True), (1.0, 9.0, True),
    ):  # fmt: skip
        speed = now
        monkeypatch.setattr(BusyWatch, "busy_cores", lambda self, busy=busy: busy)
        found.append(this_machine(root=big_root, fresh=fresh).nodes[0].read_gb_per_s)
    assert found == [3.0, 3.0, 2.0, 3.0, 5.0, 8.0, 1.0]
    kept = measured_before(big_root)
    assert kept is not None and kept.nodes[0].read_gb_per_s == 8.0
    assert this_machine(root=big_root) == kept


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[" * 100_000,
        lambda text: text.replace('"version": 3', '"version": 2'),
        lambda text: text.replace("160.0", "-1"),
    ],
)
def test_a_damaged_cache_is_measured_anew(
    damage: Callable[[str], str], measured: list[tuple[int, ...]], big_root: Path
) -> None:
    machine = this_machine(root=big_root)
    assert len(measured) == 7
    text = cache_path().read_text()
    assert damage(text) != text
    cache_path().write_text(damage(text))
    assert this_machine(root=big_root) == machine
    assert len(measured) == 14
    assert cache_path().read_text() == text


def test_a_small_measurement_here() -> None:
    before = os.sched_getaffinity(0)
    cores = usable_cores()
    rates = measure_node(cores, 4 * (48 << 20), seconds=0.0)
    assert all(0.01 < rate < 100_000 for rate in vars(rates).values())
    exchange_us = measure_exchange_us([cores], rounds=5, work_ns=200_000)
    assert 0 < exchange_us < 10_000_000
    assert os.sched_getaffinity(0) == before


def test_a_gpu_that_cannot_be_measured(
    measured: list[tuple[int, ...]], big_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match="CuPy cannot be imported"):
        measure_gpu_bandwidth(0)
    gpu = Gpu(0, "NVIDIA H100", 80 << 30, 79 << 30, (9, 0))
    monkeypatch.setattr("hotcold.placement.machine.survey.list_gpus", lambda: ((gpu,), ""))
    machine = this_machine(root=big_root)
    assert [(found.name, found.model) for found in machine.gpus] == [("gpu0", "NVIDIA H100")]
    assert not machine.gpus[0].measured
    assert machine.gpus[0].read_gb_per_s == ASSUMED_GPU_READ_GB_PER_S
    smaller = replace(gpu, free_bytes=1 << 30)
    monkeypatch.setattr("hotcold.placement.machine.survey.list_gpus", lambda: ((smaller,), ""))
    again = this_machine(root=big_root)
    assert again.gpus == (replace(machine.gpus[0], free_bytes=1 << 30),)
    assert len(measured) == 7
    monkeypatch.setattr("hotcold.placement.machine.survey.list_gpus", lambda: ((gpu, gpu), ""))
    assert measured_before(big_root) is None


def test_odd_figures_are_found() -> None:
    levels = {found.subject: found.level for found in check_measured(MACHINE)}
    assert levels == {"memory read": "ok"}
    odd = replace(
        MACHINE,
        nodes=(NODE, replace(NODE, name="node1", read_gb_per_s=20.0)),
        gpus=(replace(GPU, measured=False),),
        exchange_us=900.0,
        busy_cores=1.5,
    )
    found = {finding.subject: finding for finding in check_measured(odd)}
    assert {finding.level for finding in found.values()} == {"note"}
    assert set(found) == {"memory read", "exchange", "GPU memory", "busy"}
    assert "node1" in found["memory read"].text
    assert "other programs took 1.5 cores" in found["busy"].text and "--fresh" in found["busy"].text


def test_what_others_did_meanwhile_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stat(*ticks: int) -> None:
        """Columns: user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice."""
        lines = [f"cpu{core} {n} 0 0 {10**6 - n} 50 0 0 0 7 0" for core, n in enumerate(ticks)]
        write(tmp_path / "proc/stat", "\n".join(["cpu  1 2 3 4", *lines, "intr 5"]))

    clock, own = {"seconds": 0.0}, SimpleNamespace(user=0.0, system=0.0)
    monkeypatch.setattr("hotcold.placement.machine.measure.perf_counter", lambda: clock["seconds"])
    monkeypatch.setattr("hotcold.placement.machine.measure.os.times", lambda: own)
    a_second = os.sysconf("SC_CLK_TCK")
    stat(100, 100, 100)
    watch = BusyWatch((0, 1), tmp_path)
    clock["seconds"], own.user, own.system = 10.0, 11.0, 1.0  # both cores, 12 seconds ours
    stat(100 + 8 * a_second, 100 + 10 * a_second, 100 + 9 * a_second)
    assert watch.busy_cores() == pytest.approx(0.6)
    own.user = 30.0  # more than the cores did: its threads ran elsewhere too
    assert watch.busy_cores() == 0.0
    own.user = -100.0
    assert watch.busy_cores() == 2.0
    (tmp_path / "proc/stat").unlink()
    assert BusyWatch((0, 1), tmp_path).busy_cores() == 0.0


def doctor(*options: str) -> dict[str, Any]:
    return run_main("doctor", "--json", *options).report


def test_doctor_shows_and_writes_what_is_measured(
    measured: list[tuple[int, ...]], tmp_path: Path
) -> None:
    report = doctor("--no-measure")
    assert report["measured"] is None
    assert report["machine"]["read_gb_per_s"] is None
    assert measured == []
    out = tmp_path / "out.json"
    report = doctor("--machine-out", str(out))
    count = len(measured)
    assert count > 0
    assert read_machine(out).as_json() == report["measured"]
    assert report["machine"]["read_gb_per_s"] == pytest.approx(10 * len(usable_cores()))
    kept = doctor("--no-measure")["measured"]
    assert kept["nodes"][0]["read_gb_per_s"] == read_machine(out).nodes[0].read_gb_per_s
    assert len(measured) == count
    doctor("--fresh")
    assert len(measured) == 2 * count
