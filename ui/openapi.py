"""The API's description: `/openapi.json`, and `/docs`, a page without scripts."""

from collections.abc import Iterable
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"
_STYLE = """
:root { color-scheme: light dark; }
body { max-width: 56rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.5 system-ui, sans-serif; }
h2 { margin-top: 2rem; font-size: 1.1rem; font-family: ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: 0.15rem 1rem 0.15rem 0; }
td { border-top: 1px solid #8884; }
"""


def body_of(schema: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra`: its body, whose schema `add_description` is given."""
    reference = {"$ref": _REF.format(model=schema.__name__)}
    content = {"application/json": {"schema": reference}}
    return {"requestBody": {"required": True, "content": content}}


def add_description(app: FastAPI, bodies: Iterable[type[BaseModel]]) -> None:
    """Add the two routes to `app`, after all others, whose bodies are of these schemas."""
    described = get_openapi(title="hotcold", version="1", routes=app.routes)
    parts = described.setdefault("components", {}).setdefault("schemas", {})
    _, made = models_json_schema([(one, "validation") for one in bodies], ref_template=_REF)
    parts.update(made["$defs"])
    page = _page(described)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(described)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page)


def _page(described: dict[str, Any]) -> str:
    parts = [
        _section(path, method, route, described["components"]["schemas"])
        for path, methods in described["paths"].items()
        for method, route in methods.items()
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>hotcold: API</title><style>{_STYLE}</style></head><body><h1>API</h1>"
        '<p>OpenAI\'s clients work with it. <a href="/openapi.json">openapi.json</a> is the same '
        f"for programs.</p>{''.join(parts)}</body></html>"
    )


def _section(path: str, method: str, route: dict[str, Any], schemas: dict[str, Any]) -> str:
    about = route.get("description") or route.get("summary", "")
    title = f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(about)}</p>"
    if "requestBody" not in route:
        return title
    reference = route["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = schemas[reference.rsplit("/", 1)[1]]
    needed = schema.get("required", [])
    rows = (
        f"<tr><td><code>{escape(name)}</code>{' (needed)' if name in needed else ''}</td>"
        f"<td>{escape(_type_of(field))}</td></tr>"
        for name, field in schema["properties"].items()
    )
    return f"{title}<table><tr><th>field</th><th>value</th></tr>{''.join(rows)}</table>"


def _type_of(field: dict[str, Any]) -> str:
    """A field's type in words, such as "integer, 1 to 128"."""
    if "anyOf" in field:
        kinds = [each for each in field["anyOf"] if each.get("type") != "null"]
        return " or ".join(_type_of(each) for each in kinds)
    if "$ref" in field:
        return str(field["$ref"]).replace("__", "/").rsplit("/", 1)[1]  # without its module
    if "enum" in field:
        return " or ".join(map(str, field["enum"]))
    least, most = field.get("minimum"), field.get("maximum", field.get("exclusiveMaximum"))
    limits = f", {least:g} to {most:g}" if least is not None and most is not None else ""
    if field.get("type") == "array":
        return f"list of {_type_of(field.get('items', {}))}"
    return str(field.get("type", "anything")) + limits
