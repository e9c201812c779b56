"""JSON schemas as answers are held to them: what cannot be enforced is dropped and reported.

llguidance compiles them in its lenient mode, which passes over the keywords and formats that it
lacks. What it does not do is done here. It refuses a whole schema for one value that is no JSON
Schema, or a pattern that it cannot read, which are dropped; and for a part that no value fits, for
which the root's property that holds it may be anything. And objects are closed: where `properties`
are declared, and nothing says that there may be others, an answer has only those; small models
ramble otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, NamedTuple
from urllib.parse import unquote

from llguidance import LLMatcher, LLTokenizer

WHOLE = "schema"  # in a keyword's place: a node as a whole
_MAX_DEPTH = 100
_MAX_NODES = 20_000
_MAX_STEPS = 50_000  # from node to node, to find what applies in place
_MAX_TRIED = 1 << 19  # characters of a schema that is tried once for each of its properties
_MAX_CACHED = 1 << 14  # characters of a schema whose reading is cached
_MAX_COUNTED = 1 << 20  # more than any answer's tokens
_LARGEST = 1 << 53  # beyond it neighbouring whole numbers are one float
_MAX_REPEATED = 10_000  # of a pattern's counts, multiplied
_MAX_PATTERN_CHARS = 5000
_MAX_PATTERN_NAMES = 16  # each is compared with each
_SET_IN_SET = re.compile(r"\[[^\]]*(&&|~~|--|\[)")  # Rust's patterns alone have such
_COUNTED = re.compile(r"\{(\d*+),?+(\d*+)\}")

_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # name -> schema
_UNIONS = ("anyOf", "oneOf", "allOf")  # lists of schemas, which apply in place
_SINGLE = ("additionalProperties", "additionalItems", "items")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Not for llguidance: the drafts that it knows, and addresses that nothing here refers to.
_LEFT_OUT = frozenset(("$schema", "$id", "id", "x-guidance"))
# Keywords that llguidance lacks, with the values that say nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "not": (False,), "uniqueItems": (False,), "unevaluatedItems": (True,),
    "unevaluatedProperties": (True,), "propertyNames": (True, {}, {"type": "string"}),
    "dependencies": ({},), "dependentRequired": ({},), "dependentSchemas": ({},),
    "required": (True, False),  # draft 3's, in a property
}  # fmt: skip
# Keyword -> the one that would be stricter without it.
_GOES_WITH = {
    "properties": "additionalProperties",
    "patternProperties": "additionalProperties",
    "prefixItems": "items",
}
_LOST = object()  # in place of a value that cannot be enforced
Node = dict[str, Any] | bool


class Enforced(NamedTuple):
    """A schema for llguidance, and the keywords of the given one that answers need not fit."""

    schema: dict[str, Any]
    lost: tuple[str, ...]

    def text(self, blanks: str) -> str:
        """The schema as llguidance takes it; `blanks`: the pattern of white space."""
        return _text_of(self.schema, whitespace_pattern=blanks)


def enforced(schema: Any, is_object: bool = False) -> Enforced:
    """What of `schema` is enforced; `is_object` for arguments, which are objects.

    Values of `schema` fit the result, except for closed objects; values of the result fit `schema`
    if nothing was lost. Deterministic; the time is bounded by the length of `schema`.
    """
    try:
        text = json.dumps(schema)
    except (ValueError, RecursionError):  # a number of thousands of digits
        return Enforced({"type": "object"} if is_object else {}, (WHOLE,))
    return (_cached if len(text) <= _MAX_CACHED else _read)(text, is_object)


def problem_with(grammar: str) -> tuple[str, list[str]]:
    """llguidance's error for a grammar, empty if it accepts it, and what it passes over."""
    is_wrong, told = LLMatcher.validate_grammar_with_warnings(grammar, _bytes_alone())
    return (told[0], []) if is_wrong else ("", told)


def _text_of(schema: dict[str, Any], **options: str) -> str:
    return json.dumps(schema | {"x-guidance": {"lenient": True, **options}})


def _read(text: str, is_object: bool) -> Enforced:
    found = json.loads(text)
    reader = _Reader(found)
    root = reader.node(_as_object(found, reader.lost) if is_object else found, 0)
    fallback: dict[str, Any] = {"type": "object"} if is_object else {}
    schema = fallback if isinstance(root, bool) else root
    problem, warnings = _problem_of(schema)
    properties = schema.get("properties", {})
    if problem and "fuel" not in problem and len(properties) * len(text) <= _MAX_TRIED:
        others = dict.fromkeys(properties, True)
        for name, node in properties.items():
            if _problem_of({**schema, "properties": {**others, name: node}})[0]:
                properties[name] = True
        problem, warnings = _problem_of(schema)
        reader.lost.append(WHOLE)
    if problem:
        schema, warnings = fallback, []
        reader.lost.append(WHOLE)
    return Enforced(schema, tuple(dict.fromkeys([*reader.lost, *_passed_over(warnings)])))


_cached = lru_cache(512)(_read)


