"""Whatever text is in whatever field of a request, the server answers others meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx

from hotcold.ui.api.served_models import ServedModels
from hotcold.ui.app import create_app
from tests.unit.ollama_routes import END, Client, make_backend

_LENGTH = 1 << 15  # characters
_MOST_S = 1.0  # of the processor's time, from one answer of /health to the next
_DEEPEST = 8
_SLOT = object()  # where a text goes
# Each is repeated, but for the last ones: schemas' patterns, regexes and grammars.
PARTS = (
    "1", "a", " ", "\\", '"\\', "(", "[", "a::=\n", "1111111111m",
)  # fmt: skip
TEXTS = (
    *(part * (_LENGTH // len(part)) + "\0" for part in PARTS),
    "1111111111m" * 9 + "x",
    "(" * 20 + "a+)+" * 20 + "b",
)
_USUAL: dict[str, Any] = {  # what a route needs besides
    "prompt": "a",
    "messages": [{"role": "user", "content": "a"}],
    "input": "a",
    "tokens": [1],
}


def _places(schema: dict[str, Any], parts: dict[str, Any], depth: int = 0) -> Iterator[Any]:
    """A value of the schema for each text that it may hold, with _SLOT in that text's place."""
    if depth > _DEEPEST:
        return
    if "$ref" in schema:
        yield from _places(parts[schema["$ref"].rpartition("/")[2]], parts, depth + 1)
        return
    for kind in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(kind, ()):
            yield from _places(one, parts, depth + 1)
    kind = schema.get("type", "" if schema.keys() & {"anyOf", "oneOf", "allOf"} else "any")
    if kind in ("string", "any"):
        yield _SLOT
    if kind == "array":
        yield from ([one] for one in _places(schema.get("items", {}), parts, depth + 1))
    if kind in ("object", "any"):
        properties = schema.get("properties", {})
        needed = {name: _sample(properties[name], parts) for name in schema.get("required", ())}
        usual = {name: value for name, value in _USUAL.items() if name in properties and not depth}
        for name, one in properties.items():
            for value in _places(one, parts, depth + 1):
                yield {**needed, **usual, name: value}
        if not properties:
            yield {"k": _SLOT}
            yield {"type": "string", "pattern": _SLOT}
            yield {"type": "object", "properties": {"k": {"type": "string", "format": _SLOT}}}


def _sample(schema: dict[str, Any], parts: dict[str, Any]) -> Any:
    """A value that the schema lets in."""
    while "$ref" in schema or "anyOf" in schema:
        if "anyOf" in schema:
            schema = schema["anyOf"][0]
        else:
            schema = parts[schema["$ref"].rpartition("/")[2]]
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    needed = {
        name: _sample(schema["properties"][name], parts) for name in schema.get("required", ())
    }
    return {"string": "a", "array": [], "object": needed, "boolean": True}.get(
        schema.get("type", "object"), 1
    )


def _with(value: Any, text: str) -> Any:
    if value is _SLOT:
        return text
    if isinstance(value, dict):
        return {name: _with(one, text) for name, one in value.items()}
    return [_with(one, text) for one in value] if isinstance(value, list) else value


def _requests(described: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Method, path and body of each request, with _SLOT in one place of the body or the path."""
    parts = described["components"]["schemas"]
    for path, methods in described["paths"].items():
        for method, route in methods.items():
            if "{" in path:
                yield method, path, None
            elif "requestBody" in route:
                schema = route["requestBody"]["content"]["application/json"]["schema"]
                yield from ((method, path, body) for body in _places(schema, parts))


async def _ask_all() -> tuple[int, list[tuple[float, str]]]:
    """How many places there are; beside all of a place, how long after another /health answered."""
    backend = make_backend(Client(END))
    backend.capacity = len(TEXTS)  # all of a place at once
    app = create_app(ServedModels([backend]))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    found: list[tuple[float, str]] = []
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", timeout=None
    ) as http:

        def ask(method: str, path: str, body: Any, text: str) -> asyncio.Task[httpx.Response]:
            where = path.partition("{")[0] + quote(text[:1000]) if body is None else path
            content = None if body is None else json.dumps(_with(body, text)).encode()
            return asyncio.create_task(http.request(method, where, content=content))

        asked = list(_requests((await http.get("/openapi.json")).json()))
        for request in asked:
            answers = asyncio.gather(*(ask(*request, text) for text in TEXTS))
            about = f"{request[0]} {request[1]} {json.dumps(_with(request[2], '...'))}"
            before = time.process_time()
            while not answers.done():
                await asyncio.sleep(0.001)
                assert (await http.get("/health")).status_code == 200
                found.append((time.process_time() - before, about))
                before += found[-1][0]
            assert all(one.status_code != 500 for one in answers.result()), about
    return len(asked), found


def test_no_text_of_any_field_holds_the_server_up() -> None:
    number, found = asyncio.run(_ask_all())
    assert number > 250 and len(found) >= number
    slow = {about for took, about in found if took > _MOST_S}
    if slow:  # what is slow by itself is so again
        slow &= {about for took, about in asyncio.run(_ask_all())[1] if took > _MOST_S}
    assert not slow, sorted(slow)[:20]
