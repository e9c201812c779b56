"""A Ray that only its owner can use: it listens on this machine alone, and asks for its own token.

Whoever may talk to Ray may run programs as its owner. Ray's sockets in the file system ask for no
token; the folder that they are in is for its owner alone (`session_folder`).
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_TOKEN_BYTES = 32


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
            _changed(ray_constants, "ENABLE_RAY_CLUSTER", False),
            # Ray keeps the command line, where an API key may be.
            _changed(utils, "get_entrypoint_name", lambda: "hotcold"),
        ):
            read_anew()
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _changed(module: Any, name: str, value: Any) -> Iterator[None]:
    usual = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, usual)


def read_anew() -> None:
    """Let this process read token and mode again from its environment, unless it uses them."""
    if ray.is_initialized():
        return
    with suppress(ImportError, AttributeError):  # of a Ray that remembers neither
        from ray._raylet import AuthenticationTokenLoader, Config

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
