"""What a fleet is started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from hotcold.actors.protocol.options import OPTIONS, SystemOptions
from hotcold.model.errors import UsageError, shown
from hotcold.placement.machine.survey import usable_cores


class FleetArgs(BaseModel):
    """Arguments of the application, in a Serve config file or after `serve run`."""

    model_config = ConfigDict(extra="forbid")

    models: list[str] = Field(default_factory=list)  # without any the embedded demo model
    replicas: int = Field(default=1, ge=0)  # of each model; 0: one is loaded when it is asked for
    nnodes: int = Field(default=1, ge=1)  # of each system, among which its CPU services are shared
    stay: float = Field(default=-1.0, ge=-1)  # seconds without a request; -1: as there is room
    max_replicas: int | None = Field(default=None, ge=1)  # more than `replicas`: by what waits
    options: dict[str, Any] = Field(default_factory=dict)  # of systems: flags without dashes
    queue: int = Field(default=64, ge=0)  # requests of a model that may wait
    max_tokens_limit: int = Field(default=1 << 20, ge=1)
    request_timeout: float = Field(default=600.0, gt=0)
    drain: float = Field(default=60.0, ge=0)  # seconds in which a replica that is to end goes on
    doors: int = Field(default=1, ge=1)
    origins: list[str] = Field(default_factory=list)
    page: bool = True  # with one door
    log: Literal["text", "json", "none"] = "text"

    @field_validator("models", "origins", mode="before")
    @classmethod
    def _split(cls, given: Any) -> Any:
        return given.split(",") if isinstance(given, str) else given

    @property
    def system(self) -> SystemOptions:
        """Options of each system; it has an equal share of this machine's cores without threads.

        Errors:  UsageError
        """
        by_flag = {one.flag.lstrip("-"): one.keyword for one in OPTIONS.values()}
        if unknown := self.options.keys() - by_flag.keys():
            raise UsageError(
                f"{shown(min(unknown))} is no option of a system; there are {', '.join(by_flag)}"
            )
        if "hosts" in self.options:
            raise UsageError("a fleet finds the nodes of its systems; give --nnodes, not --hosts")
        given = {keyword: self.options.get(name) for name, keyword in by_flag.items()}
        if given["threads"] is None:
            num_systems = max(1, self.replicas * len(self.models))
            given["threads"] = max(1, len(usable_cores()) // num_systems)
        if given["device"] is None:
            given["device"] = "cpu"  # a replica takes a GPU only where it is told to
        if self.nnodes > 1:  # each replica knows its own
            given["hosts"] = [f"node {number}" for number in range(self.nnodes)]
        return SystemOptions.of_keywords(**given)


def flags_of(options: SystemOptions) -> dict[str, Any]:
    """What differs from the defaults, as `FleetArgs.options`; plain values."""
    found = {}
    for name, one in OPTIONS.items():
        value = getattr(options, name)
        if value != one.default:
            plain = list(value) if isinstance(value, tuple) else value
            found[one.flag.lstrip("-")] = str(value) if isinstance(value, Path) else plain
    return found
