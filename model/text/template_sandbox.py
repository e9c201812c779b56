"""The Jinja2 sandbox that chat templates run in: they are code that came with a download.

Jinja2 keeps a template from reaching the machine; the subprocess that this runs in limits its time
and memory (`model/text/subprocess_worker.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2.meta
from jinja2 import Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

from hotcold.model.text.subprocess_worker import Handler, RefusedError

MAX_TEXT = 1 << 24  # characters of a conversation

KNOWS_TOOLS = b"tools"


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with the functions and filters that transformers gives to templates."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Lists may grow, as some templates want it: all that a template has is its own."""
        grows = isinstance(obj, list) and attr in ("append", "pop")
        return grows or super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Refuse an unsafe attribute at once: jinja2 itself would print nothing for it."""
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is unsafe")


class _Generation(Extension):
    """Accepts {% generation %} blocks, which mark text for training, as what they contain."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """The type's two uses, without what leads on from a type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja2's, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as the base class has it: `self` is a name
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _require_plain_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_plain_name(name)
        super().__setitem__(name, value)


def _require_plain_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace holds no {name!r}")


def _tojson(
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


def _raise_exception(message: str) -> None:
    raise RefusedError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def start(text: bytes) -> tuple[Handler, bytes]:
    """Return the subprocess's handler: a template's text, UTF-8, rendered with variables, JSON.

    The facts are KNOWS_TOOLS where the template reads `tools`.
    Errors:  ValueError where it is no template
    """
    environment = ChatEnvironment()
    source = text.decode("utf-8", "surrogatepass")
    try:
        template = environment.from_string(source)
        names = jinja2.meta.find_undeclared_variables(environment.parse(source))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except SyntaxError as problem:  # in the Python code that jinja2 made of it
        raise ValueError(f"it is nested too deeply: {problem.msg}") from None

    def render(variables: bytes) -> bytes:
        found = template.render(json.loads(variables))
        if len(found) > MAX_TEXT:
            raise ValueError(f"makes more than {MAX_TEXT} characters")
        return found.encode("utf-8", "surrogatepass")

    return render, KNOWS_TOOLS if "tools" in names else b""
