"""Listening at a port, and errors that say which server has it already."""

import http.client
import json
import socket

from hotcold.model.errors import UsageError

_ASK_S = 2.0


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to `host` and `port` (0: any free one).

    Errors:  UsageError that says which server has the port, or why it cannot be used
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, number)
    except OSError as problem:
        raise UsageError(
            f"{host} is no address of this machine ({problem.strerror}); give another --host"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(512)
    except OSError as problem:
        listener.close()
        raise _taken(host, port, problem) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Its URL for a browser of this machine."""
    host, port = listener.getsockname()[:2]
    return f"http://{_reachable(host)}:{port}"


def _taken(host: str, port: int, problem: OSError) -> UsageError:
    """The error for a port that cannot be used."""
    where = f"http://{_reachable(host)}:{port}"
    model = _model_served(_reachable(host).strip("[]"), port)
    if model is not None:
        return UsageError(
            f"hotcold already serves {model} at {where}: open that in a browser, or give its "
            f"{where}/v1 to a client; for a second server give another --port"
        )
    if isinstance(problem, PermissionError):
        return UsageError(f"port {port} needs root's rights; give a --port from 1024 on")
    return UsageError(
        f"port {port} of {host} cannot be used ({problem.strerror}): another program may use it; "
        "give another --port"
    )


def _model_served(host: str, port: int) -> str | None:
    """The model of a hotcold server at that port, or None."""
    connection = http.client.HTTPConnection(host, port, timeout=_ASK_S)
    try:
        connection.request("GET", "/health")
        found = json.loads(connection.getresponse().read(4096))
        return found["model"] if {"status", "model"} <= set(found) else None
    except (OSError, http.client.HTTPException, ValueError, TypeError):
        return None
    finally:
        connection.close()


def _reachable(host: str) -> str:
    """An address that this machine can connect to, for one that it listens at."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
