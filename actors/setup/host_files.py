"""Checks of a service's host: that it has the same model's files, and enough memory."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotcold.actors.protocol.messages import ServiceSpec
from hotcold.actors.protocol.ray_memory import free_bytes
from hotcold.actors.setup.account import service_bytes
from hotcold.model.byte_sizes import size_text
from hotcold.model.config.build import read_config
from hotcold.model.errors import CheckpointError, HotcoldError, MemoryBudgetError
from hotcold.model.files.artifact import ModelIdentity


def require_same_model(spec: ServiceSpec) -> None:
    """Check that this host has the files that the system started with; replacements check too.

    Errors:  CheckpointError where this host has no copy of the model at the path, or another model;
             MemoryBudgetError where the service's weights do not fit on a host of --hosts
    """
    if not spec.model_digest:
        return
    if not spec.has_own_files:
        if ModelIdentity.of(spec.path).state != spec.model_digest:
            raise CheckpointError(
                f"{spec.path} may be another model than when the system started, its files "
                "have changed; start the system anew"
            )
        return
    host = socket.gethostname()
    copy = f"copy the model's files to {spec.path} on every host of --hosts"
    try:
        identity = ModelIdentity.of(spec.path)
        config = read_config(spec.path)
        num_bytes, content = service_bytes(spec, config), identity.content
    except HotcoldError as error:
        raise CheckpointError(f"the {spec.name} service, on {host}: {error}; {copy}") from None
    if content != spec.model_digest:
        raise CheckpointError(
            f"the {spec.name} service, on {host}: {spec.path} is another model than on the "
            f"driver's host; {copy}"
        )
    require_free_memory(spec, num_bytes)


@contextmanager
def named_host(spec: ServiceSpec) -> Iterator[None]:
    """Add service and host to errors raised within, where each host has its own files."""
    try:
        yield
    except HotcoldError as error:
        if not spec.has_own_files:
            raise
        host = socket.gethostname()
        raise type(error)(f"the {spec.name} service, on {host}: {error}") from None


def own_predictors(spec: ServiceSpec) -> Path | None:
    """The predictors file for reading neurons ahead; None where a host of several lacks it."""
    file = spec.storage.predictors if spec.storage is not None else ""
    return Path(file) if file and (Path(file).exists() or not spec.has_own_files) else None


def require_free_memory(spec: ServiceSpec, num_bytes: int) -> None:
    """Raise MemoryBudgetError where the service's weights, `num_bytes`, do not fit.

    Preflight has checked the system as a whole; a replacement service may find less free.
    """
    if spec.on_gpu or num_bytes <= (free := free_bytes()):
        return
    where, advice = "", "free memory, or use a smaller model or --dtype"
    if spec.has_own_files:
        less = "" if spec.storage is None else "less --cpu-memory, which is of each host, or "
        where, advice = (
            f", on {socket.gethostname()},",
            f"give {less}more --hosts, or leave this one out",
        )
    raise MemoryBudgetError(
        f"the {spec.name} service{where} needs {size_text(num_bytes)} of memory, "
        f"{size_text(free)} are free; {advice}"
    )
