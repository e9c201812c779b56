"""What of the KV cache a request may have: its own client's, by key and salt."""

from contextvars import ContextVar
from typing import Annotated, Any

from pydantic import Field

from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.ui.api.fields import Request

# The client that the HTTP request in this context comes from: a digest of its key; "" without one.
# Clients have nothing in common, so that none learns by an answer's speed what others have asked.
client: ContextVar[str] = ContextVar("client", default="")


class Cached(Request):
    """The fields of requests whose prompts begin as earlier ones do."""

    cache: bool | None = None  # False: computed anew, and kept for no other request
    cache_salt: Annotated[str, Field(min_length=1, max_length=1000)] | None = None  # vLLM's

    def caching(self) -> dict[str, Any]:
        """The fields of a `GenerateRequest` that say the same."""
        return {"use_cache": self.cache is not False, "cache_salt": self.cache_salt or ""}


def of_client(request: GenerateRequest) -> str:
    """The salt of a request, apart from those of other clients."""
    return f"{client.get()}/{request.cache_salt}"
