"""Lets a command import once what it and the workers of its Ray need."""

from __future__ import annotations

from hotcold.actors.private_ray import fork_server
from hotcold.jobs.support.signals import interrupts_after
from hotcold.model.secret_variable import forget_api_key

_MODULES = (
    "hotcold.actors.setup.preflight",
    "hotcold.actors.system",
    "hotcold.jobs.support.loading",
)


def share_imports(*modules: str) -> None:
    """Import these, and what a system's start takes; see `fork_server.share_imports`.

    To be called once it is known that a system is to start, and before other threads are.
    """
    forget_api_key()  # forks of this process, and what they start, do not need it
    with interrupts_after():
        fork_server.share_imports(*_MODULES, *modules)
