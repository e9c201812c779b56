"""How a command has what its Ray's workers import: beside its own imports, or shared with them."""

from __future__ import annotations

from hotcold.actors.private_ray import fork_server
from hotcold.jobs.support.signals import interrupts_after
from hotcold.model.secret_variable import forget_api_key

_MODULES = (
    "hotcold.actors.setup.preflight",
    "hotcold.actors.system",
    "hotcold.jobs.support.loading",
)


def begin_workers() -> None:
    """Import what workers need in another process, meanwhile: a start is 0.2 s shorter.

    For a command whose user waits. To be called once it is known that a system is to start.
    """
    forget_api_key()  # what this process starts does not need it
    fork_server.ForkServer.begin()


def share_imports(*modules: str) -> None:
    """Import these, and what a system's start takes; see `fork_server.share_imports`.

    For a server: 77 MB less. To be called once it is known that a system is to start,
    and before other threads are.
    """
    forget_api_key()
    with interrupts_after():
        fork_server.share_imports(*_MODULES, *modules)
