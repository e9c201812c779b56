"""Arguments of a call as models write them, read into JSON as they come."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from typing import Any, NamedTuple

_KINDS = ("string", "number", "integer", "boolean", "null", "array", "object")
_ANY = frozenset(_KINDS)
_KIND_OF = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
            dict: "object", type(None): "null"}  # fmt: skip
_MAX_DEPTH = 20
_TEXT = frozenset(("string",))
_ALIASES = {"str": "string", "text": "string", "int": "integer", "float": "number",
            "bool": "boolean", "list": "array", "dict": "object"}  # fmt: skip


class Read(NamedTuple):
    """What is certain of a further piece of arguments."""

    length: int  # characters of it
    json: str  # what they say


class Form(ABC):
    """How a syntax writes the arguments of a call."""

    first = r"\{"  # a pattern of what they begin with

    @property
    def marks(self) -> str:
        """Text that holds its control tokens."""
        return ""

    @abstractmethod
    def reader(self, schema: Any = None) -> ArgumentsReader:
        """Reads the arguments of one call; `schema` gives text its types."""

    @abstractmethod
    def written(self, arguments: Mapping[str, Any]) -> str:
        """Arguments as a model writes them."""


class ArgumentsReader(ABC):
    """Reads the arguments of one call out of an answer's text, as it comes.

    What was read joins to JSON, however the text is cut.
    """

    def __init__(self) -> None:
        self.has_ended = False

    @abstractmethod
    def push(self, text: str) -> Read:
        """Read what is certain of `text`, which begins where the last one was read to."""


def types_of(schema: Any, root: Any = None) -> frozenset[str]:
    """The names of JSON's types that a schema lets a value have; `root` holds its $defs."""
    return _types_of(schema, root, set(), 0) or _ANY


def _types_of(schema: Any, root: Any, seen: set[str], depth: int) -> frozenset[str]:
    """As `types_of`; none of a $ref that was `seen`."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return _ANY
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(_KIND_OF.get(type(value), "string") for value in values) or _ANY
    given = schema.get("type")
    if given is not None:
        named = given if isinstance(given, list) else [given]
        known = (str(one).lower() for one in named)
        found = frozenset(_ALIASES.get(one, one) for one in known) & _ANY
        return found or _ANY
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        if reference in seen:
            return frozenset()
        seen.add(reference)
        target = root
        for key in reference[2:].split("/"):
            target = target.get(key) if isinstance(target, Mapping) else None
        return _types_of(target, root, seen, depth + 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list) and parts:
            return frozenset().union(*(_types_of(one, root, seen, depth + 1) for one in parts))
    if isinstance(parts := schema.get("allOf"), list) and parts:
        sets = [_types_of(one, root, seen, depth + 1) or _ANY for one in parts]
        return frozenset.intersection(*sets)
    return frozenset(("object",)) if "properties" in schema else _ANY


def as_json(text: str, types: frozenset[str]) -> str:
    """A value that was written without quotes, as JSON of one of these types."""
    if types == _TEXT:
        return _quoted(text)
    given = _PYTHON.get(text.strip(), text.strip())
    try:
        value = json.loads(given, parse_constant=_no_number)
        kind = _KIND_OF[type(value)]
    except (ValueError, RecursionError):
        return _quoted(text)
    fits = kind in types or (kind == "integer" and "number" in types)
    return given if (fits and kind != "string") or "string" not in types else _quoted(text)


_PYTHON = {"True": "true", "False": "false", "None": "null"}


def _no_number(text: str) -> Any:
    raise ValueError(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _held(text: str, mark: str) -> int:
    """Characters at the end of `text` that may begin `mark`, which it does not hold."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in lengths if text.endswith(mark[:size])), 0)


class _Json(Form):
    """A JSON object."""

    def reader(self, schema: Any = None) -> ArgumentsReader:
        """Its text is JSON as it is."""
        return _JsonReader()

    def written(self, arguments: Mapping[str, Any]) -> str:
        """JSON on one line."""
        return json.dumps(arguments, ensure_ascii=False)


