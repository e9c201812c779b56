"""Routes that answer a body by a model: a table for each API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import Response

from hotcold.ui.api import sse
from hotcold.ui.api.answer import json_answer
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.errors import as_api_error
from hotcold.ui.api.fields import Request as Body
from hotcold.ui.api.schemas import parse
from hotcold.ui.openapi import body_of

Choose = Callable[[Request, Any], Backend]  # the model of a request and its body


class Route(NamedTuple):
    """POST of a body to a path."""

    path: str
    schema: type[Body]
    # Gives a Response, or JSON; its name and docstring describe the route. Errors of any kind.
    answer: Callable[[Backend, Any], Coroutine[Any, Any, Any]]
    also: tuple[str, ...] = ()  # further paths, which no description has


def add_routes(app: FastAPI, routes: Iterable[Route], choose: Choose) -> None:
    """Add them to `app`. Errors of `choose`: ApiError."""
    for route in routes:
        for path in (route.path, *route.also):
            app.add_api_route(
                path,
                _answering(route, choose),
                methods=["POST"],
                name=route.answer.__name__,
                description=route.answer.__doc__,
                include_in_schema=path == route.path,
                openapi_extra=body_of(route.schema),
            )


def _answering(route: Route, choose: Choose) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        body = parse(route.schema, await request.body())
        work = route.answer(choose(request, body), body)
        try:
            found = await sse.unless_gone(request.receive, work)
        except sse.ClientGoneError:
            raise
        except Exception as error:
            raise as_api_error(error, body.prompt_field) from error
        return found if isinstance(found, Response) else await json_answer(found)

    return answer
