"""Which of Gradio's routes the page needs: all others are refused, those of later versions too.

Some of them would be ways out of this host or into it: `file=https://…` fetches any address,
`proxy=` asks others, uploads and links are kept as files.
"""

import re

from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ui.api.errors import ApiError

_FILE = r"[\w@.-]+(/[\w@.-]+)*"
_ALLOWED = {
    "GET": re.compile(
        rf"/|/config|/theme\.css|/favicon\.ico|/(assets|static)/{_FILE}"
        r"|/gradio_api/(queue/data|heartbeat/\w+)"
    ),
    "HEAD": re.compile("/"),
    "POST": re.compile(r"/gradio_api/(component_server/?|queue/join|run/\w+)"),
}


def is_allowed(method: str, path: str) -> bool:
    """Whether the page needs what `method` asks of `path`."""
    allowed = _ALLOWED.get(method)
    return allowed is not None and allowed.fullmatch(path) is not None and "/.." not in path


class PageRoutes:
    """Passes on to Gradio's application what the page needs."""

    def __init__(self, app: ASGIApp) -> None:
        """`app` is Gradio's."""
        self._app = app
        # Gradio compresses scripts and styles, and not the page, which holds all that is in it.
        self._compressed = GZipMiddleware(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. Errors: ApiError 404."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # as from where it is mounted
        if scope["type"] != "http" or not is_allowed(scope["method"], path):
            raise ApiError(404, "the page has nothing here", code="route_refused")
        app = self._compressed if path == "/" else self._app
        await app(scope, receive, send)