class _JsonReader(ArgumentsReader):
    """Finds the end of a JSON value that begins with a brace or bracket."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._in_string = self._is_escaped = False

    def push(self, text: str) -> Read:
        """Read up to the end of the object."""
        for place, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = char == "\\", char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.has_ended = True
                    return Read(place + 1, text[: place + 1])
        return Read(len(text), text)


@dataclass(frozen=True)
class Tagged(Form):
    """Each argument between marks: before the key, before the value, after it.

    A value is text where the schema says string, and JSON otherwise. A blank stands for white
    space, if any, a tab for one blank; KIND for true where the value is text, and false.
    """

    before_key: str
    before_value: str
    after_value: str
    are_lines: bool = False  # a new line on each side is none of the value's
    around: tuple[str, str] = ("", "")  # may stand around text, and do where it holds marks
    first = r"\S"

    @property
    def marks(self) -> str:
        """All marks."""
        return f"{self.before_key} {self.before_value} {self.after_value}"

    @cached_property
    def head(self) -> re.Pattern[str]:
        """What comes before a value (`key`, `kind`), or as much of it as the text has."""
        key = self.before_key.replace("\t", " ")
        units = [r"\s*", *map(re.escape, key), r"(?P<key>[^<>\"\n]+)"]
        before, _, after = self.before_value.partition("KIND")
        for part in (before, after):
            blanks = {" ": r"\s*", "\t": "\\ "}
            units += [blanks.get(char) or re.escape(char) for char in part]
            if part is before and after:
                units.append("(?P<kind>true|false)")
        found = "(?P<whole>)"
        for unit in reversed(units):
            if unit == r"\s*":
                found = unit + found
            elif unit.startswith("(?P<kind>"):
                found = rf"(?:t?r?u?\Z|f?a?l?s?\Z|{unit}{found})"
            else:
                found = rf"(?:\Z|{unit}{found})"
        return re.compile(found)

    def reader(self, schema: Any = None) -> ArgumentsReader:
        """Strings are told as they come, other values once they are whole."""
        return _TaggedReader(self, schema)

    def written(self, arguments: Mapping[str, Any]) -> str:
        """An argument a line."""
        return "\n".join(starmap(self._argument, arguments.items()))

    def _argument(self, key: str, value: Any) -> str:
        is_text, line = isinstance(value, str), "\n" if self.are_lines else ""
        before = self.before_value.replace("KIND", "true" if is_text else "false")
        before = before.replace("> <", ">\n<")
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        if is_text and self.around[0] and re.search(r"[<&\n]", text):
            text = text.join(self.around)
        told = f"{self.before_key}{key}{before}".replace("\t", " ")
        return f"{told}{line}{text}{line}{self.after_value}"


class _TaggedReader(ArgumentsReader):
    def __init__(self, form: Tagged, schema: Any) -> None:
        super().__init__()
        self._form, self._schema = form, schema
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._types: frozenset[str] | None = None  # of the value that has begun
        self._value: list[str] = []  # of it, not told yet
        self._is_first_piece = True  # nothing of it has come
        self._end = form.after_value
        self._num_values = 0

    def push(self, text: str) -> Read:
        """Read keys and values up to what is no key."""
        at, told = 0, ""
        while not self.has_ended:
            found = self._value_in(text[at:]) if self._types else self._key_in(text[at:])
            at, told = at + found.length, told + found.json
            if not found.length and not self.has_ended:
                break
        return Read(at, told)

    def _key_in(self, text: str) -> Read:
        match = self._form.head.match(text)
        if match is None:
            self.has_ended = True
            return Read(0, "}" if self._num_values else "{}")
        if match["whole"] is None:
            return Read(0, "")
        key, kind = match["key"], match.groupdict().get("kind")
        types = types_of(self._properties.get(key), self._schema)
        if kind is not None:
            types = _TEXT if kind == "true" else types - _TEXT or _ANY
        self._types, self._is_first_piece, self._end = types, True, self._form.after_value
        before = ", " if self._num_values else "{"
        self._num_values += 1
        opening = '"' if types == _TEXT else ""
        return Read(match.end(), f"{before}{_quoted(key)}: {opening}")

    def _value_in(self, text: str) -> Read:
        """More of a value, or all that is left of it."""
        begin, behind = self._form.around
        if self._is_first_piece and begin:
            if begin.startswith(text):
                return Read(0, "")
            self._is_first_piece = False
            if text.startswith(begin):
                self._end = behind + self._form.after_value
                return Read(len(begin), "")
        mark, end = self._end, text.find(self._end)
        size = end if end >= 0 else len(text) - _held(text, mark)
        if self._form.are_lines and end < 0 and text[:size].endswith("\n"):
            size -= 1
        if self._form.are_lines and end < 0 and self._is_first_piece and not text[:size]:
            return Read(0, "")
        piece = text[:size]
        if self._form.are_lines:
            piece = piece.removeprefix("\n") if self._is_first_piece and piece else piece
            piece = piece.removesuffix("\n") if end >= 0 else piece
        self._is_first_piece = self._is_first_piece and not size
        told = ""
        if self._types == _TEXT:
            told = _quoted(piece)[1:-1] + ('"' if end >= 0 else "")
        else:
            self._value.append(piece)
            if end >= 0:
                told = as_json("".join(self._value), self._types or _ANY)
        if end < 0:
            return Read(size, told)
        self._types, self._value = None, []
        return Read(end + len(mark), told)


class _Gemma(Form):
    """{key:value,…} with strings between marks: Gemma 4."""

    quote = '<|"|>'

    @property
    def marks(self) -> str:
        """What stands around strings."""
        return self.quote

    def reader(self, schema: Any = None) -> ArgumentsReader:
        """Types are those that are written."""
        return _GemmaReader()

    def written(self, arguments: Mapping[str, Any]) -> str:
        """Keys in order."""
        return self._value(arguments)

    def _value(self, value: Any) -> str:
        if isinstance(value, Mapping):
            keys = sorted(value, key=str.lower)
            return "{" + ",".join(f"{key}:{self._value(value[key])}" for key in keys) + "}"
        if isinstance(value, list):
            return f"[{','.join(map(self._value, value))}]"
        return f"{self.quote}{value}{self.quote}" if isinstance(value, str) else json.dumps(value)


class _GemmaReader(ArgumentsReader):
    def __init__(self) -> None:
        super().__init__()
        self._open: list[str] = []  # braces and brackets
        self._is_key = False  # a key comes next, or goes on
        self._in_string = False
        self._word = ""  # a key, a number or a name that may go on

    def push(self, text: str) -> Read:
        """Read up to the end of the object."""
        at, told = 0, ""
        quote = _Gemma.quote
        while at < len(text) and not self.has_ended:
            if self._in_string:
                end = text.find(quote, at)
                size = end if end >= 0 else len(text) - _held(text[at:], quote)
                told += _quoted(text[at:size])[1:-1]
                at = size
                if end < 0:
                    break
                at, told, self._in_string = end + len(quote), told + '"', False
            elif quote.startswith(text[at : at + len(quote)]):
                if len(text) - at < len(quote):
                    break
                at, told, self._in_string = at + len(quote), told + '"', True
            else:
                told += self._char(text[at])
                at += 1
        return Read(at, told)

    def _char(self, char: str) -> str:
        """What one character outside of strings says."""
        word = self._word
        if char == ":" and self._is_key:
            self._word, self._is_key = "", False
            return f"{_quoted(word.strip())}: " if word.strip() else ": "
        if char in "{[":
            self._open.append(char)
            self._is_key = char == "{"
            return char
        if char in "}],":
            self._word = ""
            told = as_json(word, _ANY - _TEXT) if word.strip() and not self._is_key else ""
            if char == ",":
                self._is_key = self._open[-1:] == ["{"]
                return f"{told}, "
            self._open = self._open[:-1]
            self._is_key, self.has_ended = False, not self._open
            return told + char
        self._word += char
        return ""


class _Keywords(Form):
    """key=value, … as Python has them, with values in JSON, or Python's True, False, None."""

    first = r"\S"

    def reader(self, schema: Any = None) -> ArgumentsReader:
        """Types are those that are written."""
        return _KeywordsReader()

    def written(self, arguments: Mapping[str, Any]) -> str:
        """With values in JSON."""
        told = (f"{key}={json.dumps(one, ensure_ascii=False)}" for key, one in arguments.items())
        return ", ".join(told)


