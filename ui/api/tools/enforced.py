"""The part of a JSON schema that can be enforced on answers; the rest is dropped and reported.

llguidance refuses a whole grammar for one unknown keyword. So each node keeps the keywords that
llguidance has, in the form of today's JSON Schema (here), and then loses what is refused even so
(`schema_repair`).

Dropping only allows more. But objects are closed: where `properties` are declared, and nothing says
that there may be others, an answer has only those; small models ramble otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from hotcold.ui.api.tools.keywords import (
    COUNTS,
    GOES_WITH,
    LACKED,
    NAMES,
    OWN,
    PLAIN,
    TYPE_OF,
    TYPES,
    UNIONS,
    is_number,
    is_possible_pattern,
    is_texts,
    problem_with,
    types_in,
)
from hotcold.ui.api.tools.schema_index import MAX_DEPTH, Path, SchemaIndex
from hotcold.ui.api.tools.schema_repair import WHOLE, Lost, Node, SchemaRepair

_MAX_NODES = 20_000
_MAX_TRIED = 1 << 17  # characters of what is tried, besides four times the schema's
_MAX_PATTERN_NAMES = 16  # each is compared with each
_MAX_CACHED = 1 << 14  # characters of a schema whose reading is cached


class Enforced(NamedTuple):
    """The enforced schema for llguidance, and what was dropped.

    `oneOf` counts as `anyOf` there: the option `coerce_one_of` is needed.
    """

    schema: dict[str, Any]
    lost: tuple[Lost, ...]


def enforced(schema: Any, is_object: bool = False) -> Enforced:
    """The part of `schema` that can be enforced; `is_object` for arguments, which are objects.

    Values of `schema` fit the result, except for closed objects; values of the result fit `schema`
    if nothing was lost. Deterministic; the time is bounded by the length of `schema`.
    """
    try:
        text = json.dumps(schema)
    except (ValueError, RecursionError):  # a number of thousands of digits
        return Enforced({"type": "object"} if is_object else {}, (Lost((), WHOLE),))
    read = _kept if len(text) <= _MAX_CACHED else _read
    return read(text, is_object)


def is_taken(grammar: str) -> bool:
    """Whether llguidance accepts a grammar, in its JSON form."""
    return not problem_with(grammar)


def _read(text: str, is_object: bool) -> Enforced:
    return _Reader(json.loads(text), 4 * len(text) + _MAX_TRIED).read(is_object)


_kept = lru_cache(512)(_read)


class _Keyword(NamedTuple):
    """A keyword of a node that is read."""

    keyword: str
    value: Any
    given: dict[str, Any]  # the node
    made: dict[str, Any]  # what llguidance gets of it
    path: Path  # of the node
    is_open: bool  # of subschemas that apply in place

    @property
    def here(self) -> Path:
        """The keyword's own path."""
        return (*self.path, self.keyword)


