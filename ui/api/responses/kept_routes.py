"""GET and DELETE of kept responses, and the items of their input."""

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from hotcold.ui.api.errors import ApiError
from hotcold.ui.api.responses.kept import KeptResponses
from hotcold.ui.api.route import JsonAnswer

_MOST_ITEMS = 100
_SOME_ITEMS = 20


def add_kept(app: FastAPI, kept: KeptResponses) -> None:
    """Add the routes to `app`."""

    @app.get("/v1/responses/{response_id}")
    async def kept_response(request: Request, response_id: str) -> Response:
        """A response that is kept."""
        for name in ("stream", "starting_after"):
            if request.query_params.get(name, "false") != "false":
                raise ApiError(400, f"{name} is not supported here; leave it out", param=name)
        return Response(kept.found(response_id).response, media_type="application/json")

    @app.delete("/v1/responses/{response_id}")
    async def forget_response(response_id: str) -> dict[str, Any]:
        """Forget a response; those that continue it stay."""
        kept.remove(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(request: Request, response_id: str) -> Response:
        """The items that a kept response answers, the last first unless `order` is asc."""
        given = request.query_params
        turn = kept.found(response_id)
        items = await asyncio.to_thread(lambda: turn.input)
        order = given.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(400, "order must be asc or desc", param="order")
        if order == "desc":
            items.reverse()
        limit = given.get("limit", str(_SOME_ITEMS))
        is_whole = limit.isascii() and limit.isdecimal() and len(limit) < 10
        if not is_whole or not 1 <= int(limit) <= _MOST_ITEMS:
            text = f"limit must be a whole number from 1 to {_MOST_ITEMS}"
            raise ApiError(400, text, param="limit")
        after = given.get("after")
        if after is not None:
            places = [place for place, item in enumerate(items) if item["id"] == after]
            if not places:
                raise ApiError(400, f"after: there is no item {after[:100]!a}", param="after")
            items = items[places[0] + 1 :]
        shown = items[: int(limit)]
        ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
        more = {"has_more": len(items) > len(shown)}
        return JsonAnswer({"object": "list", "data": shown, **ends, **more})
