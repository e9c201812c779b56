"""The description of a machine: written, read, refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotcold.model.errors import UsageError
from hotcold.placement.machine import description
from hotcold.placement.machine.description import (
    CpuNode,
    GpuDevice,
    Machine,
    read_machine,
    write_machine,
)

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
