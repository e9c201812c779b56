"""The chat page where a proxy ends TLS, as docs/api.md shows one: the browser knows https alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.e2e.page_server import served, served_page
from tests.e2e.page_visit import OTHER, TIMEOUT_MS, ask, wait_for_answer
from tests.e2e.stand_in import StandIn

KEY = "a-key-of-more-than-enough-letters"


def proxy_to(address: str) -> Any:
    """An ASGI app that passes requests on as Caddy does: the same Host, X-Forwarded-* added."""
    import httpx
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    client = httpx.AsyncClient(base_url=address, timeout=None)

    async def pass_on(request: Request) -> StreamingResponse:
        host = request.headers["host"]
        added = [("x-forwarded-proto", "https"), ("x-forwarded-host", host)]
        url = httpx.URL(path=request.url.path, query=request.url.query.encode())
        asked = client.build_request(
            request.method, url, headers=[*request.headers.items(), *added],
            content=await request.body(),
        )  # fmt: skip
        found = await client.send(asked, stream=True)

        async def content() -> AsyncIterator[bytes]:
            try:
                async for part in found.aiter_raw():
                    yield part
            finally:
                await found.aclose()

        answer = StreamingResponse(content(), found.status_code)
        answer.raw_headers = list(found.headers.raw)
        return answer

    return Starlette(routes=[Route("/{path:path}", pass_on, methods=["GET", "HEAD", "POST"])])


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the proxy, before a page that asks for a key."""
    import trustme

    folder = tmp_path_factory.mktemp("certificate")
    made = trustme.CA().issue_cert("localhost")
    made.private_key_pem.write_to_path(folder / "key.pem")
    made.cert_chain_pems[0].write_to_path(folder / "certificate.pem")
    files: dict[str, Any] = {
        "ssl_keyfile": folder / "key.pem",
        "ssl_certfile": folder / "certificate.pem",
    }
    with (
        served_page({"demo": StandIn()}, [KEY]) as behind,
        served(proxy_to(behind), **files) as port,
    ):
        yield f"https://localhost:{port}/"


def test_the_page_answers_behind_tls(browser: Any, address: str) -> None:
    told: list[str] = []
    context = browser.new_context(
        ignore_https_errors=True, http_credentials={"username": "any", "password": KEY}
    )
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.on("request", lambda request: told.append(request.url))
    page.on("pageerror", lambda error: told.append(f"error: {error}"))
    page.goto(address)
    page.wait_for_selector("body[data-chat=ready] #question textarea")
    ask(page, OTHER)
    assert wait_for_answer(page).strip()
    # Nothing went past the proxy, and nothing in the clear.
    assert [each for each in told if not each.startswith((address, "data:", "blob:"))] == []
    context.close()
