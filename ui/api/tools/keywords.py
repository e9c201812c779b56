"""Keywords of JSON Schema: those that llguidance enforces, and with which values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, TypeGuard

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

_LARGEST = 1 << 53  # beyond it neighbouring whole numbers are one float
_MAX_COUNTED = 1 << 20  # more than any answer's tokens
_MAX_REPEATED = 10_000  # of a pattern's counts, multiplied
_MAX_PATTERN_CHARS = 5000

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
NAMES = ("properties", "patternProperties")  # name -> schema
UNIONS = ("oneOf", "anyOf", "allOf")  # lists of schemas, which apply in place
SINGLE = ("additionalProperties", "items")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
OWN = (*NAMES, "additionalProperties")
TYPE_OF = {  # keyword -> the only type that it applies to
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys((*BOUNDS, "multipleOf"), "number"),
    **dict.fromkeys(("items", "prefixItems", "additionalItems", "minItems", "maxItems"), "array"),
    **dict.fromkeys(("uniqueItems", "contains", "unevaluatedItems"), "array"),
    **dict.fromkeys((*OWN, "required", "minProperties", "maxProperties"), "object"),
    **dict.fromkeys(("propertyNames", "unevaluatedProperties"), "object"),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), "object"),
}
# Keywords that llguidance lacks -> whether this value, in this node, has no effect.
LACKED: dict[str, Callable[[Any, dict[str, Any]], bool]] = {
    "not": lambda value, _: value is False,
    "if": lambda _, node: "then" not in node and "else" not in node,
    "dependencies": lambda value, _: not value,
    "dependentRequired": lambda value, _: not value,
    "dependentSchemas": lambda value, _: not value,
    "contains": lambda _, node: node.get("minContains") == 0 and "maxContains" not in node,
    "uniqueItems": lambda value, _: not value,
    "unevaluatedItems": lambda value, _: value is True,
    "propertyNames": lambda value, _: value is True or value in ({}, {"type": "string"}),
    "$dynamicRef": lambda *_: False,
    "$recursiveRef": lambda *_: False,
}
# Keyword -> the one that would be stricter without it.
GOES_WITH = {
    "properties": "additionalProperties",
    "patternProperties": "additionalProperties",
    "prefixItems": "items",
}
# Where llguidance refuses a node, the first of these that helps is dropped.
LIMITS = ("format", "pattern", "multipleOf", *COUNTS, *BOUNDS, "enum", "const", "required")
STRUCTURE = (
    "patternProperties", *UNIONS, "$ref", "prefixItems", "items", "additionalProperties",
    "properties", "type",
)  # fmt: skip
_SET_IN_SET = re.compile(r"\[[^\]]*(&&|~~|--|\[)")  # Rust's patterns alone have such
_COUNTED = re.compile(r"\{(\d*+),?+(\d*+)\}")


class _Bytes:
    """A tokenizer of single bytes, to try grammars with: the result does not depend on it."""

    eos_token_id = 256
    bos_token_id = None

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"</s>"]
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def _table() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def problem_with(grammar: str) -> str:
    """llguidance's error for a grammar; empty if it accepts it."""
    matcher = LLMatcher(_table(), grammar, log_level=0)
    return matcher.get_error() if matcher.is_error() else ""


def problem_of(schema: dict[str, Any], coerce: bool = True) -> str:
    """llguidance's error for a schema; with `coerce` a `oneOf` counts as `anyOf`."""
    options = {"x-guidance": {"coerce_one_of": coerce}}
    return problem_with(LLMatcher.grammar_from_json_schema(json.dumps(schema | options)))


@lru_cache(1024)
def _is_taken(keyword: str, value: str) -> bool:
    return not problem_of({"type": "string", keyword: value})


def is_possible_pattern(pattern: str) -> bool:
    """Whether llguidance reads the pattern as JSON Schema means it, at a bounded cost."""
    repeated = 1
    for counts in _COUNTED.findall(pattern[:_MAX_PATTERN_CHARS]):
        repeated *= max(1, *(int(count[:9] or 0) for count in counts))
    if repeated > _MAX_REPEATED or len(pattern) > _MAX_PATTERN_CHARS:
        return False
    return not _SET_IN_SET.search(pattern) and _is_taken("pattern", pattern)


def types_in(value: Any) -> list[str]:
    """The types that `type` names; none where one of them is no type."""
    kinds = value if isinstance(value, list) else [value]
    return kinds if all(kind in TYPES for kind in kinds) else []


def is_number(value: Any) -> bool:
    """Whether it is a number that a float holds exactly enough."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= _LARGEST


def _is_constant(value: Any) -> bool:
    """Whether floats hold all numbers in it."""
    if isinstance(value, dict | list):
        return all(map(_is_constant, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str | bool | None) or is_number(value)


def _is_step(value: Any) -> bool:
    return is_number(value) and 0 < value <= 10**6 and float(value * 10**6).is_integer()


def _is_count(value: Any) -> bool:
    return is_number(value) and 0 <= value <= _MAX_COUNTED and int(value) == value


def is_texts(value: Any) -> TypeGuard[list[str]]:
    """Whether it is a list of texts."""
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


# Keywords without schemas in them -> whether their value can be enforced.
PLAIN: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(COUNTS, _is_count),
    **dict.fromkeys(BOUNDS, is_number),
    "multipleOf": _is_step,
    "const": _is_constant,
    "enum": lambda value: isinstance(value, list) and _is_constant(value),
    "required": is_texts,
    "format": lambda value: (
        isinstance(value, str) and len(value) < 100 and _is_taken("format", value)
    ),
    "pattern": lambda value: isinstance(value, str) and is_possible_pattern(value),
}
