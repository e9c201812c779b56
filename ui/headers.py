"""What browsers are told about every answer: what it may load, who may show it, where it may go."""

from starlette.types import Message

# A model may write an image's address, and a browser would fetch it: nothing leaves this host.
# Gradio's page runs scripts and styles that are written in it.
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


def with_headers(message: Message) -> Message:
    """The start of an answer with these headers, whatever it says of them; others as they are."""
    if message["type"] != "http.response.start":
        return message
    given = [(name, value) for name, value in message["headers"] if name.lower() not in _HEADERS]
    return {**message, "headers": [*given, *_HEADERS.items()]}
