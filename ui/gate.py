"""Filters every request first, by Host, Origin, key and size; adds security headers to answers."""

import asyncio
import base64
import binascii
import ipaddress
import math
import re
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotcold.model.errors import UsageError, shown
from hotcold.ui.api.cached import client
from hotcold.ui.api.errors import ApiError
from hotcold.ui.keys import Keys, client_of

BODY_S = 60.0  # from a request's head to the end of its body
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_OPEN_PATHS = ("/health", "/v1/health")
_ASKED_METHOD = "access-control-request-method"
_ORIGIN = re.compile(r"(([a-z][a-z0-9+.-]*)://[^\s/?#@*]+)/?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # which a browser leaves out
_WHOLE_ADDRESS = re.compile(rb"(?i:https?)://([^/]+)(/.*)?")  # as proxies are sent

# A model may write an image's address, which a browser would fetch: nothing leaves this host.
# Gradio's page has inline scripts and styles.
_POLICY = (
    "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; object-src 'none'; "
    "base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    b"content-security-policy": _POLICY.encode(),
    b"x-frame-options": b"DENY",
    b"x-content-type-options": b"nosniff",
    b"x-dns-prefetch-control": b"off",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
}


def with_headers(message: Message, more: dict[bytes, bytes]) -> Message:
    """An answer's start with the security headers and `more`; other messages unchanged."""
    if message["type"] != "http.response.start":
        return message
    added = _HEADERS | more
    given = [(name, value) for name, value in message["headers"] if name.lower() not in added]
    return {**message, "headers": [*given, *added.items()]}


def origin_of(address: str) -> str:
    """What a browser sends as the Origin of a page there.

    Errors:  UsageError where the address is more than a scheme, a host and a port
    """
    found = _ORIGIN.fullmatch(address.lower())
    if found is None:
        raise UsageError(
            f"{shown(address)} is no origin: give a scheme and a host, such as "
            "https://chat.example.org or app://obsidian.md"
        )
    return found[1].removesuffix(_DEFAULT_PORTS.get(found[2], ""))


def _readable_by(origin: str) -> dict[bytes, bytes]:
    """The headers by which a browser lets a page of that origin read an answer."""
    return {b"access-control-allow-origin": origin.encode("latin-1"), b"vary": b"Origin"}


def _may_send(headers: Headers) -> dict[str, str]:
    """The headers of the answer to a preflight."""
    wanted = headers.get("access-control-request-headers", "").lower().split(",")
    names = dict.fromkeys(("authorization", *(name.strip() for name in wanted)))
    found = {
        "access-control-allow-methods": "GET, HEAD, POST, DELETE",
        "access-control-allow-headers": ", ".join(filter(None, names)),
        "access-control-max-age": "600",
    }
    if "access-control-request-private-network" in headers:
        found["access-control-allow-private-network"] = "true"
    return found


def is_loopback(host: str) -> bool:
    """Whether an address to listen at can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Gate:
    """Passes allowed requests on to `app`, and answers others with an error in OpenAI's form.

    Without keys a web page elsewhere could make a browser send requests here, by a domain of its
    own that resolves to this machine (DNS rebinding): so the Host must be a local name. Another
    Origin is refused too, also with a key that the browser sends by itself as a password. Pages of
    the `origins` may ask, and read the answers.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[str],
        local: bool,
        max_body_bytes: int,
        origins: Sequence[str] = (),
    ) -> None:
        """`local`: the server listens at a loopback address; `origins` as `origin_of` writes them.

        With `keys` one of them is required, and any Host is allowed: a proxy on this machine may
        pass on requests for another name.
        """
        self._app = app
        self._keys = Keys(keys)
        self._local = local and not keys
        self._max_body_bytes = max_body_bytes
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        scope = _origin_form(scope)
        headers = Headers(scope=scope)
        is_allowed = headers.get("origin", "").lower() in self._origins
        readable = _readable_by(headers["origin"]) if is_allowed else {}
        limit = _BodyLimit(receive, send, self._max_body_bytes, readable)
        try:
            if self._is_preflight(scope, headers, is_allowed):
                answer = Response(status_code=204, headers=_may_send(headers))
                await answer(scope, limit.receive, limit.send)
                return
            client.set(client_of(given_key(headers)) if self._keys else "")
            await self._app(scope, limit.receive, limit.send)
        except ApiError as error:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": ""})
            elif not limit.has_answered:
                body, more = error.body_for(scope["path"]), {"connection": "close"}  # unread, maybe
                answer = JSONResponse(body, error.status, {**error.headers, **more})
                await answer(scope, limit.receive, limit.send)

    def _is_preflight(self, scope: Scope, headers: Headers, is_allowed: bool) -> bool:
        """Whether it is one, which has no key, once the request was checked. Errors: ApiError."""
        method = scope.get("method", "")
        is_preflight = method == "OPTIONS" and _ASKED_METHOD in headers
        if self._local and _name_of(headers.get("host", "")) not in _LOCAL_NAMES:
            raise ApiError(403, "this server answers to localhost alone", code="host_refused")
        by_password = False if is_preflight else self._require_key(scope, headers)
        is_guarded = is_preflight or self._local or by_password
        if is_guarded and not is_allowed and _is_of_another_page(method, headers):
            raise ApiError(
                403, "pages of other servers may not ask; `hotcold serve --origin` allows one",
                code="origin_refused",
            )  # fmt: skip
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "bodies are read as they are; send one without Content-Encoding")
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length[:20]) > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        return is_preflight

    def _require_key(self, scope: Scope, headers: Headers) -> bool:
        """Whether the key came as a password. Errors: ApiError 401, 429."""
        if not self._keys or scope["path"] in _OPEN_PATHS:
            return False
        address = (scope.get("client") or ("",))[0]
        if wait_s := self._keys.seconds_to_wait(address):
            seconds = math.ceil(wait_s)
            raise ApiError(
                429, f"too many wrong keys; try again in {seconds} s", "authentication_error",
                code="too_many_failures", headers={"Retry-After": str(seconds)},
            )  # fmt: skip
        given = given_key(headers)
        if not given or not self._keys.is_right(given, address):
            raise ApiError(
                401, "a key is needed: send it as 'Authorization: Bearer KEY'",
                "authentication_error", code="invalid_api_key",
                headers={"WWW-Authenticate": 'Basic realm="hotcold", charset="UTF-8"'},
            )  # fmt: skip
        return _kind_of(headers) == "basic"


