"""The Jinja2 sandbox that chat templates run in: they are code that came with a download.

Jinja2 keeps a template from reaching the machine; limits here keep it from eating memory. Before an
operation that can make much of little, its result's size is estimated and must not exceed
MAX_TEXT; and everything that operations make during one rendering is added up, and must not exceed
MAX_SPENT. What remains is a factor: an item counted as a byte or two may take eight times that, so
a hostile template can take some hundred megabytes, until its time is over.
"""

from __future__ import annotations

import functools
import json
import math
import re
import threading
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from datetime import datetime
from typing import Any

from jinja2 import Undefined, nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

MAX_TEXT = 1 << 23
MAX_SPENT = 1 << 25
_MAX_INT_BITS = 1 << 12
_OBJECT_COST, _ITEM_COST, _SHOWN_ITEM = 64, 32, 8
_STEP_COST = 256  # of a loop
_COLLECTIONS = (list, tuple, set, frozenset, dict, KeysView, ValuesView, ItemsView)
# Filters and methods whose result may be as large as the product of what they are given.
_GROWING = {"batch", "center", "expandtabs", "indent", "join", "ljust", "replace", "rjust", "slice"}
_GROWING |= {"to_bytes", "tojson", "translate", "wordwrap", "zfill"}
_FORMATTING = {"format", "format_map"}
_COMPUTED_WIDTH = re.compile(r"\*|\{[^{}]*:[^{}]*\{")


class RefusedMessagesError(Exception):
    """What a template's own raise_exception(text) raises."""


class _Spent(threading.local):
    """What the current thread has spent; every rendering has a thread of its own."""

    size = 0


