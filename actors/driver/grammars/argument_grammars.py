"""Rules in Lark of a call's arguments, in each form that a syntax writes them in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from llguidance import LLMatcher

from hotcold.actors.driver.grammars.json_schema import (
    WHOLE,
    enforced,
    is_possible_pattern,
    problem_with,
)
from hotcold.actors.driver.grammars.masks import with_usual_classes
from hotcold.model.text.call_arguments import GEMMA, KEYWORDS, Form, Tagged, types_of

# A name for rules -> them, of which `arguments_NAME` is the first.
Rules = Callable[[str], str]

# Arguments are on one line: small models may write white space for ever.
_BLANKS = " ?"
_GAP = r"[ \t\r\n]{0,4}"
_ANY_TEXT = r"(.|\n)*"
_ANY_KEY = r"[a-zA-Z0-9_.-]{1,100}"  # without the colon that ends it in Gemma's form
_MAX_DEPTH = 12  # of objects that are not JSON
_MAX_RULES = 400  # of one function
_MAX_CACHED = 1 << 14  # characters of a schema whose rules are cached
# Of a string that stands without quotes: what a pattern of its own enforces.
_OF_STRINGS = frozenset(("enum", "const", "pattern", "minLength", "maxLength"))
_SAY_NOTHING = frozenset(
    ("type", "description", "title", "default", "examples", "nullable", "deprecated", "readOnly",
     "writeOnly", "$comment", "x-guidance")
)  # fmt: skip
_SPECIAL = frozenset("\\/.^$|?*+()[]{}\"'#&-~")
# Of objects and lists whose members no schema describes.
_ANY_PLAIN = {"type": ["string", "number", "boolean", "null"]}
_MAX_LENGTH = 2000  # of a string, that is counted


def argument_rules(form: Form, parameters: Any) -> tuple[Rules, list[str]]:
    """Rules of the arguments that fit a schema, and its keywords that they need not fit."""
    found = enforced(parameters, is_object=True)
    if not (isinstance(form, Tagged) or form in (GEMMA, KEYWORDS)):
        text = found.text(_BLANKS)
        return lambda name: f"arguments_{name}: %json {text}", list(found.lost)
    text = json.dumps(found.schema)
    rules, lost = (_written if len(text) <= _MAX_CACHED else _write)(form, text)
    return partial(_named, rules), list(dict.fromkeys([*found.lost, *lost]))


def _write(form: Form, schema: str) -> tuple[list[str], list[str]]:
    """The rules of a schema's arguments, and what these need not fit."""
    writer = _Writer(form, json.loads(schema))
    return writer.arguments(), writer.lost


_written = lru_cache(512)(_write)


def _named(rules: Sequence[str], name: str) -> str:
    """The rules, with this name in place of @@."""
    return "\n".join(rule.replace("@@", name) for rule in rules)


def exactly(text: str) -> str:
    """A Lark regular expression of exactly this text."""
    found = "".join(f"\\{c}" if c in _SPECIAL else c for c in text.replace("\t", " "))
    return found.replace("\n", "\\n").replace("\r", "\\r")


