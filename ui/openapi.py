"""The API's description: `/openapi.json`."""

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"


def body_of(schema: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra`: its body, whose schema `add_description` is given."""
    reference = {"$ref": _REF.format(model=schema.__name__)}
    content = {"application/json": {"schema": reference}}
    return {"requestBody": {"required": True, "content": content}}


def add_description(app: FastAPI, bodies: Iterable[type[BaseModel]]) -> None:
    """Add the route to `app`, after all others, whose bodies are of these schemas."""
    described = get_openapi(title="hotcold", version="1", routes=app.routes)
    parts = described.setdefault("components", {}).setdefault("schemas", {})
    _, made = models_json_schema([(one, "validation") for one in bodies], ref_template=_REF)
    parts.update(made["$defs"])

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(described)