class _BodyLimit:
    """Counts the bytes and the seconds of a request's body, whatever its headers say."""

    def __init__(
        self, receive: Receive, send: Send, most_bytes: int, headers: dict[bytes, bytes]
    ) -> None:
        """`headers` are added to the answer."""
        self.has_answered = False
        self._headers = headers
        self._receive = receive
        self._send = send
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._deadline: float | None = asyncio.get_running_loop().time() + BODY_S

    async def receive(self) -> Message:
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408, f"the request did not come whole within {BODY_S:g} s; send it again",
                "timeout", headers={"connection": "close"},
            ) from None  # fmt: skip
        if not message.get("more_body"):  # all that is left to come is that the client leaves
            self._deadline = None
        self._num_bytes += len(message.get("body") or b"")
        if message["type"] == "http.request" and self._num_bytes > self._most_bytes:
            raise too_large(self._most_bytes)
        return message

    async def send(self, message: Message) -> None:
        self.has_answered = True
        await self._send(with_headers(message, self._headers))


def _origin_form(scope: Scope) -> Scope:
    """The request with a path as its target; an absolute URL's host becomes the Host."""
    match = _WHOLE_ADDRESS.fullmatch(scope.get("raw_path") or b"")
    if match is None:
        return scope
    host, path = match[1], match[2] or b"/"
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"host"]
    return {
        **scope,
        "path": unquote(path.decode("ascii", "replace")),
        "raw_path": path,
        "headers": [(b"host", host), *headers],
    }


def too_large(most_bytes: int) -> ApiError:
    """413: larger than the server reads."""
    return ApiError(413, f"the request is larger than {most_bytes} bytes; send less")


def _name_of(host: str) -> str:
    """The name in a Host header, without the port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_of_another_page(method: str, headers: Headers) -> bool:
    """Whether a browser says that another site's page sent it; following a link is allowed."""
    origin = headers.get("origin")
    if origin is not None:
        return origin.lower().partition("://")[2] != headers.get("host", "").lower()
    # Requests for a page's images and frames have no Origin.
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return False
    fetched_for = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest"))
    return method != "GET" or fetched_for != ("navigate", "document")


def given_key(headers: Headers) -> bytes:
    """The key that came with a request, also as a password; empty where none did."""
    value = headers.get("authorization", "").partition(" ")[2]
    if _kind_of(headers) == "basic":
        return _password(value)
    return value.strip().encode("latin-1") if _kind_of(headers) == "bearer" else b""


def _kind_of(headers: Headers) -> str:
    return headers.get("authorization", "").partition(" ")[0].lower()


def _password(encoded: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""