def _as_object(root: Any, lost: list[str]) -> dict[str, Any]:
    """The root as a schema of objects alone."""
    root = {"additionalProperties": False} if root is None else root
    root = {} if root is True or root == [] else root
    if not isinstance(root, dict):
        lost.append(WHOLE)
        root = {}
    kinds = root.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        lost.append("type")
    return {"type": "object"} | root | {"type": "object"}


def _passed_over(warnings: list[str]) -> Iterator[str]:
    """The keywords of llguidance's warnings."""
    for warning in warnings:
        if warning.startswith("Unimplemented keys: "):
            yield from re.findall(r'"([^"]+)"', warning)
        elif warning.startswith("Unknown format"):
            yield "format"
        else:  # oneOf not fully supported, min/maxProperties only supported when
            yield warning.partition(" ")[0].replace("min/max", "min")


@cache
def _bytes_alone() -> LLTokenizer:
    """A tokenizer of single bytes, to try grammars with: the result does not depend on it."""
    return LLTokenizer("byte")


def _problem_of(schema: dict[str, Any]) -> tuple[str, list[str]]:
    return problem_with(LLMatcher.grammar_from_json_schema(_text_of(schema)))


@lru_cache(1024)
def _is_taken(schema: str) -> bool:
    """Whether llguidance takes a short schema, given as JSON."""
    return not _problem_of(json.loads(schema))[0]


def is_possible_pattern(pattern: str) -> bool:
    """Whether llguidance reads the pattern as JSON Schema means it, at a bounded cost."""
    repeated = 1
    for counts in _COUNTED.findall(pattern[:_MAX_PATTERN_CHARS]):
        repeated *= max(1, *(int(count[:9] or 0) for count in counts))
    if repeated > _MAX_REPEATED or len(pattern) > _MAX_PATTERN_CHARS:
        return False
    return not _SET_IN_SET.search(pattern) and _is_taken(json.dumps({"pattern": pattern}))


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


class _Names(NamedTuple):
    """The property names that a node and what applies in place mention, in order."""

    found: dict[str, None]
    are_open: bool  # there may be others, as it says
    are_declared: bool  # by `properties`, somewhere


