"""`hotcold serve`: the HTTP API and the chat page."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from hotcold.jobs.support.extras import require_extra, require_known_gradio
from hotcold.jobs.support.listening import listen, url_of
from hotcold.jobs.support.options import DURATION, split_system_options, system_options
from hotcold.jobs.support.settings import GroupedCommand, ModelsArgument
from hotcold.jobs.support.signals import Signals, interrupts_after
from hotcold.jobs.support.workers import begin_workers
from hotcold.model.errors import ServiceError, UsageError
from hotcold.model.secret_variable import API_KEY

if TYPE_CHECKING:
    from hotcold.jobs.running.registry import Registration
    from hotcold.jobs.running.served import SystemStarter
    from hotcold.ui.api.backend import Backend
    from hotcold.ui.api.served_models import ServedModels
    from hotcold.ui.model_loading import ModelLoader
    from hotcold.ui.server_thread import ServerThread
    from hotcold.ui.system_routes import SystemRoutes

_FOREVER_S = 1e8  # this user's programs limit an answer's time themselves
_LAST_BYTES_S = 2.0  # to send what was answered; an open page would wait for ever


@click.command(cls=GroupedCommand)
@click.argument("model", cls=ModelsArgument)
@click.option("--host", default="127.0.0.1", help="Address to listen at.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    help="Port to listen at; 0: any free one.",
)
@click.option(
    "--api-key",
    "keys",
    multiple=True,
    envvar=API_KEY,
    help="What clients "
    "must send; may be given several times. Other users of this machine can read a "
    "command line, so better in HOTCOLD_API_KEY.",
)
@click.option(
    "--origin",
    "origins",
    multiple=True,
    metavar="URL",
    help="A page elsewhere that may ask, such as https://chat.example.org or app://obsidian.md; "
    "may be given several times.",
)
@click.option(
    "--queue",
    "max_queue",
    type=click.IntRange(0, 100_000),
    default=64,
    help="Requests that may wait; others are refused with status 503.",
)
@click.option(
    "--max-tokens-limit", type=click.IntRange(1), help="Most new tokens that a request may ask for."
)
@click.option(
    "--request-timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    help="Seconds that an answer may take.",
)
@click.option(
    "--max-connections",
    type=click.IntRange(1),
    default=512,
    help="Connections that may be open at once.",
)
@click.option(
    "--log",
    type=click.Choice(["text", "json", "none"]),
    default="text",
    help="A line for each answer, on standard error.",
)
@click.option("--no-page", is_flag=True, help="Only the API, without the chat page.")
@click.option(
    "--stay",
    "keep_s",
    type=DURATION,
    default=0,
    help="Answer this user's commands and programs alone, at a Unix socket instead of a port, and "
    "end so long after the last answer; -1: with `hotcold stop`.",
)
@system_options
def serve(
    model: tuple[str, ...],
    host: str,
    port: int,
    keys: tuple[str, ...],
    origins: tuple[str, ...],
    max_queue: int,
    max_tokens_limit: int | None,
    timeout_s: float,
    max_connections: int,
    log: str,
    no_page: bool,
    keep_s: float,
    **values: Any,
) -> None:
    """Serve MODELs (the embedded demo model without one) to browsers and OpenAI's clients.

    The first is loaded at the start, others with their first request. Where memory is short, the
    least recently used one is unloaded.
    """
    require_extra("ui", "--keep" if keep_s else "serve")
    if keep_s:
        log, no_page, timeout_s = "none", True, _FOREVER_S
    if not no_page and importlib.util.find_spec("gradio") is not None:
        require_known_gradio()
    from hotcold.ui.gate import is_loopback, origin_of

    check_keys(host, keys, is_loopback(host))
    allowed_origins = [origin_of(one) for one in origins]
    begin_workers()
    with interrupts_after():
        from hotcold.actors.protocol.ray_memory import free_bytes
        from hotcold.jobs.running.served import SystemStarter, model_plans
        from hotcold.ui.access_log import event_line
        from hotcold.ui.api.backend import Backend, ServerSettings
        from hotcold.ui.api.served_models import ServedModels
        from hotcold.ui.app import create_app
        from hotcold.ui.connections import ConnectionLimits
        from hotcold.ui.model_loading import ModelLoader
        from hotcold.ui.page.late_page import late_pages
        from hotcold.ui.server_thread import LoadingGate, ServerThread
        from hotcold.ui.system_routes import SystemRoutes

    options = split_system_options(values)
    plans = model_plans(model, options)
    free, name = free_bytes(), plans[0].name
    allowed = min(free, options.cpu_memory_bytes or free)
    most_tokens = 1 << 31 if keep_s else 1 << 20
    limits = ServerSettings(name, max_queue, max_tokens_limit or most_tokens, timeout_s)
    listener = None if keep_s else listen(host, port)
    loading_gate, url = LoadingGate(name), "" if listener is None else url_of(listener)

    def tell(event: str, name: str) -> None:
        if log != "none":
            click.echo(event_line(log, event, name), err=True)

    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        registration = _registered(name, url)
        if registration is not None:
            stack.callback(registration.close)
        server = ServerThread(
            listener, loading_gate, keys, is_loopback(host), limits.max_body_bytes,
            ConnectionLimits(max_connections), log,
            None if registration is None else registration.listener, allowed_origins,
        )  # fmt: skip
        stack.callback(server.stop)
        if url:
            click.echo(f"loading {name}; {url} says how far it is", err=True)
        starter = SystemStarter(registration, plans, options, bool(keep_s), tell)
        loader = ModelLoader(starter, allowed, free_bytes, tell)
        backends = []
        for plan in plans:
            settings = replace(limits, model_name=plan.name)
            backend = Backend(plan.system, settings, loader)
            loader.add(backend, plan.need)
            backends.append(backend)
        first = backends[0]
        first.attach(starter.start_first(first, loading_gate.show, stack))
        first.metrics.add_start()
        stack.callback(starter.close)
        models = ServedModels(backends)
        routes = SystemRoutes(models, keep_s or None, starter.publish)
        server.use(create_app(models, None if no_page else late_pages(models), routes))
        if url:
            names = ", ".join(backend.name for backend in models.backends)
            click.echo(f"hotcold serves {names} at {url} (API: {url}/v1)")
            sys.stdout.flush()
        _serve(server, starter, loader, models, routes, signals)


def _registered(name: str, url: str) -> Registration | None:
    """This server's place in the registry; one that listens at a port does without, and says so.

    Errors:  UsageError, OSError
    """
    from hotcold.jobs.running.registry import Registration
    from hotcold.jobs.running.served import tell_unlisted

    try:
        return Registration(name, url)
    except (UsageError, OSError) as problem:
        if not url:
            raise
        tell_unlisted(problem)
        return None


def _serve(
    server: ServerThread,
    starter: SystemStarter,
    loader: ModelLoader,
    models: ServedModels,
    routes: SystemRoutes,
    signals: Signals,
) -> None:
    """Answer until a signal comes, or nobody asks any more; then finish running requests.

    Another signal ends these, too.
    Errors:  ServiceError where the only system ends by itself, or Ray
    """

    def poll() -> None:
        lost = starter.lost()
        if lost and len(models.backends) == 1:
            raise lost[0][1]
        starter.require_ray()
        for backend, problem in lost:
            server.begin(loader.drop(backend, str(problem)))
        if routes.left_s == 0:
            raise _IdleError

    with suppress(_IdleError):
        signals.wait(poll)
    starter.unregister_all()  # before a command that found it is refused
    server.refuse_new()

    def num_running() -> int:
        """The API's and the page's."""
        backends = models.backends
        return sum(max(one.num_active, _num_at(one, len(backends) < 2)) for one in backends)

    if (count := num_running()) > 0:
        click.echo(
            f"finishing {count} request{'s' if count > 1 else ''}; Ctrl-C again stops at once",
            err=True,
        )
        signals.wait_while(lambda: num_running() > 0)
    starter.close()
    server.stop(_LAST_BYTES_S if signals.count < 2 else 0.0)


class _IdleError(Exception):
    """Nobody has asked for as long as the server stays."""


def _num_at(backend: Backend, is_only: bool) -> int:
    """Requests of a model's driver; 0 where it has failed.

    Errors:  ServiceError if it is the only model
    """
    try:
        load = backend.call("driver_load")
    except ServiceError:
        if is_only and backend.is_loaded:
            raise
        return 0
    return int(load.num_running + load.num_waiting)


def check_keys(host: str, keys: tuple[str, ...], local: bool) -> None:
    """Raise UsageError for keys that anybody might guess, or none where others can connect."""
    if not local and not keys:
        raise UsageError(
            f"at {host} other machines can connect: give --api-key or HOTCOLD_API_KEY, or listen "
            "at 127.0.0.1"
        )
    from hotcold.ui.keys import MIN_KEY_CHARS

    if any(len(key) < MIN_KEY_CHARS for key in keys):
        raise UsageError(
            f"an API key has at least {MIN_KEY_CHARS} characters, so that nobody guesses it; "
            "`openssl rand -hex 24` prints one"
        )
    if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise UsageError("an API key must be printable ASCII without blanks")
