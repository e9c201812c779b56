"""A fork server that has imported torch, too, for tests that start service after service.

A service imports torch, which takes it a second or two, for a rope's angles that nobody kept, and
what multiplies long prompts when it has nothing else to do. Commands' services still do so in
`tests/e2e`.
"""

from __future__ import annotations

from hotcold.actors.private_ray import fork_server
from hotcold.actors.private_ray.fork_server import ForkServer


class WithTorch(ForkServer):
    """See the top of this file."""

    _module = __name__


def begin_with_torch() -> None:
    """Start one for the next private Ray of this process."""
    ForkServer._begun = WithTorch()


def main() -> None:
    """See `actors.private_ray.fork_server.main`."""
    fork_server._PRELOADED += ("torch", "hotcold.actors.cpu.matmul")
    fork_server.main()


if __name__ == "__main__":
    main()
