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
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hotcold.model.errors import UsageError, shown
from hotcold.model.files.atomic_write import write_atomic

_MAX_JSON_BYTES = 1 << 20
_MAX_BYTES = 2**60
_MAX_NUMBER = 1e9  # GB/s, µs, cores: more is a typing error
UNNAMED = "unknown"  # a processor whose name the kernel does not say
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
        """What the machine is: see `machine_identity`."""
        nodes = [(node.name, node.num_cores) for node in self.nodes]
        return machine_identity(self.name, nodes, [(gpu.name, gpu.model) for gpu in self.gpus])

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
        keys = _object_with(cls, values, source)
        nodes = _devices(CpuNode, keys["nodes"], f"{source}: nodes")
        gpus = _devices(GpuDevice, keys["gpus"], f"{source}: gpus")
        if not nodes:
            raise UsageError(f"{source}: nodes is empty; a machine has at least one node")
        return cls(
            name=_text(keys["name"], f"{source}: name"),
            nodes=nodes,
            gpus=gpus,
            exchange_us=_number(keys["exchange_us"], f"{source}: exchange_us"),
            date=_text(keys["date"], f"{source}: date", may_be_empty=True),
            busy_cores=_busy_cores(keys.get("busy_cores", 0), f"{source}: busy_cores"),
        )


def machine_identity(
    cpu_name: str, nodes: Iterable[tuple[str, int]], gpus: Iterable[tuple[str, str]]
) -> str:
    """A machine in words: its processor, the usable cores of each node, the model of each GPU.

    Neither memory, which a hypervisor adds and takes, nor speeds, which are measured anew.
    """
    cores = [f"{name} of {num_cores} cores" for name, num_cores in nodes]
    cards = [f"{name} {model}" for name, model in gpus]
    return ", ".join((cpu_name, *cores, *cards))


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


def _object_with(kind: Any, values: object, where: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise UsageError(f"{where}: is {shown(values, 40)}, not an object; {_HOW_TO_MAKE}")
    names = [field.name for field in fields(kind)]
    for field in fields(kind):
        if field.name not in values and field.default is MISSING:
            raise UsageError(f"{where}: {field.name} is missing; add it")
    for name in values:
        if name not in names:
            raise UsageError(f"{where}: {shown(name, 40)} is unknown; known are {', '.join(names)}")
    return values


def _devices(kind: Any, values: object, where: str) -> tuple[Any, ...]:
    if not isinstance(values, list):
        raise UsageError(f"{where} is {shown(values, 40)}; give a list")
    devices: list[Any] = []
    for i, entry in enumerate(values):
        place = f"{where}[{i}]"
        keys = _object_with(kind, entry, place)
        checked = {name: _checked(name, value, f"{place}.{name}") for name, value in keys.items()}
        device = kind(**checked)
        if device.free_bytes > device.total_bytes:
            raise UsageError(f"{place}.free_bytes is more than total_bytes; give at most that")
        if device.name in [other.name for other in devices]:
            raise UsageError(f"{place}.name {shown(device.name, 40)} is taken; give another")
        devices.append(device)
    return tuple(devices)


def _checked(name: str, value: object, where: str) -> object:
    if name in ("name", "model"):
        return _text(value, where)
    if name == "measured":
        if type(value) is not bool:
            raise UsageError(f"{where} is {shown(value, 40)}; give true or false")
        return value
    if name == "free_bytes":
        return _whole(value, where, 0, _MAX_BYTES)
    if name == "total_bytes":
        return _whole(value, where, 1, _MAX_BYTES)
    if name == "num_cores":
        return _whole(value, where, 1, int(_MAX_NUMBER))
    return _number(value, where)


def _text(value: object, where: str, may_be_empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or may_be_empty):
        raise UsageError(f"{where} is {shown(value, 40)}; give a text")
    return value


def _whole(value: object, where: str, low: int, high: int) -> int:
    # 200e9 is a whole number too, and easier to write than its digits
    is_whole = type(value) is int or (type(value) is float and value.is_integer())
    if not is_whole or not low <= value <= high:  # type: ignore[operator]
        raise UsageError(f"{where} is {shown(value, 40)}; give a whole number from {low} to {high}")
    return int(value)  # type: ignore[call-overload]


def _busy_cores(value: object, where: str) -> float:
    return 0.0 if type(value) in (int, float) and value == 0 else _number(value, where)


def _number(value: object, where: str) -> float:
    if type(value) not in (int, float) or not 0 < value <= _MAX_NUMBER:  # type: ignore[operator]
        raise UsageError(
            f"{where} is {shown(value, 40)}; give a number above 0, at most {_MAX_NUMBER:g}"
        )
    return float(value)  # type: ignore[arg-type]