class _CodeGenerator(CodeGenerator):
    """Lets the environment see what jinja2 compiles to plain Python: ~, slices and literals."""

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self._write_call("environment.concat_values((", [*node.nodes], "))", frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Any) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        bounds = [node.arg.start, node.arg.stop, node.arg.step]
        parts = [part or nodes.Const(None) for part in bounds]
        self._write_call("environment.sliced(", [node.node, *parts], ")", frame)

    def visit_List(self, node: nodes.List, frame: Any) -> None:
        self.write("environment.spend(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:
        self.write("environment.spend(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Any) -> None:
        is_value = node.ctx == "load"
        self.write("environment.spend(" if is_value else "")
        super().visit_Tuple(node, frame)
        self.write(")" if is_value else "")

    def _write_call(self, start: str, parts: list[nodes.Expr], end: str, frame: Any) -> None:
        self.write(start)
        for part in parts:
            self.visit(part, frame)
            self.write(", ")
        self.write(end)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with limits on what a template makes. Errors: SecurityError beyond them."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._checked_output, **options)
        self._spent = _Spent()
        del self.globals["lipsum"], self.filters["round"]  # text, and powers of 10, of any size
        for name, function in self.filters.items():
            self.filters[name] = self._limited(name, function)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Refuse an unsafe attribute at once: printed, jinja2's own answer is silently empty."""
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is unsafe")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`. Errors: SecurityError for a power or a huge result."""
        if operator == "**":
            raise SecurityError("powers are not allowed")
        if isinstance(left, int) and isinstance(right, int):
            if operator == "*" and left.bit_length() + right.bit_length() > _MAX_INT_BITS:
                raise SecurityError("a product is too large")
        elif operator == "*":
            _require_small(_factor(left) * _factor(right))
        elif operator == "+":
            _require_small(_size(left) + _size(right))
        elif isinstance(left, str):
            _require_small(_formatted_size(left, [right]))
        return self.spend(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or a method of a value."""
        method = getattr(obj, "__wrapped__", obj)  # jinja2 wraps the methods that format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str | bytes | int):
            args = _require_small_result(name, [owner, *args], kwargs)[1:]
        return self.spend(super().call(context, obj, *args, **kwargs))

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop, each of which costs something, so that no loop is endless."""
        for item in items:
            self._spend_size(_STEP_COST)
            yield item

    def _parse(self, *args: Any) -> nodes.Template:
        template = super()._parse(*args)
        for loop in template.find_all(nodes.For):
            count = nodes.EnvironmentAttribute("counted", lineno=loop.lineno)
            loop.iter = nodes.Call(count, [loop.iter], [], None, None, lineno=loop.lineno)
        return template

    def concat(self, pieces: Iterable[str]) -> str:
        """Join the pieces of a template, a macro or a block."""
        return "".join(self.spend(piece) for piece in pieces)

    def concat_values(self, values: tuple[Any, ...]) -> str:
        """Compute a ~ b ~ c."""
        _require_small(sum(map(_size, values)))
        return self.spend("".join(map(str, values)))

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """Compute value[start:stop:step]."""
        return self.spend(value[start:stop:step])

    def spend(self, value: Any) -> Any:
        """Count a new value, which is returned."""
        size = _OBJECT_COST
        if isinstance(value, str | bytes):
            size += len(value)
        elif isinstance(value, _COLLECTIONS):
            size += _ITEM_COST * len(value)
        self._spend_size(size)
        return value

    def _spend_size(self, size: int) -> None:
        self._spent.size += size
        if self._spent.size > MAX_SPENT:
            raise SecurityError("the template makes too much text, or loops too often")

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # with jinja2's mark for those that take the environment
        def limited(*args: Any, **kwargs: Any) -> Any:
            args = _require_small_result(name, list(args), kwargs)
            return self.spend(function(*args, **kwargs))

        return limited

    @staticmethod
    def _checked_output(value: Any) -> Any:
        if not isinstance(value, str):
            _require_small(_size(value))
        return value


def _require_small(size: int) -> None:
    if size > MAX_TEXT:
        raise SecurityError("the template makes too large a text")


def _require_small_result(name: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Check what a filter or method is given. Iterators, which hide their size, become lists."""
    if name in _FORMATTING and isinstance(args[0], str):
        _require_small(_formatted_size(args[0], [*args[1:], *kwargs.values()]))
    elif name in _GROWING:
        args = [list(arg) if isinstance(arg, Iterator) else arg for arg in args]
        _require_small(math.prod(map(_factor, (*args, *kwargs.values()))))
    else:
        _require_small(max(map(_size, args), default=0))
    return tuple(args)


def _factor(value: Any) -> int:
    """How much larger `value` can make the result of a growing operation."""
    return max(1, abs(value)) if isinstance(value, int) else _size(value)


def _formatted_size(text: str, values: list[Any]) -> int:
    """A bound on the size of `text` with its fields filled in."""
    widths = [int(digits) for digits in re.findall(r"\d{1,9}", text)]
    if _COMPUTED_WIDTH.search(text):
        inner = [item for value in values if isinstance(value, tuple) for item in value]
        inner += [item for value in values if isinstance(value, dict) for item in value.values()]
        widths += [abs(value) for value in [*values, *inner] if isinstance(value, int)]
    num_fields = text.count("%") + text.count("{")
    return len(text) + num_fields * (max(widths, default=0) + sum(map(_size, values)))


def _size(value: Any) -> int:
    """About how many characters show `value` with all that it holds, at least 1.

    Counting ends soon after MAX_TEXT: what is small in memory may be endless to show.
    """
    total, pending = 0, [value]
    while pending and total <= MAX_TEXT:
        item = pending.pop()
        total += 1
        if isinstance(item, str | bytes):
            total += max(0, len(item) - 1)
        elif isinstance(item, range):
            total += len(item)
        elif isinstance(item, Namespace):
            return MAX_TEXT + 1  # it shows what it holds, but not how much that is
        elif isinstance(item, _COLLECTIONS):
            total += _SHOWN_ITEM * len(item)
            if total <= MAX_TEXT:
                pending.extend(item.items() if isinstance(item, dict) else item)
    return total


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

    def strftime_now(form: str) -> str:
        _require_small(_formatted_size(form, []))  # the C library reads widths too
        return datetime.now().strftime(form)

    environment = ChatEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