class _Reader:
    """Reads one schema: in its own shape, without what cannot be right, with closed objects."""

    def __init__(self, root: Any) -> None:
        self.lost: list[str] = []
        self._root = root
        self._nodes_left = _MAX_NODES
        self._steps_left = _MAX_STEPS
        self._known_names: dict[int, _Names] = {}  # by the node's id
        self._open: set[int] = set()  # nodes that apply beside others, one of which closes all
        waiting = [root]
        while waiting:
            node = waiting.pop()
            if isinstance(node, dict | list):
                waiting += node.values() if isinstance(node, dict) else node
            if isinstance(node, dict) and self._joins(node):
                self._keep_open(node)

    def node(self, given: Any, depth: int) -> Node:
        """One node for llguidance."""
        self._nodes_left -= 1
        if isinstance(given, bool):
            return given
        if not isinstance(given, dict) or depth > _MAX_DEPTH or self._nodes_left < 0:
            self.lost.append(WHOLE)
            return True
        if given.get("enum") == [] or given.get("not") is True or given.get("not") == {}:
            return False
        made: dict[str, Any] = {}
        for keyword, value in given.items():
            if keyword in _LEFT_OUT or value in _NOTHING.get(keyword, ()):
                continue
            if keyword == "if" and not given.keys() & {"then", "else"}:
                continue
            found = self._value(keyword, value, depth + 1)
            if found is _LOST:
                self.lost.append(keyword)
            else:
                made[keyword] = found
        for keyword, other in _GOES_WITH.items():
            if keyword in given and keyword not in made:
                made.pop(other, None)
        self._close(given, made)
        return made or True

    def _value(self, keyword: str, value: Any, depth: int) -> Any:
        """A keyword's value for llguidance; _LOST where it cannot be enforced."""
        if keyword in _NAMED:
            value = {} if value == [] else value  # as PHP writes an empty object
            if not isinstance(value, dict):
                return _LOST
            if keyword == "patternProperties" and not self._are_possible(list(value)):
                return _LOST
            return {name: self.node(one, depth) for name, one in value.items()}
        if keyword in (*_UNIONS, "prefixItems") or (keyword == "items" and isinstance(value, list)):
            if not isinstance(value, list) or not value:
                return _LOST
            return [self.node(one, depth) for one in value]
        if keyword in _SINGLE:
            return self.node(value, depth) if isinstance(value, dict | bool) else _LOST
        if keyword in _COUNTS:
            is_count = type(value) in (int, float) and 0 <= value <= _MAX_COUNTED
            return int(value) if is_count and int(value) == value else _LOST
        if keyword in _BOUNDS and not isinstance(value, bool):  # as in draft 4
            return value if type(value) in (int, float) and abs(value) <= _LARGEST else _LOST
        if keyword == "pattern":
            return value if isinstance(value, str) and is_possible_pattern(value) else _LOST
        if keyword == "$ref":
            return value if self._target(value) else _LOST
        if keyword == "format" and not isinstance(value, str):
            return _LOST
        if keyword == "enum":
            return value if isinstance(value, list) else _LOST
        if keyword == "required":
            return value if _are_texts(value) else _LOST
        if keyword in ("type", "multipleOf"):
            text = json.dumps({keyword: value})
            return value if len(text) <= _MAX_PATTERN_CHARS and _is_taken(text) else _LOST
        return value

    @staticmethod
    def _are_possible(patterns: list[str]) -> bool:
        if len(patterns) > _MAX_PATTERN_NAMES or not all(map(is_possible_pattern, patterns)):
            return False
        return not _problem_of({"patternProperties": dict.fromkeys(patterns, True)})[0]

    def _close(self, given: dict[str, Any], made: dict[str, Any]) -> None:
        """Allow only the mentioned properties, unless others are allowed, or parts close it."""
        is_said = "additionalProperties" in given or id(given) in self._open
        if not is_said and (not self._groups(given) or self._joins(given)):
            names = self._names(given)
            is_whole = ("properties" in given) == ("properties" in made)
            if names.are_declared and not names.are_open and is_whole:
                own = made.get("properties", {})
                made["properties"] = {**own, **{one: own.get(one, True) for one in names.found}}
                made["additionalProperties"] = False
                if made.get("unevaluatedProperties") is False:
                    del made["unevaluatedProperties"]
        if made.get("additionalProperties") is False and not made.get("patternProperties"):
            declared, required = made.get("properties", {}), made.get("required", [])
            if any(name not in declared for name in required):
                self.lost.append("required")
                made["required"] = [name for name in required if name in declared]

    def _joins(self, given: dict[str, Any]) -> bool:
        """Whether several parts of a node describe one object, so that none may close it alone."""
        groups = self._groups(given)
        if len(groups) != 1:
            return bool(groups)
        if given.keys() & {"properties", "patternProperties", "additionalProperties"}:
            return True
        required = given.get("required")
        all_names = [self._names(part) for part in groups[0]]
        return _are_texts(required) and any(
            not names.are_open and not set(required or ()) <= names.found.keys()
            for names in all_names
        )

    def _keep_open(self, node: dict[str, Any]) -> None:
        for part in (one for group in self._groups(node) for one in group):
            if isinstance(part, dict) and id(part) not in self._open:
                self._open.add(id(part))
                self._keep_open(part)

    def _groups(self, given: dict[str, Any]) -> list[list[Any]]:
        """Subschemas that apply in place beside the node's keywords; at least one a group."""
        self._steps_left -= 1
        if self._steps_left < 0:
            return []
        groups: list[list[Any]] = []
        for keyword in ("allOf", "dependentSchemas", "dependencies"):
            several = given.get(keyword)
            if isinstance(several, dict):
                several = [one for one in several.values() if isinstance(one, dict)]
            groups += [[one] for one in several] if isinstance(several, list) else []
        groups += [given[key] for key in ("anyOf", "oneOf") if isinstance(given.get(key), list)]
        groups += [[given[key]] for key in ("then", "else") if key in given]
        if (target := self._target(given.get("$ref"))) is not None:
            groups.append([target])
        return groups

    def _names(self, given: Any, depth: int = 0) -> _Names:
        """The properties that a node and what applies in place mention."""
        if not isinstance(given, dict):
            return _Names({}, False, False)
        if (known := self._known_names.get(id(given))) is not None:
            return known
        if depth > _MAX_DEPTH or self._steps_left < 0:
            return _Names({}, True, False)
        self._known_names[id(given)] = _Names({}, False, False)  # for a node within itself
        declared = given.get("properties")
        found = dict.fromkeys(declared) if isinstance(declared, dict) else {}
        are_declared = "properties" in given
        are_open = bool(given.get("patternProperties")) or any(
            given.get(keyword, False) is not False
            for keyword in ("additionalProperties", "unevaluatedProperties")
        )
        lists = [given.get("required")]
        for keyword in ("dependencies", "dependentRequired"):
            if isinstance(given.get(keyword), dict):
                lists += [list(given[keyword]), *given[keyword].values()]
        for names in lists:
            found |= dict.fromkeys(names or ()) if _are_texts(names) else {}
        for part in (one for group in self._groups(given) for one in group):
            other = self._names(part, depth + 1)
            found |= other.found
            are_open, are_declared = are_open or other.are_open, are_declared or other.are_declared
        self._known_names[id(given)] = names = _Names(found, are_open, are_declared)
        return names

    def _target(self, reference: Any) -> dict[str, Any] | None:
        """The node that a `$ref` names by its path; None without one."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        node = self._root
        for part in unquote(reference).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and part.isdecimal() and int(part[:9]) < len(node):
                node = node[int(part[:9])]
            elif isinstance(node, dict) and part in node:
                node = node[part]
            else:
                return None
        return node if isinstance(node, dict) else None
