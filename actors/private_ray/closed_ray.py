"""A Ray that only its owner can use: it listens on the loopback alone and requires a token.

Anybody who can talk to Ray can run programs as its owner. Ray's Unix sockets require no token, so
they are in a folder that only the owner may enter (`temp_folder`).

Another version of Ray may not heed what it is told, so each start checks that its Ray is closed
(`require_closed`).
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ray

from hotcold.actors.setup.ray_parts import environment, replaced
from hotcold.model.errors import ServiceError

_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_TOKEN_BYTES = 32
# For each of Ray's servers a method that it must refuse without the token, like all its methods.
_OF_GCS = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
_OF_NODE = {
    "NodeManagerPort": "/ray.rpc.NodeManagerService/GetNodeStats",
    "ObjectManagerPort": "/ray.rpc.ObjectManagerService/Pull",
}
_ANSWER_S = 30.0


@contextmanager
def closed_to_others(folder: Path) -> Iterator[None]:
    """Close a Ray that is started within this context; its token is in a file of `folder`.

    Ray's processes learn the token's path; later children of this process do not.
    Errors:  OSError where the file cannot be written
    """
    from ray._private import ray_constants

    token = folder / "token"
    with open(token, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(secrets.token_hex(_TOKEN_BYTES))
    with environment({_MODE: "token", _TOKEN: None, _TOKEN_PATH: str(token)}):
        read_anew()
        # Without a cluster Ray's servers listen at the loopback; told that address they do not.
        with replaced(ray_constants, "ENABLE_RAY_CLUSTER", False):
            yield


def require_closed() -> None:
    """Check that all servers of this process's Ray refuse calls without the token.

    Errors:  ServiceError where one does not
    """
    import grpc  # slow to import

    methods = {ray.get_runtime_context().gcs_address: _OF_GCS}
    for node in ray.nodes():
        host = node["NodeManagerAddress"]
        methods |= {f"{host}:{node[port]}": method for port, method in _OF_NODE.items()}
    for address, method in methods.items():
        with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
            asked = channel.unary_unary(method)
            answer = asked.future(b"", timeout=_ANSWER_S, wait_for_ready=True).code()
        if answer is not grpc.StatusCode.UNAUTHENTICATED:
            raise ServiceError(
                f"Ray {ray.__version__} answers {answer.name} at {address} without a token, so "
                "other users of this machine could run programs as you; install a Ray that "
                "hotcold was tried with, such as 2.60"
            )


def read_anew() -> None:
    """Have Ray read token and mode from the environment again, unless it is in use."""
    if ray.is_initialized():
        return
    with suppress(ImportError, AttributeError):  # of a Ray that caches neither
        from ray._raylet import AuthenticationTokenLoader, Config

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
