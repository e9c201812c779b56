"""What the door asks of a replica, and replicas tell of themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from hotcold.actors.protocol.messages import GenerateRequest

Identity = str  # of a system's arithmetic: systems of one identity choose the same tokens


@dataclass(frozen=True)
class Order:
    """A request, or the rest of one that another replica has begun.

    identity: of the replica that began it; "": any may answer
    keys: of the prompt's pages, by which the router knows beginnings
    """

    request: GenerateRequest
    identity: Identity
    keys: list[bytes]


class Facts(TypedDict):
    """What stays as it is while a replica lives."""

    identity: Identity
    share_tokens: int  # what a beginning that prompts share is a multiple of; 0: nothing is
    num_pages: int  # of the KV cache
    num_parallel: int  # requests that run at once


class Speeds(TypedDict):
    """As measured of a replica's last answers; seconds."""

    token_s: float  # a prompt's token that was not in the KV cache
    answer_s: float  # a whole answer
