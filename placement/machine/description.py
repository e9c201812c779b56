"""The description of a machine for placement: its memories, and how fast each is read.

`this_machine.this_machine` measures the present machine; `read_machine` reads a description from a
file, written by `hotcold doctor --machine-out FILE` or by hand. All keys but busy_cores are
required. By hand, for one NUMA node and one GPU (an empty date: not measured):

    {"name": "EPYC 9354",
     "nodes": [{"name": "node0", "num_cores": 32, "total_bytes": 200e9, "free_bytes": 180e9,
                "read_gb_per_s": 300, "rows_gb_per_s": 280, "gather_gb_per_s": 200}],
     "gpus": [{"name": "gpu0", "model": "NVIDIA H100", "total_bytes": 80e9, "free_bytes": 79e9,
               "read_gb_per_s": 2500, "link_gb_per_s": 50, "measured": false}],
     "exchange_us": 40, "date": ""}
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.errors import UsageError, shown
from hotcold.model.files.atomic_write import write_atomic

_MAX_JSON_BYTES = 1 << 20
_MAX_BYTES = 2**60
_LEAST_NUMBER, _MAX_NUMBER = 1e-9, 1e9  # GB/s, µs, cores: others are a typing error
_BUSY_SHARE = 0.05  # of all cores: less is an idle desktop
_HOW_TO_MAKE = "`hotcold doctor --machine-out FILE` writes a description"


@dataclass(frozen=True)
class CpuNode:
    """One NUMA node and its usable cores. Units: bandwidths of all cores in 1e9 bytes a second."""

    name: str  # node0
    num_cores: int  # logical cores
    total_bytes: int
    free_bytes: int
    read_gb_per_s: float  # a plain sequential read
    rows_gb_per_s: float  # dense float16 rows times a vector
    gather_gb_per_s: float  # gate, up, down rows of a random tenth of the neurons


@dataclass(frozen=True)
class GpuDevice:
    """One GPU. Units: bandwidths in 1e9 bytes a second."""

    name: str  # gpu0
    model: str  # NVIDIA H100
    total_bytes: int
    free_bytes: int
    read_gb_per_s: float  # of its own memory
    link_gb_per_s: float  # from host to device
    measured: bool  # False: its bandwidths are assumed


@dataclass(frozen=True)
class Machine:
    """One machine: at least one NUMA node, any number of GPUs."""

    name: str  # of the processor
    nodes: tuple[CpuNode, ...]
    gpus: tuple[GpuDevice, ...]
    exchange_us: float  # of a request and its reply, beyond the service's own work
    date: str  # ISO date of the measurement; empty for a description by hand
    busy_cores: float = 0.0  # used by other programs or virtual machines meanwhile

    @property
    def was_busy(self) -> bool:
        """Whether other programs ran during the measurement, so that the figures may be low."""
        return self.busy_cores > _BUSY_SHARE * sum(node.num_cores for node in self.nodes)

    @property
    def identity(self) -> str:
        """The machine in words: its processor, usable cores of each node, the model of each GPU.

        Neither memory, which a hypervisor adds and takes, nor speeds, which are measured anew.
        """
        cores = [f"{node.name} of {node.num_cores} cores" for node in self.nodes]
        return ", ".join((self.name, *cores, *(f"{gpu.name} {gpu.model}" for gpu in self.gpus)))

    @property
    def read_gb_per_s(self) -> float:
        """What all nodes together read in sequence, assumed to be the sum."""
        return sum(node.read_gb_per_s for node in self.nodes)

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON can hold it; `from_json` undoes it."""
        values = asdict(self)
        return values | {"nodes": list(values["nodes"]), "gpus": list(values["gpus"])}

    @classmethod
    def from_json(cls, values: object, source: str) -> Machine:
        """Check a parsed description; `source` names it in errors.

        Errors:  UsageError, naming the key, for one that is missing, unknown or impossible
        """
        reader = _reader(cls, values, source)
        nodes, gpus = (_devices(kind, reader) for kind in (CpuNode, GpuDevice))
        if not nodes:
            raise reader.fail("nodes", "is empty; a machine has at least one node")
        busy = reader.number("busy_cores", 0.0, low=0.0, high=_MAX_NUMBER)
        exchange_us = _checked(reader, "exchange_us")
        return cls(_name(reader, "name"), nodes, gpus, exchange_us, reader.text("date"), busy)


