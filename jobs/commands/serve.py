"""`hotcold serve`: the HTTP API and the chat page."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from actors.exchange.watch import Pulse
from actors.protocol.messages import LoadProgress
from actors.setup.preflight import prepare_system
from actors.system import System
from jobs.kept.identity import model_text
from jobs.settings.shared_option import GroupedCommand
from jobs.support.listening import listen, require_server_packages, url_of
from jobs.support.loading import running_system
from jobs.support.options import split_system_options, system_options
from jobs.support.until_stopped import Signals
from model.errors import UsageError
from model.files.locate import locate_model

if TYPE_CHECKING:
    from ui.api.backend import Backend
    from ui.serving import ServerThread

_LAST_BYTES_S = 2.0  # for what was answered to be sent; an open page would wait for ever
_PATIENCE_LOOKS = 60  # seconds in which the driver says nothing: requests give up earlier
_KEY_VARIABLE = "HOTCOLD_API_KEY"


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen at; 0: any free one.",
)
@click.option(
    "--api-key",
    "keys",
    multiple=True,
    envvar=_KEY_VARIABLE,
    help="What clients "
    "must send; may be given several times. Other users of this machine can read a "
    "command line, so better in HOTCOLD_API_KEY.",
)
@click.option(
    "--queue",
    "max_queue",
    type=click.IntRange(0, 100_000),
    default=64,
    show_default=True,
    help="Requests that may wait; others are told to come later.",
)
@click.option(
    "--max-tokens-limit", type=click.IntRange(1), help="Most new tokens that a request may ask for."
)
@click.option(
    "--request-timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds that an answer may take.",
)
@click.option(
    "--max-connections",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Connections that may be open at once.",
)
@click.option(
    "--log",
    type=click.Choice(["text", "json", "none"]),
    default="text",
    show_default=True,
    help="A line for each answer, on standard error.",
)
@click.option("--no-page", is_flag=True, help="Only the API, without the chat page.")
@system_options
def serve(
    model: str | None,
    host: str,
    port: int,
    keys: tuple[str, ...],
    max_queue: int,
    max_tokens_limit: int | None,
    timeout_s: float,
    max_connections: int,
    log: str,
    no_page: bool,
    **values: Any,
) -> None:
    """Serve MODEL (the embedded demo model without it) to browsers and OpenAI's clients."""
    os.environ.pop(_KEY_VARIABLE, None)  # it is no business of the processes that are started now
    require_server_packages("serve")
    from jobs.kept.holder import Holder
    from ui.api.backend import Backend, ServerSettings
    from ui.connections import ConnectionLimits
    from ui.gate import is_loopback
    from ui.serving import LoadingGate, ServerThread

    _check_keys(host, keys, is_loopback(host))
    path = locate_model(model)
    options = split_system_options(values)
    system, _ = prepare_system(path, options)
    settings = ServerSettings(_name(model, path), max_queue, max_tokens_limit or 1 << 20, timeout_s)
    listener = listen(host, port)
    loading_gate, url = LoadingGate(settings.model_name), url_of(listener)
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        holder = None
        try:
            holder = Holder.of_server(
                loading_gate, settings.model_name, url, model_text(model), options
            )
            stack.callback(holder.leave)
        except (UsageError, OSError) as problem:
            click.echo(f"other commands will not find this system: {problem}", err=True)
        server = ServerThread(
            listener, loading_gate, keys, is_loopback(host), settings.max_body_bytes,
            ConnectionLimits(max_connections), log, own=None if holder is None else holder.own,
        )  # fmt: skip
        stack.callback(server.stop)
        click.echo(f"loading {settings.model_name}; {url} says how far it is", err=True)

        def show(progress: LoadProgress) -> None:
            loading_gate.stage = progress.stage
            if holder is not None:
                holder.show(progress)

        running = stack.enter_context(running_system(system, on_progress=show))
        backend = Backend(running, system, settings)
        if holder is not None:
            stack.callback(holder.leave)  # before the system ends
            holder.open(backend, running.call("describe"), None)
        _serve(server, running, backend, url, no_page, signals)


def _serve(
    server: ServerThread,
    running: System,
    backend: Backend,
    url: str,
    no_page: bool,
    signals: Signals,
) -> None:
    """Answer until a signal comes; then until all is answered, or another one comes.

    Errors:  ServiceError where the system ends by itself: then there is nothing left to serve
    """
    from ui.server import create_app

    page = None if no_page else _page(backend)
    server.use(create_app(backend, page))
    click.echo(f"hotcold serves {backend.settings.model_name} at {url} (API: {url}/v1)")
    sys.stdout.flush()
    pulse = Pulse("driver", partial(running.begin, "driver_load"))
    signals.wait(lambda: pulse.look(_PATIENCE_LOOKS))
    server.refuse_new()

    def num_running() -> int:
        """The API's and the page's."""
        load = running.call("driver_load")
        return max(backend.num_active, load.num_running + load.num_waiting)

    if (count := num_running()) > 0:
        click.echo(
            f"finishing {count} request{'s' if count > 1 else ''}; Ctrl-C again stops at once",
            err=True,
        )
        signals.wait_while(lambda: num_running() > 0)
    server.stop(_LAST_BYTES_S if signals.count < 2 else 0.0)


def _check_keys(host: str, keys: tuple[str, ...], local: bool) -> None:
    if not local and not keys:
        raise UsageError(
            f"at {host} other machines can connect: give --api-key or HOTCOLD_API_KEY, or listen "
            "at 127.0.0.1"
        )
    from ui.keys import LEAST_KEY_CHARS

    if any(len(key) < LEAST_KEY_CHARS for key in keys):
        raise UsageError(
            f"an API key has at least {LEAST_KEY_CHARS} characters, so that nobody guesses it; "
            "`openssl rand -hex 24` prints one"
        )
    if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise UsageError("an API key must be printable ASCII without blanks")


def _name(model: str | None, path: Path) -> str:
    """The name that clients give: an org/repo id as it is, else the folder's or the file's name."""
    if model and not Path(model).expanduser().exists():
        return model
    return path.stem if path.is_file() else path.resolve().name


def _page(backend: Backend) -> Any:
    """The chat page, or None where what it needs is not installed."""
    if (
        importlib.util.find_spec("ui.page.page") is None
        or importlib.util.find_spec("gradio") is None
    ):
        return None
    build_page = importlib.import_module("ui.page.page").build_page
    return build_page(backend)
