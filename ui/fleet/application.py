"""The Ray Serve application: `serve run hotcold.ui.fleet.application:app replicas=2`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import ray
from pydantic import BaseModel, ConfigDict, Field, field_validator
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from hotcold.actors.protocol.options import OPTIONS, SystemOptions
from hotcold.model.errors import UsageError, shown
from hotcold.model.secret_variable import API_KEY
from hotcold.placement.machine.survey import usable_cores
from hotcold.ui.fleet.door import Door, DoorSettings
from hotcold.ui.fleet.models import FleetModel, fleet_models, require_nodes
from hotcold.ui.fleet.on_demand import OnDemand
from hotcold.ui.fleet.policy import AHEAD
from hotcold.ui.fleet.replica import Replica
from hotcold.ui.fleet.router import PrefixRouter

IMPORT_PATH = "hotcold.ui.fleet.application:app"
NAME = "hotcold"
_MOST_AT_DOOR = 10_000
_HEALTH_S, _SPEEDS_S = 5.0, 2.0  # between two questions to a replica
_COUNT_S = 1.0  # between two counts of a model's requests, where it may leave
# Serve takes a copy of classes of the module that is named, and imports those of others.
_POLICY = f"{__name__}:{OnDemand.__name__}"


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


def app(args: FleetArgs) -> serve.Application:
    """The application of a Serve config file; keys of clients are in HOTCOLD_API_KEY there."""
    return application(args, os.environ.get(API_KEY, "").split())


def application(args: FleetArgs, keys: Sequence[str] = ()) -> serve.Application:
    """A door, and a deployment for each model. Errors: HotcoldError."""
    say = partial(print, file=sys.stderr, flush=True)
    options = args.system
    models = fleet_models(args.models, options)
    if ray.is_initialized():
        require_nodes(models, args.replicas, options, say)
    if args.page and args.doors > 1:
        say("no chat page: one door keeps its conversations; doors: 1 has it")
    settings = DoorSettings(
        tuple(keys),
        tuple(args.origins),
        args.queue,
        args.max_tokens_limit,
        args.request_timeout,
        args.log,
        args.page and args.doors == 1,
        args.replicas == 0,
    )
    door = serve.deployment(
        serve.ingress()(Door),
        name="door",
        num_replicas=args.doors,
        max_ongoing_requests=_MOST_AT_DOOR,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=args.request_timeout,
    )
    return door.bind([(one, _deployment(args, options, one)) for one in models], settings)


def _deployment(args: FleetArgs, options: SystemOptions, model: FleetModel) -> serve.Application:
    """The replicas of one model: each reserves CPUs and memory of its nodes, and a GPU of one."""
    num_parallel = model.system.max_batch
    most = max(args.max_replicas or 1, args.replicas)
    count: dict[str, Any] = {"num_replicas": args.replicas}
    if most > args.replicas:
        growing: dict[str, Any] = {"min_replicas": args.replicas, "max_replicas": most}
        if not args.replicas:
            policy = AutoscalingPolicy(policy_function=_POLICY, policy_kwargs={"stay_s": args.stay})
            growing |= {"policy": policy, "downscale_delay_s": 0.0}
            growing |= {"metrics_interval_s": _COUNT_S, "look_back_period_s": 2 * _COUNT_S}
        with warnings.catch_warnings(action="ignore"):  # of an interval that Serve will call else
            config = AutoscalingConfig(**growing, target_ongoing_requests=num_parallel)
        count = {"autoscaling_config": config}
    deployment = serve.deployment(
        Replica,
        name=model.deployment,
        max_ongoing_requests=num_parallel + AHEAD,
        ray_actor_options={"num_cpus": 0},
        placement_group_bundles=model.bundles,
        placement_group_strategy="STRICT_PACK" if args.nnodes == 1 else "STRICT_SPREAD",
        graceful_shutdown_timeout_s=args.drain,
        health_check_period_s=_HEALTH_S,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_routing_stats_period_s=_SPEEDS_S
        ),
        **count,
    )
    return deployment.bind(model.text, options)