def read_machine(path: Path) -> Machine:
    """Read a description.

    Errors:  UsageError, in one line, for a file that is missing or holds no such description
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise UsageError(f"{path}: is too large for a description; {_HOW_TO_MAKE}")
        values = json.loads(path.read_bytes(), object_pairs_hook=_unique)
    except OSError as problem:
        raise UsageError(f"{path}: cannot be read ({problem.strerror}); {_HOW_TO_MAKE}") from None
    except (ValueError, RecursionError) as problem:
        reason = shown(str(problem).split("\n")[0], 80)
        raise UsageError(f"{path}: is not valid JSON ({reason}); {_HOW_TO_MAKE}") from None
    return Machine.from_json(values, str(path))


def write_machine(path: Path, machine: Machine) -> None:
    """Write a description that `read_machine` reads, whole or not at all.

    Errors:  UsageError where it cannot be written
    """
    text = json.dumps(machine.as_json(), indent=1, allow_nan=False) + "\n"
    try:
        write_atomic(path, text.encode())
    except OSError as problem:
        raise UsageError(
            f"{path}: cannot be written ({problem.strerror}); give another place"
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {shown(twice, 40)} is given twice")
    return values


def _reader(kind: Any, values: object, source: str) -> ConfigReader:
    """Reads an object that has the fields of `kind`, and no others. Errors: UsageError."""
    if not isinstance(values, dict):
        raise UsageError(f"{source}: is {shown(values, 40)}, not an object; {_HOW_TO_MAKE}")
    names = [field.name for field in fields(kind)]
    for field in fields(kind):
        if values.get(field.name) is None and field.default is MISSING:
            raise UsageError(f"{source}: {field.name} is missing; add it")
    for name in values:
        if name not in names:
            known = ", ".join(names)
            raise UsageError(f"{source}: {shown(name, 40)} is unknown; known are {known}")
    # 200e9 is a whole number too, and easier to write than its digits
    whole = {key: int(n) for key, n in values.items() if type(n) is float and n.is_integer()}
    return ConfigReader(values | whole, source, UsageError)


def _devices(kind: Any, machine: ConfigReader) -> tuple[Any, ...]:
    key = "nodes" if kind is CpuNode else "gpus"
    found, devices = machine.values[key], list[Any]()
    if not isinstance(found, list):
        raise machine.fail(key, f"is {shown(found, 40)}; give a list")
    for i, entry in enumerate(found):
        reader = _reader(kind, entry, f"{machine.source}: {key}[{i}]")
        device = kind(**{field.name: _checked(reader, field.name) for field in fields(kind)})
        if device.free_bytes > device.total_bytes:
            raise reader.fail("free_bytes", "is more than total_bytes; give at most that")
        if device.name in [other.name for other in devices]:
            raise reader.fail("name", f"{shown(device.name, 40)} is taken; give another")
        devices.append(device)
    return tuple(devices)


def _checked(reader: ConfigReader, key: str) -> Any:
    if key in ("name", "model"):
        return _name(reader, key)
    if key == "measured":
        return reader.boolean(key, False)
    if key in ("free_bytes", "total_bytes", "num_cores"):
        high = int(_MAX_NUMBER) if key == "num_cores" else _MAX_BYTES
        return reader.integer(key, low=int(key != "free_bytes"), high=high)
    return reader.number(key, low=_LEAST_NUMBER, high=_MAX_NUMBER)


def _name(reader: ConfigReader, key: str) -> str:
    found = reader.text(key)
    if not found:
        raise reader.fail(key, "is ''; give a text")
    return found
