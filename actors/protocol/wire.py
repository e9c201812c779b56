"""Requests and events as lines of JSON, between a server and this library's own clients.

Numbers keep every bit; what is minus infinity is so, which Python's JSON knows.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from hotcold.actors.protocol.messages import (
    GenerateRequest,
    Generation,
    Grammar,
    TokenEvent,
    TokenLogprob,
)
from hotcold.model.sampling import SamplingParams

_LOGPROBS = ("logprobs", "prompt_logprobs")


def as_line(values: dict[str, Any]) -> bytes:
    """Values as a line in ASCII."""
    return json.dumps(values).encode() + b"\n"


def unknown_field(request: dict[str, Any]) -> str:
    """The first key of a request's JSON that is no field of it; "" where all are."""
    for kind, values in (
        (GenerateRequest, request),
        (SamplingParams, request.get("sampling")),
        (Grammar, request.get("grammar")),
    ):
        known = {field.name for field in fields(kind)}
        if unknown := [key for key in values or () if key not in known]:
            return unknown[0]
    return ""


def event_values(event: TokenEvent) -> dict[str, Any]:
    """An event as JSON; the fields that are empty are left out."""
    found = {field.name: getattr(event, field.name) for field in fields(event)}
    for name in _LOGPROBS:
        found[name] = [(one.token_id, one.logprob, one.top, one.at) for one in found[name]]
    if event.result is not None:
        found["result"] = asdict(event.result)
    kept = {name for name, value in found.items() if value or name == "text"}
    kept |= {"shown"} if event.shown is not None else set()
    return {name: value for name, value in found.items() if name in kept}


def event_of(values: dict[str, Any]) -> TokenEvent:
    """The event of `event_values`. Errors: TypeError, ValueError, KeyError for what is none."""
    found = dict(values)
    for name in _LOGPROBS:
        found[name] = tuple(TokenLogprob(*one) for one in found.get(name, ()))
    if "result" in found:
        found["result"] = Generation.of_values(found["result"])
    found["parts"] = tuple((str(kind), int(length)) for kind, length in found.get("parts", ()))
    return TokenEvent(**found | {"token_ids": tuple(found.get("token_ids", ()))})
