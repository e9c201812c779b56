"""JSON schemas as answers can be held to them; what cannot be held to is left out, and told.

llguidance refuses a whole grammar for one keyword that it does not know. A schema is therefore read
first: each node keeps the keywords that llguidance has, in the form of today's JSON Schema. What is
refused even so is looked for from the root down, and left out just there.

Leaving out only allows more. On the other hand objects are closed: where `properties` are declared,
and nothing says that there may be others, an answer has those alone; small models ramble otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from typing import Any, NamedTuple
from urllib.parse import unquote

from hotcold.ui.api.tools.keywords import (
    COUNTS,
    GOES_WITH,
    LACKED,
    LIMITS,
    NAMES,
    OWN,
    PLAIN,
    SINGLE,
    STRUCTURE,
    TYPE_OF,
    TYPES,
    UNIONS,
    is_number,
    is_possible_pattern,
    is_texts,
    problem_of,
    problem_with,
    types_in,
)

WHOLE = "schema"  # in a keyword's place: all of a node, which no value fits or which is none
_MAX_DEEP = 100  # keywords and names on the way to a node
_MAX_NODES = 20_000
_MAX_STEPS = 50_000  # from node to node, to find what applies in place
_MAX_TRIED = 1 << 17  # characters of what is tried, beside four times the schema's
_COST_OF_TRY = 2000  # as many characters
_COST_OF_PUZZLE = 10_000
_MAX_PATTERN_NAMES = 16  # each is compared with each
_MAX_KEPT = 1 << 14  # characters of a schema whose reading is kept

# How llguidance's words against a grammar begin.
_UNSATISFIABLE = "Unsatisfiable"
_PUZZLES = ("Unable to determine", "schema too large")

Path = tuple[str, ...]
Node = dict[str, Any] | bool


class Lost(NamedTuple):
    """A keyword that an answer cannot be held to, and the node that has it, from the root on."""

    path: Path
    keyword: str

    def __str__(self) -> str:
        names = self.path if self.keyword == WHOLE else (*self.path, self.keyword)
        return ".".join(names)[:200] or "the schema as a whole"


class Enforced(NamedTuple):
    """What an answer is held to, in llguidance's words, and what of its schema was left out.

    `oneOf` is as `anyOf` there: the option `coerce_one_of` is needed.
    """

    schema: dict[str, Any]
    lost: tuple[Lost, ...]


def enforced(schema: Any, is_object: bool = False) -> Enforced:
    """`schema` as an answer can be held to it; `is_object` for arguments, which are objects.

    Every value that fits `schema` fits what is made of it, but for closed objects. Every value that
    fits what is made of it fits `schema`, where nothing was lost. The time is bounded by the length
    of `schema`, and the same schema always gives the same.
    """
    try:
        text = json.dumps(schema)
    except (ValueError, RecursionError):  # a number of thousands of digits
        return Enforced({"type": "object"} if is_object else {}, (Lost((), WHOLE),))
    read = _kept if len(text) <= _MAX_KEPT else _read
    return read(text, is_object)


def is_taken(grammar: str) -> bool:
    """Whether llguidance can use this grammar, as it makes them of texts."""
    return not problem_with(grammar)


def _read(text: str, is_object: bool) -> Enforced:
    return _Reader(json.loads(text), 4 * len(text) + _MAX_TRIED).read(is_object)


_kept = lru_cache(512)(_read)


class _Reader:
    """Reads one schema."""

    def __init__(self, root: Any, most_tried: int) -> None:
        self._root = root
        self._nodes_left, self._steps_left = _MAX_NODES, _MAX_STEPS
        self._chars_left = most_tried
        self._lost: dict[Lost, None] = {}
        # By the ids of nodes of the root, which all live as long as this.
        self._known_names: dict[int, _Names] = {}
        self._is_endless: dict[int, bool] = {}
        # What a `$ref` names is a definition, once as it is and once open.
        self._targets: dict[str, tuple[dict[str, Any], Path] | None] = {}
        self._numbers: dict[tuple[int, bool], int] = {}
        self._waiting: list[tuple[Any, Path, bool]] = []
        self._defs: dict[str, Node] = {}

    def read(self, is_object: bool) -> Enforced:
        """What an answer is held to."""
        given = self._as_object() if is_object else self._root
        root = self._node(given, (), False)
        paths: list[Path] = []
        while len(paths) < len(self._waiting):
            target, path, is_open = self._waiting[len(paths)]
            self._defs[str(len(paths))] = self._node(target, path, is_open)
            paths.append(path)
        if isinstance(root, bool) or self._try(root):
            self._mend_definitions(paths)
            root = self._mended(root, (), is_needed=True)
        if isinstance(root, bool):
            root = {"type": "object"} if is_object else {}
        for node, path in zip([*self._defs.values(), root], [*paths, ()], strict=True):
            self._lose_unions(node, path)
        return Enforced(self._with_definitions(root), tuple(self._lost))

    def _as_object(self) -> dict[str, Any]:
        """The root where nothing but an object is wanted."""
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

    # Each node in llguidance's words.

    def _node(self, given: Any, path: Path, is_open: bool) -> Node:
        """One node; an open one applies beside another, which closes the object."""
        if isinstance(given, bool):
            return given
        self._nodes_left -= 1
        if not isinstance(given, dict) or len(path) > _MAX_DEEP or self._nodes_left < 0:
            self._lose(path, WHOLE)
            return True
        if given.get("enum") == [] or given.get("not") is True or given.get("not") == {}:
            return False
        made: dict[str, Any] = {}
        kinds = self._kinds(given, path)
        groups = self._groups(given)
        joins = self._joins(given, groups)
        for keyword, value in given.items():
            if TYPE_OF.get(keyword, "object") in kinds or keyword not in TYPE_OF:
                self._take(keyword, value, given, made, path, is_open or joins)
        for keyword, other in GOES_WITH.items():
            if keyword in given and keyword not in made:
                made.pop(other, None)
        if "object" in kinds:
            is_closed = False
            if not is_open and (joins or not groups):
                is_closed = self._close(given, made)
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

    def _take(
        self,
        keyword: str,
        value: Any,
        given: dict[str, Any],
        made: dict[str, Any],
        path: Path,
        is_open: bool,
    ) -> None:
        """Take over one keyword, or lose it. `is_open` says it of what applies in place."""
        here = (*path, keyword)
        if keyword in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            bound = keyword.removeprefix("exclusive").lower()  # as in draft 4
            if value and is_number(given.get(bound)):
                made[keyword] = given[bound]
        elif keyword in PLAIN:
            if not PLAIN[keyword](value):
                return self._lose(path, keyword)
            made[keyword] = int(value) if keyword in COUNTS else value
        elif keyword == "type":
            if types_in(value):
                made[keyword] = value
        elif keyword in NAMES:
            value = {} if value == [] else value  # as PHP writes an empty object
            if not isinstance(value, dict):
                return self._lose(path, keyword)
            if keyword == "patternProperties" and not self._are_possible(value):
                return self._lose(path, keyword)
            made[keyword] = {
                name: self._node(one, (*here, name), False) for name, one in value.items()
            }
        elif (
            keyword in UNIONS
            or keyword == "prefixItems"
            or (keyword == "items" and isinstance(value, list))
        ):
            if not isinstance(value, list) or not value:
                return self._lose(path, keyword)
            is_open = is_open and keyword in UNIONS
            nodes = [self._node(one, (*here, str(i)), is_open) for i, one in enumerate(value)]
            made["prefixItems" if keyword == "items" else keyword] = nodes
        elif keyword in (*SINGLE, "additionalItems"):
            if keyword == "additionalItems" and not isinstance(given.get("items"), list):
                return
            if not isinstance(value, dict | bool):
                return self._lose(path, keyword)
            made["items" if keyword == "additionalItems" else keyword] = self._node(
                value, here, False
            )
        elif keyword == "$ref":
            if (number := self._definition(value, is_open)) is None:
                return self._lose(path, keyword)
            made[keyword] = f"#/$defs/{number}"
        elif keyword in LACKED and not LACKED[keyword](value, given):
            self._lose(path, keyword)
        return None

    def _are_possible(self, patterns: Iterable[str]) -> bool:
        """Whether names of properties can be told apart by these patterns."""
        patterns = list(patterns)
        return len(patterns) <= _MAX_PATTERN_NAMES and all(map(is_possible_pattern, patterns))

    # Objects are closed.

    def _groups(self, given: dict[str, Any]) -> list[list[Any]]:
        """What applies in place beside a node's own keywords; one of each group does, at least."""
        groups: list[list[Any]] = []
        for keyword in ("allOf", "dependentSchemas", "dependencies"):
            several = given.get(keyword)
            if isinstance(several, dict):
                several = [one for one in several.values() if isinstance(one, dict)]
            groups += [[one] for one in several or ()] if isinstance(several, list) else []
        groups += [given[key] for key in ("anyOf", "oneOf") if isinstance(given.get(key), list)]
        groups += [[given[key]] for key in ("then", "else") if key in given]
        if (target := self._target(given.get("$ref"))) is not None:
            groups.append([target[0]])
        return groups

    def _joins(self, given: dict[str, Any], groups: list[list[Any]]) -> bool:
        """Whether several parts of it speak of one object, so that none may close it alone."""
        if len(groups) != 1:
            return bool(groups)
        if any(keyword in given for keyword in OWN):
            return True
        required = given.get("required")
        all_names = [self._names(part) for part in groups[0]]
        return is_texts(required) and any(
            not names.are_open and not set(required) <= names.found.keys() for names in all_names
        )

    def _names(self, given: Any, depth: int = 0) -> _Names:
        """The properties that it and what applies in place speak of."""
        if not isinstance(given, dict):
            return _Names({}, False, False)
        if (known := self._known_names.get(id(given))) is not None:
            return known
        self._steps_left -= 1
        if depth > _MAX_DEEP or self._steps_left < 0:
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
            found |= dict.fromkeys(names) if is_texts(names) else {}
        for part in (one for group in self._groups(given) for one in group):
            other = self._names(part, depth + 1)
            found |= other.found
            are_open, are_declared = are_open or other.are_open, are_declared or other.are_declared
        self._known_names[id(given)] = names = _Names(found, are_open, are_declared)
        return names

    def _close(self, given: dict[str, Any], made: dict[str, Any]) -> bool:
        """Allow no properties but those that are spoken of; False where there may be others."""
        names = self._names(given)
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
        """Require no property that there cannot be."""
        if made.get("additionalProperties") is not False or made.get("patternProperties"):
            return
        declared = made.get("properties", {})
        required = made.get("required", [])
        if any(name not in declared for name in required):
            self._lose(path, "required")
            made["required"] = [name for name in required if name in declared]

    # What is named elsewhere.

    def _definition(self, reference: Any, is_open: bool) -> int | None:
        """The number of the definition that a `$ref` names; None where there is none to be had."""
        found = self._target(reference)
        if found is None or self._applies_in_itself(found[0]):
            return None
        target, path = found
        key = (id(target), is_open)
        if key not in self._numbers:
            self._numbers[key] = len(self._waiting)
            self._waiting.append((target, path, is_open))
        return self._numbers[key]

    def _target(self, reference: Any) -> tuple[dict[str, Any], Path] | None:
        """The node that a `$ref` names, and its path."""
        if not isinstance(reference, str):
            return None
        if reference not in self._targets:
            self._targets[reference] = self._found(reference)
        return self._targets[reference]

    def _found(self, reference: str) -> tuple[dict[str, Any], Path] | None:
        if reference in self._anchors:
            return self._anchors[reference]
        base, _, fragment = reference.partition("#")
        if base and self._anchors.get(base, (None,))[0] is not self._root:
            return None
        node, path = self._root, tuple(unquote(fragment).split("/")[1:])
        if fragment and not fragment.startswith("/"):
            return None
        path = tuple(part.replace("~1", "/").replace("~0", "~") for part in path)
        for part in path:
            if isinstance(node, list) and part.isdecimal() and int(part[:9]) < len(node):
                node = node[int(part[:9])]
            elif isinstance(node, dict) and part in node:
                node = node[part]
            else:
                return None
        return (node, path) if isinstance(node, dict) else None

    @cached_property
    def _anchors(self) -> dict[str, tuple[dict[str, Any], Path]]:
        """Nodes by the names that they give themselves."""
        found: dict[str, tuple[dict[str, Any], Path]] = {}
        waiting: list[tuple[Any, Path]] = [(self._root, ())]
        while waiting:
            node, path = waiting.pop()
            pairs = node.items() if isinstance(node, dict) else enumerate(node)
            if isinstance(node, dict):
                for keyword in ("$anchor", "$id", "id"):
                    if isinstance(name := node.get(keyword), str):
                        found.setdefault("#" * (keyword == "$anchor") + name, (node, path))
            waiting += [
                (one, (*path, str(key))) for key, one in pairs if isinstance(one, dict | list)
            ]
        return found

    def _applies_in_itself(self, target: dict[str, Any]) -> bool:
        """Whether a node applies in place within itself, so that no answer would ever begin."""
        if (known := self._is_endless.get(id(target))) is not None:
            return known
        seen: set[int] = set()
        waiting = [target]
        is_endless = False
        while waiting and not is_endless:
            node = waiting.pop()
            for one in (part for group in self._groups(node) for part in group):
                self._steps_left -= 1
                is_endless = is_endless or one is target or self._steps_left < 0
                if isinstance(one, dict) and id(one) not in seen:
                    seen.add(id(one))
                    waiting.append(one)
        self._is_endless[id(target)] = is_endless
        return is_endless

    # What llguidance refuses even so.

    def _with_definitions(self, node: dict[str, Any]) -> dict[str, Any]:
        return {**node, "$defs": self._defs} if self._defs else node

    def _try(self, node: Node, coerce: bool = True) -> str:
        """What llguidance says against a node; empty where it takes it."""
        if isinstance(node, bool):
            return "" if node else _UNSATISFIABLE
        if self._chars_left < 0:
            return "too much was tried"
        whole = self._with_definitions(node)
        self._chars_left -= len(json.dumps(whole)) + _COST_OF_TRY
        problem = problem_of(whole, coerce)
        if problem.startswith(_PUZZLES):
            self._chars_left -= _COST_OF_PUZZLE
        elif "fuel" in problem:
            self._chars_left = -1
        return problem

    def _mend_definitions(self, paths: list[Path]) -> None:
        """Those that are not mended yet stand aside meanwhile, as schemas that take all."""
        nodes = list(self._defs.values())
        self._defs = dict.fromkeys(self._defs, True)
        for number, (node, path) in enumerate(zip(nodes, paths, strict=True)):
            self._defs[str(number)] = node
            self._defs[str(number)] = self._mended(node, path, is_needed=False)

    def _mended(self, node: Node, path: Path, is_needed: bool) -> Node:
        """The node with as much left out as has to be; False, unless needed, if no value fits."""
        problem = self._try(node)
        if not problem or (node is False and not is_needed):
            return node
        if isinstance(node, bool) or self._chars_left < 0:
            self._lose(path, WHOLE)
            return True
        for needed in (False, True):
            for held, key, names in _children(node):
                if not needed or held is not node:
                    held[key] = self._mended(held[key], (*path, *names), needed)
            problem = self._try(node)
            if not problem:
                return node
            if not problem.startswith(_UNSATISFIABLE):
                break
            if not is_needed:
                return False
        for keywords in _ways(node):
            without = _without(node, keywords)
            if not self._try(without):
                for keyword in keywords:
                    self._lose(path, keyword)
                return without
        self._lose(path, WHOLE)
        return True

    def _lose_unions(self, node: Node, path: Path) -> None:
        """Tell of each `oneOf` that is held to as if it were `anyOf`."""
        if isinstance(node, bool):
            return
        if "oneOf" in node:
            members = [self._resolved(one) for one in node["oneOf"]]
            if self._try({"oneOf": members}, coerce=False):
                self._lose(path, "oneOf")
        for held, key, names in _children(node):
            self._lose_unions(held[key], (*path, *names))

    def _resolved(self, node: Node) -> Node:
        """What a node names that only names another: llguidance compares no references."""
        for _ in range(_MAX_DEEP):
            if isinstance(node, bool) or node.keys() != {"$ref"}:
                break
            node = self._defs[node["$ref"].removeprefix("#/$defs/")]
        return node


