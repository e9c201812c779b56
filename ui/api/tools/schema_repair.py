"""Drops the parts of a schema that llguidance refuses, from the root down, and reports them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from hotcold.ui.api.tools.keywords import (
    GOES_WITH,
    LIMITS,
    NAMES,
    SINGLE,
    STRUCTURE,
    UNIONS,
    problem_of,
)
from hotcold.ui.api.tools.schema_index import MAX_DEPTH, Path

Node = dict[str, Any] | bool
WHOLE = "schema"  # in a keyword's place: the whole node, which no value fits or which is none
_COST_OF_TRY = 2000  # as many characters
_COST_OF_PUZZLE = 10_000

# How llguidance's errors begin.
_UNSATISFIABLE = "Unsatisfiable"
_PUZZLES = ("Unable to determine", "schema too large")


class Lost(NamedTuple):
    """A keyword that cannot be enforced, and the path of its node."""

    path: Path
    keyword: str

    def __str__(self) -> str:
        names = self.path if self.keyword == WHOLE else (*self.path, self.keyword)
        return ".".join(names)[:200] or "the schema as a whole"


class SchemaRepair:
    """Tries nodes of one schema, at a bounded cost, and drops what llguidance refuses."""

    def __init__(
        self, definitions: list[Node], paths: list[Path], lost: dict[Lost, None], max_chars: int
    ) -> None:
        """`paths`: of the definitions; `lost`: gets what is dropped; `max_chars`: to try."""
        self.definitions = {str(number): node for number, node in enumerate(definitions)}
        self._paths = paths
        self._lost = lost
        self._chars_left = max_chars

    def repaired(self, root: Node) -> Node:
        """The root as llguidance accepts it, once all definitions are."""
        if isinstance(root, bool) or self._try(root):
            self._mend_definitions()
            root = self._mended(root, (), is_needed=True)
        return root

    def lose_unions(self, root: Node) -> None:
        """Report each `oneOf` that is enforced as if it were `anyOf`."""
        nodes = [*self.definitions.values(), root]
        for node, path in zip(nodes, [*self._paths, ()], strict=True):
            self._lose_unions(node, path)

    def _lose(self, path: Path, keyword: str) -> None:
        self._lost[Lost(path, keyword)] = None

    def with_definitions(self, node: dict[str, Any]) -> dict[str, Any]:
        """A node as a whole schema."""
        return {**node, "$defs": self.definitions} if self.definitions else node

    def _try(self, node: Node, coerce: bool = True) -> str:
        """llguidance's error for a node; empty if it accepts it."""
        if isinstance(node, bool):
            return "" if node else _UNSATISFIABLE
        if self._chars_left < 0:
            return "too much was tried"
        whole = self.with_definitions(node)
        self._chars_left -= len(json.dumps(whole)) + _COST_OF_TRY
        problem = problem_of(whole, coerce)
        if problem.startswith(_PUZZLES):
            self._chars_left -= _COST_OF_PUZZLE
        elif "fuel" in problem:
            self._chars_left = -1
        return problem

    def _mend_definitions(self) -> None:
        """One after the other; those that are not mended yet allow everything meanwhile."""
        nodes = list(self.definitions.values())
        self.definitions = dict.fromkeys(self.definitions, True)
        for number, (node, path) in enumerate(zip(nodes, self._paths, strict=True)):
            self.definitions[str(number)] = node
            self.definitions[str(number)] = self._mended(node, path, is_needed=False)

    def _mended(self, node: Node, path: Path, is_needed: bool) -> Node:
        """The node with as little dropped as possible; False, unless needed, if no value fits."""
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
        """`lose_unions` of one node."""
        if isinstance(node, bool):
            return
        if "oneOf" in node:
            members = [self._resolved(one) for one in node["oneOf"]]
            if self._try({"oneOf": members}, coerce=False):
                self._lose(path, "oneOf")
        for held, key, names in _children(node):
            self._lose_unions(held[key], (*path, *names))

    def _resolved(self, node: Node) -> Node:
        """The target of a node that is only a `$ref`: llguidance compares no references."""
        for _ in range(MAX_DEPTH):
            if isinstance(node, bool) or node.keys() != {"$ref"}:
                break
            node = self.definitions[node["$ref"].removeprefix("#/$defs/")]
        return node


def _children(node: dict[str, Any]) -> Iterator[tuple[Any, Any, Path]]:
    """The schemas within a node: the container of each, its key there, its path."""
    for keyword in [*NAMES, *UNIONS, "prefixItems"]:
        held = node.get(keyword, ())
        for key in list(held) if isinstance(held, dict) else range(len(held)):
            yield held, key, (keyword, str(key))
    for keyword in SINGLE:
        if keyword in node:
            yield node, keyword, (keyword,)


def _ways(node: dict[str, Any]) -> Iterator[list[str]]:
    """What to drop from a node: one of its limits, all of them, one other keyword."""
    limits = [keyword for keyword in LIMITS if keyword in node]
    yield from ([keyword] for keyword in limits)
    if len(limits) > 1:
        yield limits
    yield from ([keyword] for keyword in STRUCTURE if keyword in node)


def _without(node: dict[str, Any], keywords: list[str]) -> dict[str, Any]:
    left_out = {*keywords, *(GOES_WITH.get(keyword) for keyword in keywords)}
    return {key: value for key, value in node.items() if key not in left_out}
