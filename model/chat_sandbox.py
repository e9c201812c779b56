"""The Jinja2 sandbox that chat templates run in: they are code that came with a download."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from jinja2 import Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

MAX_PRODUCT = 1 << 20


class RefusedMessagesError(Exception):
    """What a template's own raise_exception(text) raises."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with a limit on the size of products such as 'a' * 10 ** 10."""

    intercepted_binops = frozenset(["*", "**"])

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Refuse an unsafe attribute at once: printed, jinja2's own answer is silently empty."""
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is unsafe")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`. Errors: SecurityError for a power or a huge product."""
        if operator == "**":
            raise SecurityError("powers are not allowed")
        for value, count in ((left, right), (right, left)):
            is_repeat = hasattr(value, "__len__") and isinstance(count, int)
            if is_repeat and len(value) * count > MAX_PRODUCT:
                raise SecurityError("a product is too large")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """Accepts {% generation %} blocks, which mark text for training, as what they contain."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def chat_environment() -> ChatEnvironment:
    """Return a sandbox with the functions and filters that transformers gives to templates."""

    def raise_exception(message: str) -> None:
        raise RefusedMessagesError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ChatEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