class _KeywordsReader(ArgumentsReader):
    _KEY = re.compile(r"[\s,]*(?P<key>[^\s,=()]+)\s*=\s*(?=\S)")
    _END = re.compile(r"\s*\)")

    def __init__(self) -> None:
        super().__init__()
        self._value: list[str] | None = None  # that has begun
        self._depth = 0
        self._quote = ""  # of the string that it is in
        self._is_escaped = False
        self._num_values = 0

    def push(self, text: str) -> Read:
        """Read up to the parenthesis that ends them."""
        at, told = 0, ""
        while at < len(text) and not self.has_ended:
            if self._value is None:
                if self._END.match(text, at):
                    self.has_ended = True
                    told += "}" if self._num_values else "{}"
                    break
                match = self._KEY.match(text, at)
                if match is None:
                    break
                told += f"{', ' if self._num_values else '{'}{_quoted(match['key'])}: "
                self._value, at = [], match.end()
                self._num_values += 1
            elif self._goes_on(text[at]):
                self._value.append(text[at])
                at += 1
            else:
                told += as_json("".join(self._value), _ANY - _TEXT)
                self._value = None
        return Read(at, told)

    def _goes_on(self, char: str) -> bool:
        """Whether a character belongs to the value."""
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == self._quote:
                self._quote = ""
            return True
        if self._depth == 0 and char in ",)":
            return False
        self._quote = char if char in "\"'" else ""
        self._depth += (char in "[{(") - (char in "]})")
        return True


JSON, GEMMA, KEYWORDS = _Json(), _Gemma(), _Keywords()
