"""The chat page on a free port of this process, over systems that run already."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from hotcold.actors.system import System


@contextmanager
def served_page(systems: dict[str, Any], keys: Sequence[str] = (), port: int = 0) -> Iterator[str]:
    """The address of the first model's page, until the end. A stand-in is a client, too."""
    from hotcold.ui.api.backend import Backend, ServerSettings
    from hotcold.ui.api.served_models import ServedModels
    from hotcold.ui.app import create_app
    from hotcold.ui.gate import Gate
    from hotcold.ui.page.page import build_page

    backends = []
    for name, system in systems.items():
        backends.append(Backend(system.call("describe"), ServerSettings(name)))
        backends[-1].attach(system, None if isinstance(system, System) else system)
    models = ServedModels(backends)
    paths = models.page_paths
    pages = {paths[one.name]: partial(build_page, one, paths) for one in backends}
    body_bytes = backends[0].settings.max_body_bytes
    gate = Gate(create_app(models, pages), keys=keys, local=True, max_body_bytes=body_bytes)
    with served(gate, port=port) as found:
        yield f"http://127.0.0.1:{found}/"


@contextmanager
def served(app: Any, port: int = 0, **options: Any) -> Iterator[int]:
    """The port at which uvicorn serves an ASGI app in a thread, until the end."""
    import uvicorn

    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise RuntimeError("the server did not start")
        time.sleep(0.02)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(30)
