"""The chat page on a free port of this process, over a system that runs already."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.actors.system import System


class LongWinded:
    """A system whose answers go on to their greatest length while `is_on`."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.is_on = False
        self.requests: list[GenerateRequest] = []

    def begin(self, method: str, *args: Any) -> Any:
        """As `System.begin`."""
        if method == "submit":
            epoch, request = args
            request = replace(request, sampling=replace(request.sampling, ignore_eos=self.is_on))
            self.requests.append(request)
            args = (epoch, request)
        return self.system.begin(method, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.system, name)


@contextmanager
def served_page(
    system: Any,
    model_name: str,
    keys: Sequence[str] = (),
    *,
    client: Any = None,
    port: int = 0,
) -> Iterator[str]:
    """The page's address, until the end. `client` asks in place of the server's own."""
    from hotcold.ui.api.backend import Backend, ServerSettings
    from hotcold.ui.api.served_models import ServedModels
    from hotcold.ui.app import create_app
    from hotcold.ui.gate import Gate
    from hotcold.ui.page.page import build_page

    backend = Backend(system.call("describe"), ServerSettings(model_name))
    backend.attach(system, client)
    app = create_app(ServedModels([backend]), {"/": lambda: build_page(backend)})
    gate = Gate(app, keys=keys, local=True, max_body_bytes=backend.settings.max_body_bytes)
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
