"""The given JSON schema: what its references name, and which parts apply to one object."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import unquote

from hotcold.ui.api.tools.keywords import is_texts

Path = tuple[str, ...]
MAX_DEPTH = 100  # keywords and names on the way to a node
_MAX_STEPS = 50_000  # from node to node, to find what applies in place


class PropertyNames(NamedTuple):
    """The property names that a node and what applies in place mention, in order."""

    found: dict[str, None]
    are_open: bool  # there may be others, as it says
    are_declared: bool  # by `properties`, somewhere


class SchemaIndex:
    """Looks up nodes of one schema, in a bounded number of steps."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps_left = _MAX_STEPS
        # By the ids of nodes of the root, which all live as long as this.
        self._known_names: dict[int, PropertyNames] = {}
        self._is_endless: dict[int, bool] = {}
        self._targets: dict[str, tuple[dict[str, Any], Path] | None] = {}

    def groups(self, given: dict[str, Any]) -> list[list[Any]]:
        """Subschemas that apply in place beside the node's keywords; at least one a group."""
        groups: list[list[Any]] = []
        for keyword in ("allOf", "dependentSchemas", "dependencies"):
            several = given.get(keyword)
            if isinstance(several, dict):
                several = [one for one in several.values() if isinstance(one, dict)]
            groups += [[one] for one in several or ()] if isinstance(several, list) else []
        groups += [given[key] for key in ("anyOf", "oneOf") if isinstance(given.get(key), list)]
        groups += [[given[key]] for key in ("then", "else") if key in given]
        if (target := self.target(given.get("$ref"))) is not None:
            groups.append([target[0]])
        return groups

    def names(self, given: Any, depth: int = 0) -> PropertyNames:
        """The properties that a node and what applies in place mention."""
        if not isinstance(given, dict):
            return PropertyNames({}, False, False)
        if (known := self._known_names.get(id(given))) is not None:
            return known
        self._steps_left -= 1
        if depth > MAX_DEPTH or self._steps_left < 0:
            return PropertyNames({}, True, False)
        self._known_names[id(given)] = PropertyNames({}, False, False)  # for a node within itself
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
        for part in (one for group in self.groups(given) for one in group):
            other = self.names(part, depth + 1)
            found |= other.found
            are_open, are_declared = are_open or other.are_open, are_declared or other.are_declared
        self._known_names[id(given)] = names = PropertyNames(found, are_open, are_declared)
        return names

    def target(self, reference: Any) -> tuple[dict[str, Any], Path] | None:
        """The node that a `$ref` names, and its path; None without one."""
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
        """Nodes by their anchors and ids."""
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

    def applies_in_itself(self, target: dict[str, Any]) -> bool:
        """Whether a node applies in place within itself, so that no value is ever complete."""
        if (known := self._is_endless.get(id(target))) is not None:
            return known
        seen: set[int] = set()
        waiting = [target]
        is_endless = False
        while waiting and not is_endless:
            node = waiting.pop()
            for one in (part for group in self.groups(node) for part in group):
                self._steps_left -= 1
                is_endless = is_endless or one is target or self._steps_left < 0
                if isinstance(one, dict) and id(one) not in seen:
                    seen.add(id(one))
                    waiting.append(one)
        self._is_endless[id(target)] = is_endless
        return is_endless
