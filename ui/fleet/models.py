"""The models of a fleet: what each reserves on a node, by its plan, and whether nodes have it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from hotcold.actors.processes.cluster import can_grow
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.account import account, what_fits
from hotcold.actors.setup.choose import choose_system
from hotcold.actors.setup.preflight import in_memory, quantized_needs, read_model
from hotcold.cuda_kernels.device import list_gpus
from hotcold.model.byte_sizes import binary_text
from hotcold.model.errors import MemoryBudgetError, UsageError
from hotcold.model.files.locate import locate_model, model_name
from hotcold.model.gguf.file_names import is_later_part, models_among
from hotcold.placement.machine.survey import usable_cores


@dataclass(frozen=True)
class FleetModel:
    """One model: as its user names it, its name in requests, and its system by this machine.

    bundle: what a replica reserves of each of its nodes: CPU, memory in bytes, of the first a GPU
    """

    text: str | None
    name: str
    system: SystemConfig
    bundle: dict[str, float]

    @property
    def deployment(self) -> str:
        """The name of its deployment in Serve."""
        return re.sub(r"[^\w.-]+", "-", self.name)

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What a replica reserves of each node."""
        others = {name: amount for name, amount in self.bundle.items() if name != "GPU"}
        return [self.bundle] + [others] * (self.system.num_hosts - 1)


def models_in(named: Sequence[str]) -> Iterator[str]:
    """`named`, with the models of a folder in place of one that holds several."""
    for text in named:
        folder = Path(text).expanduser()
        files = models_among([one.name for one in folder.glob("*.gguf") if not is_later_part(one)])
        found = [one.parent for one in folder.glob("*/config.json")] + [folder / n for n in files]
        if len(found) < 2 or (folder / "config.json").exists():
            found = [folder] if folder.exists() else []
        yield from sorted(str(one.absolute()) for one in found) or [text]


def fleet_models(named: Sequence[str], options: SystemOptions) -> list[FleetModel]:
    """The models, or the embedded one. Errors: HotcoldError, also for two of one name."""
    texts: Sequence[str | None] = named or [None]
    models = [_model(text, options) for text in texts]
    names = [model.deployment for model in models]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(
            f"two models are called {twice[0]!r}; give one of the folders or files another name"
        )
    return models


def _model(text: str | None, options: SystemOptions) -> FleetModel:
    path = locate_model(text)
    config = read_model(path, options.weight_dtype)
    # Nodes may have more than this machine: a GPU, whose share counts as memory then, and threads.
    threads, actors = options.num_threads or 1, options.num_cpu_actors
    here = replace(options, num_threads=min(threads, len(usable_cores())), num_cpu_actors=None)
    if not list_gpus()[0]:
        here = replace(here, device="cpu", gpu_memory_bytes=None)
    system, config = in_memory(choose_system(path, config, here), config)
    actors = actors or system.num_cpu_actors
    system = replace(system, num_threads=threads, num_cpu_actors=actors)
    num_bytes = account(system, config).total_bytes
    if options.cpu_memory_bytes is not None:  # the rest of its neurons stays on storage
        num_bytes = min(num_bytes, options.cpu_memory_bytes)
    bundle = {"CPU": float(threads), "memory": float(num_bytes)}
    if options.device == "cuda":
        bundle["GPU"] = 1.0
    return FleetModel(text, model_name(text, path), system, bundle)


def require_nodes(
    models: Sequence[FleetModel],
    replicas: int,
    options: SystemOptions,
    say: Callable[[str], object],
) -> None:
    """Check that the cluster's nodes have room for `replicas` of all models; 0: for one alone.

    Where an autoscaler may bring nodes, `say` is told what is waited for.
    Errors:  MemoryBudgetError, with what would fit; UsageError where there are too few nodes
    """
    left = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for model in sorted(models, key=lambda one: -one.bundle["memory"]):
        for number in range(max(1, replicas)):
            if nodes := _places(model.bundles, left):
                for node, taken in zip(nodes, model.bundles, strict=True):
                    node |= {name: node[name] - taken[name] for name in taken if replicas}
                continue
            count = len(model.bundles)
            which = "a node" if count == 1 else f"{count} nodes, each"
            wanted = f"{which} with {_told(model.bundle)} for {model.name}"
            if can_grow():
                say(f"waiting for {wanted}, which the cluster's autoscaler is asked for")
                return
            if len(left) < count:
                raise UsageError(f"the Ray cluster has {len(left)} nodes; give less --nnodes")
            most = sorted(left, key=_room)[-count]
            smaller = quantized_needs(locate_model(model.text), options)
            what = what_fits(int(most.get("memory", 0)), smaller)
            if number or model is not models[0]:
                what += ", or --replicas 0, which loads a model when it is asked for"
            raise MemoryBudgetError(
                f"there is no room on {wanted}: at most {_told(most)} are left; use {what}"
            )


def _places(bundles: Sequence[dict[str, float]], nodes: Sequence[Any]) -> list[Any]:
    """A node for each bundle, the emptiest that has room, as Ray chooses; [] where one has none."""
    left, found = sorted(nodes, key=_room), []
    for bundle in bundles:
        able = [
            at for at, node in enumerate(left)
            if all(node.get(name, 0) >= amount for name, amount in bundle.items())
        ]  # fmt: skip
        if not able:
            return []
        found.append(left.pop(able[-1]))
    return found


def _room(node: dict[str, float]) -> tuple[float, float]:
    return node.get("memory", 0), node.get("CPU", 0)


def _told(resources: dict[str, float]) -> str:
    told = f"{binary_text(int(resources.get('memory', 0)))} and {resources.get('CPU', 0):g} CPUs"
    return told + (f" and {resources['GPU']:g} GPUs" if "GPU" in resources else "")