class _Writer:
    """Writes the rules of one function's arguments; `lost`: what they need not fit."""

    def __init__(self, form: Form, schema: dict[str, Any]) -> None:
        self.lost: list[str] = []
        self._form, self._schema = form, schema
        self._rules: list[str] = []

    def arguments(self) -> list[str]:
        """All rules, of which the first is of all arguments."""
        schema = self._schema
        if {"anyOf", "oneOf", "allOf", "$ref"} & schema.keys():
            self._lose(WHOLE)
            schema = {}
        if isinstance(self._form, Tagged):
            given, more = self._members("@@", schema, {}, self._tagged)
            parts = [one if is_needed else f"({one})?" for one, is_needed in given]
            parts += [f"({more})*"] if more else []
            told = " ".join(parts) or "/()/"
        else:
            pair = partial(self._pair, depth=0)
            told = self._listed("@@", *self._members("@@", schema, {}, pair))
            told = f"/\\{{/ {told} /\\}}/" if self._form is GEMMA else told
        return [f"arguments_@@: {told}", *self._rules]

    def _members(
        self,
        name: str,
        schema: Mapping[str, Any],
        other: dict[str, Any],
        write: Callable[[str, str, Any], str],
    ) -> tuple[list[tuple[str, bool]], str | None]:
        """Each member that is declared, and whether it is needed; and any other, of `other`."""
        properties, required = _mapping(schema.get("properties")), schema.get("required") or ()
        others = schema.get("additionalProperties", True)
        if isinstance(others, Mapping) and others:
            self._lose("additionalProperties")
        keys = sorted(properties, key=str.lower) if self._form is GEMMA else list(properties)
        given = [
            (write(f"{name}_{at}", exactly(key), properties[key]), key in required)
            for at, key in enumerate(keys)
        ]
        return given, None if others is False else write(f"{name}_m", _ANY_KEY, other)

    def _listed(self, name: str, members: Sequence[tuple[str, bool]], more: str | None) -> str:
        """Members in order with commas between; those that are not needed may be left out."""
        comma = "/,[ ]?/"
        # By whether one stands before: rules from the end.
        rest, after = "", ""
        if more is not None:
            rest, after = f"({more} ({comma} {more})*)?", f"({comma} {more})*"
        for number, (one, is_needed) in reversed(list(enumerate(members))):
            first, later = f"{one} {after}", f"{comma} {one} {after}"
            if not is_needed:
                first, later = f"({first} | {rest or '/()/'})", f"({later} | {after or '/()/'})"
            self._rules += [f"first_{name}_{number}: {first}", f"later_{name}_{number}: {later}"]
            rest, after = f"first_{name}_{number}", f"later_{name}_{number}"
        return rest or "/()/"

    def _tagged(self, name: str, key: str, schema: Any) -> str:
        """One argument between marks."""
        form = self._form
        assert isinstance(form, Tagged)
        types = types_of(schema, self._schema)
        before = [exactly(part) for part in form.before_value.replace(" ", "\0").split("KIND")]
        before = [part.replace("\0", _GAP) for part in before]
        end = exactly(form.after_value)
        ways = []
        if "string" in types:
            opening = f"{_GAP}{exactly(form.before_key)}{key}{'true'.join(before)}"
            line = "\\n?" if form.are_lines else ""
            text = self._string(schema) if types == {"string"} else None
            if types != {"string"}:
                for part in _parts(schema) or [schema]:
                    self._lose(*(_mapping(part).keys() - _SAY_NOTHING))
            inner = f"{line}{text}{line}" if text else _ANY_TEXT
            self._rules.append(f"text_{name}[lazy]: /{inner}{end}/")
            ways.append(f"/{opening}/ text_{name}")
        if types != {"string"} and ("string" not in types or len(before) > 1):
            opening = f"{_GAP}{exactly(form.before_key)}{key}{'false'.join(before)}{_GAP}"
            self._rules.append(f"value_{name}: {self._json(schema)}")
            ways.append(f"/{opening}/ value_{name} /{_GAP}{end}/")
        return f"({' | '.join(ways)})"

    def _pair(self, name: str, key: str, schema: Any, depth: int) -> str:
        mark = ":" if self._form is GEMMA else "[ ]?=[ ]?"
        return f"/{key}{mark}/ {self._value(name, schema, depth)}"

    def _value(self, name: str, schema: Any, depth: int) -> str:
        """A value that names its own type."""
        if self._form is not GEMMA:
            ways = [self._json(schema), *self._python(schema)]
            self._rules.append(f"value_{name}: {' | '.join(ways)}")
            return f"value_{name}"
        schema = self._resolved(schema)
        if parts := _parts(schema):
            if self._is_too_deep(depth):
                self._lose(WHOLE)
                parts = [_ANY_PLAIN]
            told = [self._value(f"{name}_p{at}", one, depth + 1) for at, one in enumerate(parts)]
            return f"({' | '.join(told)})"
        types, ways = types_of(schema, self._schema), []
        self._lose(*(_mapping(schema).keys() & {"allOf"}))
        if "string" in types:
            quote = exactly(GEMMA.marks)
            text = self._string(schema) if types == {"string"} else None
            self._rules.append(f"text_{name}[lazy]: /{text or _ANY_TEXT}{quote}/")
            ways.append(f"/{quote}/ text_{name}")
        if "object" in types:
            ways.append(self._object(name, schema, depth))
        if "array" in types:
            ways.append(self._array(name, schema, depth))
        if plain := types - {"string", "object", "array"}:
            shape = {key: value for key, value in _mapping(schema).items() if key not in _UNIONS}
            self._rules.append(f"plain_{name}: {self._json({**shape, 'type': sorted(plain)})}")
            ways.append(f"plain_{name}")
        self._rules.append(f"value_{name}: {' | '.join(ways)}")
        return f"value_{name}"

    def _object(self, name: str, schema: Any, depth: int) -> str:
        if self._is_too_deep(depth):
            self._lose(WHOLE)
            return r"/\{\}/"
        pair = partial(self._pair, depth=depth + 1)
        members = self._members(name, _mapping(schema), _ANY_PLAIN, pair)
        self._rules.append(f"object_{name}: /\\{{/ {self._listed(name, *members)} /\\}}/")
        return f"object_{name}"

    def _array(self, name: str, schema: Any, depth: int) -> str:
        items = _mapping(schema).get("items", _ANY_PLAIN)
        if self._is_too_deep(depth):
            self._lose(WHOLE)
            return r"/\[\]/"
        least = _mapping(schema).get("minItems", 0)
        self._lose(*(_mapping(schema).keys() & {"maxItems", "prefixItems"}))
        self._lose(*(["minItems"] if least > 1 else ()))
        one = self._value(f"{name}_i", items, depth + 1)
        may_be_empty = "" if least else "?"
        self._rules.append(f"array_{name}: /\\[/ ({one} (/,[ ]?/ {one})*){may_be_empty} /\\]/")
        return f"array_{name}"

    def _is_too_deep(self, depth: int) -> bool:
        return depth >= _MAX_DEPTH or len(self._rules) >= _MAX_RULES

    def _resolved(self, schema: Any) -> Any:
        """The schema that a $ref names."""
        for _ in range(_MAX_DEPTH):
            reference = _mapping(schema).get("$ref")
            if not isinstance(reference, str) or not reference.startswith("#/"):
                break
            found: Any = self._schema
            for key in reference[2:].split("/"):
                found = _mapping(found).get(key)
            schema = found
        return schema

    def _python(self, schema: Any) -> list[str]:
        """What Python writes in place of JSON's names."""
        types = types_of(schema, self._schema)
        return ['"True"', '"False"'] * ("boolean" in types) + ['"None"'] * ("null" in types)

    def _json(self, schema: Any) -> str:
        """JSON of the schema, with what it may refer to."""
        kept = {key: self._schema[key] for key in ("$defs", "definitions") if key in self._schema}
        whole = {**kept, **schema} if isinstance(schema, Mapping) else {}
        return f"%json {enforced(whole).text(_BLANKS)}"

    def _string(self, schema: Any) -> str | None:
        """A pattern of what fits a schema of strings; None for any text."""
        given = _mapping(schema)
        self._lose(*(given.keys() - _SAY_NOTHING - _OF_STRINGS))
        values = [given["const"]] if "const" in given else given.get("enum")
        if isinstance(values, list) and values:
            return f"({'|'.join(exactly(str(one)) for one in values)})"
        own = given.get("pattern")
        if isinstance(own, str):
            self._lose(*(given.keys() & {"minLength", "maxLength"}))
            if (found := _pattern_of(own)) is None:
                self._lose("pattern")
            return found
        least, most = given.get("minLength", 0), given.get("maxLength", "")
        if not given.keys() & {"minLength", "maxLength"}:
            return None
        if max(least, most or 0) > _MAX_LENGTH:
            self._lose("minLength", "maxLength")
            return None
        return f"(.|\\n){{{least},{most}}}"

    def _lose(self, *keywords: str) -> None:
        self.lost += [one for one in sorted(keywords) if one not in self.lost]


def _parts(schema: Any) -> list[Any]:
    """The schemas of which one has to fit."""
    given = _mapping(schema)
    found = given.get("anyOf") or given.get("oneOf")
    return found if isinstance(found, list) else []


_UNIONS = ("anyOf", "oneOf", "allOf", "properties", "items", "required", "additionalProperties")


def _pattern_of(own: str) -> str | None:
    """A schema's pattern for a whole text, as Lark has it; None where it has no such."""
    before = "" if own.startswith("^") else _ANY_TEXT
    after = "" if own.endswith("$") and not own.endswith("\\$") else _ANY_TEXT
    inner = own.removeprefix("^").removesuffix("" if after else "$")
    inner = re.sub(r"(?<!\\)/", r"\\/", inner).replace("\n", "\\n").replace("\r", "\\r")
    found = f"{before}({with_usual_classes(inner)}){after}"
    is_taken = (
        is_possible_pattern(own)
        and not problem_with(LLMatcher.grammar_from_lark(f"start: /{found}/"))[0]
    )
    return found if is_taken else None


def _mapping(schema: Any) -> Mapping[str, Any]:
    return schema if isinstance(schema, Mapping) else {}
