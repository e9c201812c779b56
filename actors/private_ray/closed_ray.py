"""A Ray that only its owner can use: it listens on this machine alone, and asks for its own token.

Whoever may talk to Ray may run programs as its owner. Ray's sockets in the file system ask for no
token; the folder that they are in is for its owner alone (`session_folder`).

What closes it are partly Ray's own parts, not public, which another version may lack. So whoever
has started one asks whether it is closed (`require_closed`).
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from hotcold.model.errors import ServiceError

_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_TOKEN_BYTES = 32
# Of each of Ray's servers a method that it refuses without the token: whoever may call it may call
# all of that server's.
_OF_GCS = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
_OF_NODE = {
    "NodeManagerPort": "/ray.rpc.NodeManagerService/GetNodeStats",
    "ObjectManagerPort": "/ray.rpc.ObjectManagerService/Pull",
}
_ANSWER_S = 30.0


@contextmanager
def closed_to_others(folder: Path) -> Iterator[None]:
    """Let a Ray that is started meanwhile be so; its token is in a file of `folder`.

    Ray's processes are told where the token is; what this process starts later is not.
    Errors:  OSError where the file cannot be written
    """
    from ray._private import ray_constants, utils

    token = folder / "token"
    with open(token, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(secrets.token_hex(_TOKEN_BYTES))
    before = {name: os.environ.pop(name, None) for name in (_MODE, _TOKEN, _TOKEN_PATH)}
    os.environ |= {_MODE: "token", _TOKEN_PATH: str(token)}
    try:
        with (
            # With no other host to come, Ray's own address is the loopback's.
            replaced(ray_constants, "ENABLE_RAY_CLUSTER", False),
            # Ray keeps the command line, where an API key may be.
            replaced(utils, "get_entrypoint_name", lambda: "hotcold"),
        ):
            read_anew()
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let `owner.name` be `value` meanwhile; a Ray that has none goes on in its own way."""
    if not hasattr(owner, name):
        yield
        return
    usual = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, usual)


def require_closed() -> None:
    """Ask all servers of the Ray that this process has started, as one without the token.

    Errors:  ServiceError where one does not refuse
    """
    gcs = ray.get_runtime_context().gcs_address
    methods = {gcs: _OF_GCS}
    for node in ray.nodes():
        address = node["NodeManagerAddress"]
        methods |= {f"{address}:{node[port]}": method for port, method in _OF_NODE.items()}
    for address, answer in _answers(methods).items():
        if answer != "UNAUTHENTICATED":
            raise ServiceError(
                f"Ray {ray.__version__} answers {answer} at {address} to whoever has no token, so "
                "other users of this machine could run programs as you; install a Ray that "
                "hotcold was tried with, such as 2.60"
            )


def _answers(methods: dict[str, str]) -> dict[str, str]:
    """What each address answers to an empty request without a token, to its method."""
    import grpc  # takes as long as a layer's weights, and is needed here alone

    answers = {}
    with ExitStack() as opened:
        calls = {}
        for address, method in methods.items():
            channel = grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)])
            call = opened.enter_context(channel).unary_unary(method)
            calls[address] = call.future(b"", timeout=_ANSWER_S, wait_for_ready=True)
        for address, call in calls.items():
            answers[address] = call.code().name
    return answers


def read_anew() -> None:
    """Let this process read token and mode again from its environment, unless it uses them."""
    if ray.is_initialized():
        return
    with suppress(ImportError, AttributeError):  # of a Ray that remembers neither
        from ray._raylet import AuthenticationTokenLoader, Config

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