class _Reader:
    """Reads one schema."""

    def __init__(self, root: Any, max_tried: int) -> None:
        self._root = root
        self._index = SchemaIndex(root)
        self._nodes_left = _MAX_NODES
        self._max_tried = max_tried
        self._lost: dict[Lost, None] = {}
        # The target of a `$ref` is a definition, once as it is and once open.
        self._numbers: dict[tuple[int, bool], int] = {}
        self._waiting: list[tuple[Any, Path, bool]] = []

    def read(self, is_object: bool) -> Enforced:
        """The enforced schema."""
        given = self._as_object() if is_object else self._root
        root = self._node(given, (), False)
        paths: list[Path] = []
        definitions: list[Node] = []
        while len(paths) < len(self._waiting):
            target, path, is_open = self._waiting[len(paths)]
            definitions.append(self._node(target, path, is_open))
            paths.append(path)
        repair = SchemaRepair(definitions, paths, self._lost, self._max_tried)
        root = repair.repaired(root)
        if isinstance(root, bool):
            root = {"type": "object"} if is_object else {}
        repair.lose_unions(root)
        return Enforced(repair.with_definitions(root), tuple(self._lost))

    def _as_object(self) -> dict[str, Any]:
        """The root as a schema of objects alone."""
        root = {"additionalProperties": False} if self._root is None else self._root
        if root in (True, []):
            root = {}
        if not isinstance(root, dict):
            self._lose((), WHOLE)
            root = {}
        kinds = root.get("type", "object")
        if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
            self._lose((), "type")
        return {"type": "object"} | root | {"type": "object"}

    def _lose(self, path: Path, keyword: str) -> None:
        self._lost[Lost(path, keyword)] = None

    def _node(self, given: Any, path: Path, is_open: bool) -> Node:
        """One node for llguidance; an open one applies beside another, which closes the object."""
        if isinstance(given, bool):
            return given
        self._nodes_left -= 1
        if not isinstance(given, dict) or len(path) > MAX_DEPTH or self._nodes_left < 0:
            self._lose(path, WHOLE)
            return True
        if given.get("enum") == [] or given.get("not") is True or given.get("not") == {}:
            return False
        made: dict[str, Any] = {}
        kinds = self._kinds(given, path)
        groups = self._index.groups(given)
        joins = self._joins(given, groups)
        for keyword, value in given.items():
            if keyword not in TYPE_OF or TYPE_OF[keyword] in kinds:
                self._take(_Keyword(keyword, value, given, made, path, is_open or joins))
        for keyword, other in GOES_WITH.items():
            if keyword in given and keyword not in made:
                made.pop(other, None)
        if "object" in kinds:
            may_close = not is_open and (joins or not groups)
            is_closed = may_close and self._close(given, made)
            self._keep_required(made, path)
            if given.get("unevaluatedProperties", True) is not True and not is_closed:
                self._lose(path, "unevaluatedProperties")
        return made or True

    def _kinds(self, given: dict[str, Any], path: Path) -> set[str]:
        """The types that it allows; `integer` counts as `number`."""
        kinds = types_in(given.get("type", list(TYPES)))
        if not kinds:
            self._lose(path, "type")
            kinds = list(TYPES)
        return {"number" if kind == "integer" else kind for kind in kinds}

    def _take(self, at: _Keyword) -> None:
        """Add one keyword to what is made, or lose it."""
        taken = _TAKEN_BY.get(at.keyword)
        if taken is not None and not taken(self, at):
            self._lose(at.path, at.keyword)

    # Each of these returns False where the keyword is lost.

    def _plain(self, at: _Keyword) -> bool:
        if not PLAIN[at.keyword](at.value):
            return False
        at.made[at.keyword] = int(at.value) if at.keyword in COUNTS else at.value
        return True

    def _exclusive(self, at: _Keyword) -> bool:
        if not isinstance(at.value, bool):
            return self._plain(at)
        bound = at.given.get(at.keyword.removeprefix("exclusive").lower())  # as in draft 4
        if at.value and is_number(bound):
            at.made[at.keyword] = bound
        return True

    def _type(self, at: _Keyword) -> bool:
        if types_in(at.value):  # else `_kinds` loses it
            at.made["type"] = at.value
        return True

    def _named(self, at: _Keyword) -> bool:
        value = {} if at.value == [] else at.value  # as PHP writes an empty object
        if not isinstance(value, dict):
            return False
        if at.keyword == "patternProperties" and not self._are_possible(value):
            return False
        nodes = {name: self._node(one, (*at.here, name), False) for name, one in value.items()}
        at.made[at.keyword] = nodes
        return True

    def _several(self, at: _Keyword) -> bool:
        if not isinstance(at.value, list) or not at.value:
            return False
        is_open = at.is_open and at.keyword in UNIONS
        nodes = [self._node(one, (*at.here, str(i)), is_open) for i, one in enumerate(at.value)]
        at.made["prefixItems" if at.keyword == "items" else at.keyword] = nodes
        return True

    def _single(self, at: _Keyword) -> bool:
        if not isinstance(at.value, dict | bool):
            return False
        name = "items" if at.keyword == "additionalItems" else at.keyword
        at.made[name] = self._node(at.value, at.here, False)
        return True

    def _items(self, at: _Keyword) -> bool:
        return self._several(at) if isinstance(at.value, list) else self._single(at)

    def _more_items(self, at: _Keyword) -> bool:
        return not isinstance(at.given.get("items"), list) or self._single(at)

    def _reference(self, at: _Keyword) -> bool:
        if (number := self._definition(at.value, at.is_open)) is None:
            return False
        at.made["$ref"] = f"#/$defs/{number}"
        return True

    def _are_possible(self, patterns: Iterable[str]) -> bool:
        """Whether llguidance can use these patterns of property names."""
        patterns = list(patterns)
        return len(patterns) <= _MAX_PATTERN_NAMES and all(map(is_possible_pattern, patterns))

    def _joins(self, given: dict[str, Any], groups: list[list[Any]]) -> bool:
        """Whether several parts of a node describe one object, so that none may close it alone."""
        if len(groups) != 1:
            return bool(groups)
        if any(keyword in given for keyword in OWN):
            return True
        required = given.get("required")
        all_names = [self._index.names(part) for part in groups[0]]
        return is_texts(required) and any(
            not names.are_open and not set(required) <= names.found.keys() for names in all_names
        )

    def _close(self, given: dict[str, Any], made: dict[str, Any]) -> bool:
        """Allow only the mentioned properties; returns False where others are allowed."""
        names = self._index.names(given)
        if names.are_open or not names.are_declared or "additionalProperties" in given:
            return False
        if "properties" in given and "properties" not in made:
            return False
        all_names = dict.fromkeys(names.found, True)
        made["properties"] = {**made.get("properties", {})}
        for name in all_names:
            made["properties"].setdefault(name, True)
        made["additionalProperties"] = False
        return True

    def _keep_required(self, made: dict[str, Any], path: Path) -> None:
        """Drop required properties that are not allowed."""
        if made.get("additionalProperties") is not False or made.get("patternProperties"):
            return
        declared = made.get("properties", {})
        required = made.get("required", [])
        if any(name not in declared for name in required):
            self._lose(path, "required")
            made["required"] = [name for name in required if name in declared]

    def _definition(self, reference: Any, is_open: bool) -> int | None:
        """The number of the definition that a `$ref` names; None where there is none."""
        found = self._index.target(reference)
        if found is None or self._index.applies_in_itself(found[0]):
            return None
        target, path = found
        key = (id(target), is_open)
        if key not in self._numbers:
            self._numbers[key] = len(self._waiting)
            self._waiting.append((target, path, is_open))
        return self._numbers[key]


_TAKEN_BY: dict[str, Callable[[_Reader, _Keyword], bool]] = {
    **dict.fromkeys(PLAIN, _Reader._plain),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _Reader._exclusive),
    "type": _Reader._type,
    **dict.fromkeys(NAMES, _Reader._named),
    **dict.fromkeys((*UNIONS, "prefixItems"), _Reader._several),
    "items": _Reader._items,
    "additionalItems": _Reader._more_items,
    "additionalProperties": _Reader._single,
    "$ref": _Reader._reference,
    **dict.fromkeys(LACKED, lambda _, at: LACKED[at.keyword](at.value, at.given)),
}