class _Names(NamedTuple):
    """Names of properties, in their order."""

    found: dict[str, None]
    are_open: bool  # there may be others, as it says
    are_declared: bool  # by `properties`, somewhere


def _children(node: dict[str, Any]) -> Iterator[tuple[Any, Any, Path]]:
    """Where the schemas within a node are: what holds each, its key there, its names."""
    for keyword in [*NAMES, *UNIONS, "prefixItems"]:
        held = node.get(keyword, ())
        for key in list(held) if isinstance(held, dict) else range(len(held)):
            yield held, key, (keyword, str(key))
    for keyword in SINGLE:
        if keyword in node:
            yield node, keyword, (keyword,)


def _ways(node: dict[str, Any]) -> Iterator[list[str]]:
    """What to leave out of a node: one of its limits, all of them, one other keyword."""
    limits = [keyword for keyword in LIMITS if keyword in node]
    yield from ([keyword] for keyword in limits)
    if len(limits) > 1:
        yield limits
    yield from ([keyword] for keyword in STRUCTURE if keyword in node)


def _without(node: dict[str, Any], keywords: list[str]) -> dict[str, Any]:
    left_out = {*keywords, *(GOES_WITH.get(keyword) for keyword in keywords)}
    return {key: value for key, value in node.items() if key not in left_out}
