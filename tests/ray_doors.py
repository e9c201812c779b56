"""What listens where, and what Ray's services answer to whoever has no token."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

import grpc
import psutil

# The only service whose messages are not there in Python.
_OBJECT_MANAGER = [f"/ray.rpc.ObjectManagerService/{name}" for name in ("Push", "Pull")]
_TIMEOUT_S = 60.0


def listening(processes: Sequence[psutil.Process]) -> list[tuple[str, int]]:
    """Address and port of every socket at which one of these processes takes connections.

    Those that have ended meanwhile have none: Ray ends workers that it has too many of.
    """
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            sockets = process.net_connections("inet")
            found += [one.laddr for one in sockets if one.status == psutil.CONN_LISTEN]
    return [(address.ip, address.port) for address in found]


def ray_methods() -> Iterator[str]:
    """The path of every method of every service of Ray."""
    from ray.core import generated

    for module in pkgutil.iter_modules(generated.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"{generated.__name__}.{module.name}").DESCRIPTOR
            for service in file.services_by_name.values():
                yield from (f"/{service.full_name}/{method.name}" for method in service.methods)
    yield from _OBJECT_MANAGER


def answers(port: int, methods: Sequence[str], token: str = "") -> Counter[str]:
    """How often each status is the answer to an empty request, of this machine's port."""
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        asked = [
            channel.unary_unary(method).future(b"", timeout=_TIMEOUT_S, metadata=metadata)
            for method in methods
        ]
        return Counter(call.code().name for call in asked)
