"""A system's configuration as JSON, for a process that is no Ray actor."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage


def system_as_json(system: SystemConfig) -> bytes:
    """All fields of it; `system_of_json` undoes it."""
    return json.dumps(asdict(system)).encode()


def system_of_json(text: bytes) -> SystemConfig:
    """What `system_as_json` wrote. Errors: ValueError, KeyError, TypeError."""
    values: dict[str, Any] = json.loads(text)
    storage = values["storage"]
    if storage is not None:
        values["storage"] = NeuronStorage(**storage | {"without": tuple(storage["without"])})
    return SystemConfig(**values | {"hosts": tuple(values["hosts"])})
