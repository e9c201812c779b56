"""The Ray Serve application: `serve run hotcold.ui.fleet.application:app replicas=2`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from hotcold.actors.protocol.options import SystemOptions
from hotcold.model.secret_variable import API_KEY
from hotcold.ui.fleet.arguments import FleetArgs
from hotcold.ui.fleet.door import Door
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
    door = serve.deployment(
        serve.ingress()(Door),
        name="door",
        num_replicas=args.doors,
        max_ongoing_requests=_MOST_AT_DOOR,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=args.request_timeout,
    )
    return door.bind([(one, _deployment(args, options, one)) for one in models], args, keys)


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
