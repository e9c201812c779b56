"""JSON schemas as answers can be held to them, compared with jsonschema and with llguidance."""

from __future__ import annotations

import json
import random
import time
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from hotcold.actors.driver.grammars.grammar import schema_grammar
from hotcold.actors.driver.grammars.json_schema import enforced
from hotcold.actors.protocol.messages import Grammar
from hotcold.model.errors import UsageError
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.text.tokenizer import Tokenizer

TEXT: dict[str, Any] = {"type": "string"}
END_ID = 0


def object_of(properties: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **others}


@cache
def table() -> tuple[LLTokenizer, Tokenizer]:
    tokenizer = Tokenizer.from_model(DEMO_DIRECTORY)
    assert tokenizer is not None
    return LLTokenizer(tokenizer.to_json(), tokenizer.vocab_size, [END_ID]), tokenizer


@cache
def endings() -> np.ndarray:
    """Which tokens end a JSON value, or a text in it."""
    tokenizer = table()[1]
    texts = [tokenizer.decode([token]).strip() for token in range(tokenizer.vocab_size)]
    return np.array([text[:1] in ("}", "]", '"') and text != "" for text in texts])


def matcher(schema: dict[str, Any]) -> LLMatcher:
    """What holds an answer to a schema as it was read."""
    options = {"lenient": True, "whitespace_pattern": " ?"}
    source = LLMatcher.grammar_from_json_schema(json.dumps(schema | {"x-guidance": options}))
    return matcher_of(source)


def matcher_of(source: str) -> LLMatcher:
    found = LLMatcher(table()[0], source, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def takes(schema: dict[str, Any], value: Any) -> bool:
    """Whether an answer may be this value."""
    return takes_text(matcher(schema), json.dumps(value, ensure_ascii=False))


def takes_text(found: LLMatcher | str, text: str) -> bool:
    """Whether an answer may be this text; of a Lark grammar, too."""
    if isinstance(found, str):
        found = matcher_of(LLMatcher.grammar_from_lark(found))
    return bool(found.consume_tokens(table()[1].encode(text, False)) and found.is_accepting())


def drawn(found: LLMatcher, rng: np.random.Generator, most: int = 300) -> str | None:
    """An answer of tokens drawn from those that may come; None where it is long without end."""
    tokenizer, ends = table()[1], endings()
    bits = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
    ids: list[int] = []
    while not found.is_stopped() and len(ids) < most:
        found.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        assert not found.is_error(), found.get_error()
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: len(ends)].astype(bool)
        if allowed[END_ID]:
            break
        ending = allowed & ends
        chosen = np.flatnonzero(ending if ending.any() and rng.random() < 0.6 else allowed)
        ids.append(int(rng.choice(chosen)))
        assert found.consume_token(ids[-1]), found.get_error()
    return tokenizer.decode(ids) if found.is_accepting() or found.is_stopped() else None


@pytest.mark.parametrize(
    ("node", "lost"),
    [
        ({"type": "string", "format": "password"}, ["format"]),
        ({"type": "string", "pattern": "^(?=a).b$"}, ["pattern"]),
        ({"type": "string", "minLength": "3", "maxLength": -1}, ["minLength", "maxLength"]),
        ({"type": "array", "maxItems": 10**30, "minItems": 1.5}, ["maxItems", "minItems"]),
        ({"type": "array", "uniqueItems": True, "contains": TEXT}, ["uniqueItems", "contains"]),
        ({"type": "array", "items": 5}, ["items"]),
        ({"type": "number", "minimum": 1e300, "maximum": None}, ["minimum", "maximum"]),
        ({"type": "number", "multipleOf": 1e-300}, ["multipleOf"]),
        ({"type": ["string", "any"]}, ["type"]),
        ({"type": {"type": "string"}}, ["type"]),
        ({"anyOf": []}, ["anyOf"]),
        ({"oneOf": [TEXT, {**TEXT, "minLength": 2}]}, ["oneOf"]),
        ({"not": {"enum": ["a"]}}, ["not"]),
        ({"if": {}, "then": {}, "else": False}, ["if", "then", "else"]),
        ({"enum": {}}, ["enum"]),
        ({"$ref": "#/$defs/nowhere"}, ["$ref"]), ({"$ref": "other.json"}, ["$ref"]),
        ({"type": "string", "format": 5}, ["format"]),
        ({"$dynamicRef": "#x", "$recursiveRef": "#"}, ["$dynamicRef", "$recursiveRef"]),
        (object_of({"a": TEXT}, required=["b"], additionalProperties=False), ["required"]),
        (object_of({"a": TEXT, "b": TEXT}, minProperties=2, maxProperties=3),
         ["minProperties"]),
        ({"type": "object", "properties": [TEXT], "additionalProperties": False}, ["properties"]),
        ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, ["patternProperties"]),
        ({"type": "object", "patternProperties": {"(?!a)": {}}, "additionalProperties": False},
         ["patternProperties"]),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, ["propertyNames"]),
        ({"type": "object", "dependencies": {"a": ["b"]}}, ["dependencies"]),
        ({"type": "array", "unevaluatedItems": False}, ["unevaluatedItems"]),
        ([], ["schema"]), (None, ["schema"]),
        # What says nothing, or is said in another way, is no loss.
        (True, []), ({}, []),
        ({"type": "integer", "format": "int64", "minLength": 10}, []),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, []),
        ({"type": "string", "nullable": True, "example": "x", "$comment": 5, "deprecated": 1}, []),
        ({"type": "array", "items": [TEXT], "additionalItems": False, "uniqueItems": False}, []),
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": TEXT}, []),
        (object_of({"a": TEXT}, unevaluatedProperties=False), []),
        (object_of({"a": {"not": {}}, "b": {"enum": []}, "c": False}), []),
        ({"id": "x", "$schema": "http://json-schema.org/draft-04/schema#", "type": "string"}, []),
        ({"oneOf": [TEXT, {"type": "null"}]}, []),
        ({"oneOf": [object_of({"k": {"const": name}}, required=["k"]) for name in "ab"]}, []),
        ({"if": {"type": "string"}}, []),
    ],
)  # fmt: skip
def test_a_node_loses_what_it_cannot_be_held_to_and_no_other_does(node: Any, lost: Any) -> None:
    beside = {"type": "string", "maxLength": 1}
    schema = object_of({"a": node, "b": beside, 'c" \n\u2028é': {"enum": ["x"]}}, required=["b"])
    found = enforced(schema, is_object=True)
    assert sorted(found.lost) == sorted(lost)
    assert takes(found.schema, {"b": "x", 'c" \n\u2028é': "x"})
    assert not takes(found.schema, {"b": "xx"}) and not takes(found.schema, {})
    assert not takes(found.schema, {"b": "x", "z": 1})
    assert not takes(found.schema, {"b": "x", 'c" \n\u2028é': "y"})
    if not lost and isinstance(node, dict):
        assert enforced(node).lost == ()
    with_it = Grammar("json_schema", json.dumps(schema))
    if lost:
        with pytest.raises(UsageError) as refused:
            schema_grammar(with_it, True)
        assert f"answers cannot be held to '{found.lost[0]}'" in str(refused.value)
    else:
        assert schema_grammar(with_it, True)
    assert schema_grammar(with_it, False)


PERSON: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$id": "https://example.com/person",
    "type": "object",
    "definitions": {
        "node": object_of(
            {"value": {"type": "number"}, "next": {"$ref": "#/definitions/node"}},
            required=["value"],
        ),
        "named": object_of({"name": {"$ref": "#short"}}, required=["name"]),
        "short": {"$anchor": "short", "type": "string", "maxLength": 3},
        "loop": {"$ref": "#/definitions/pool"},
        "pool": {"anyOf": [{"$ref": "#/definitions/loop"}, TEXT]},
        "odd/~name": {"const": 5},
    },
    "allOf": [{"$ref": "#/definitions/named"}, {"properties": {"age": {"type": "integer"}}}],
    "properties": {
        "list": {"$ref": "#/definitions/node"},
        "same": {"$ref": "#/properties/list"},
        "loop": {"$ref": "#/definitions/loop"},
        "odd": {"$ref": "#/definitions/odd~1~0name"},
        "self": {"$ref": "#"},
        "by_id": {"$ref": "https://example.com/person#/definitions/short"},
    },
}


def test_references_and_parts_that_share_an_object() -> None:
    found = enforced(PERSON)
    assert found.lost == ("$ref",)  # by an address
    right: list[Any] = [
        {"name": "a"},
        {"name": "abc", "age": 7, "list": {"value": 1.5, "next": {"value": 2}}},
        {"name": "a", "same": {"value": 1}, "loop": "a", "odd": 5, "self": {"name": "b"},
         "by_id": "any"},
    ]  # fmt: skip
    wrong: list[Any] = [
        {},
        {"name": "long"},
        {"name": "a", "age": "7"},
        {"name": "a", "list": {}},
        {"name": "a", "self": {}},
    ]
    closed: list[Any] = [{"name": "a", "x": 1}, {"name": "a", "list": {"value": 1, "x": 1}}]
    whole = jsonschema.Draft202012Validator({**PERSON, "properties": {
        **PERSON["properties"], "loop": True}})  # fmt: skip
    for values, is_valid, is_taken in (
        (right, True, True), (wrong, False, False), (closed, True, False)
    ):  # fmt: skip
        assert [whole.is_valid(value) for value in values] == [is_valid] * len(values)
        assert [takes(found.schema, value) for value in values] == [is_taken] * len(values)


# A schema of a function's arguments, what it takes and what not.
CLOSED: list[tuple[Any, list[Any], list[Any]]] = [
    # Members of a union close themselves; what stands beside them closes all at once.
    ({"anyOf": [object_of({"a": TEXT}), object_of({"b": TEXT})]},
     [{"a": "x"}, {"b": "x"}], [{"a": "x", "b": "x"}, {"c": 1}]),
    (object_of({"k": TEXT}, oneOf=[object_of({"a": {"const": 1}}, required=["a"]),
                                   object_of({"b": {"const": 2}}, required=["b"])]),
     [{"k": "x", "a": 1}, {"k": "x", "b": 2}], [{"k": "x"}, {"k": "x", "a": 2}, {"c": 1}]),
    (object_of({"k": TEXT}, **{"if": {}, "then": {"required": ["z"]}}),
     [{"k": "x"}, {"k": "x", "z": 5}], [{"c": 1}]),
    (object_of({"a": TEXT, "b": TEXT}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
     [{"a": "x"}, {"b": "x"}, {"a": "x", "b": "x"}], [{}, {"c": 1}]),
    (object_of({"a": TEXT}, required=["b"]),
     [{"a": "x", "b": 1}], [{"a": "x"}, {"b": 1, "c": 1}]),
    # What says that there may be others is believed.
    (object_of({"a": TEXT}, additionalProperties=True), [{"z": 1}], [{"a": 1}]),
    (object_of({"a": TEXT}, patternProperties={"^x-": TEXT}), [{"x-a": "x"}, {"z": 1}], []),
    (object_of({"a": TEXT}, allOf=[{"additionalProperties": TEXT}]), [{"z": "x"}], [{"z": 1}]),
    ({"type": "object", "required": ["a"]}, [{"a": 1, "b": 2}], [{}]),
    # A node that no value fits: left out where it may be, loosened where it must be there.
    (object_of({"a": {"enum": []}, "b": TEXT}), [{"b": "x"}], [{"a": 1}]),
    (object_of({"a": {"type": "string", "enum": [1]}, "b": TEXT}, required=["a"]),
     [{"a": "any", "b": "x"}], [{"b": "x"}, {"a": "any", "b": 1}]),
]  # fmt: skip
ARGUMENTS: list[tuple[Any, list[Any], list[Any]]] = [
    (None, [{}], [{"a": 1}]),
    (True, [{}, {"a": 1}], [1]),
    ("text", [{}, {"a": 1}], ["text"]),
    ({"type": "array", "properties": {"a": TEXT}}, [{}, {"a": "x"}], [[], {"a": 1}]),
    ({"type": ["object", "null"], "properties": {"a": TEXT}}, [{"a": "x"}], [None]),
    ({"properties": {"a": TEXT}}, [{"a": "x"}], ["x", {"b": 1}]),
    (False, [{"a": 1}], [1]),
]


@pytest.mark.parametrize(("schema", "taken", "refused"), [*CLOSED, *ARGUMENTS])
def test_objects_are_closed_and_arguments_are_objects(
    schema: Any, taken: list[Any], refused: list[Any]
) -> None:
    found = enforced(schema, is_object=True)
    assert [takes(found.schema, value) for value in taken] == [True] * len(taken)
    assert [takes(found.schema, value) for value in refused] == [False] * len(refused)


def _random(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of keywords that an answer can be held to."""
    if depth < 3 and rng.random() < 0.6:
        if rng.random() < 0.3:
            return {"type": "array", "items": _random(rng, depth + 1), "maxItems": 3}
        if rng.random() < 0.3:
            return {rng.choice(["anyOf", "oneOf"]): [_random(rng, depth + 1), {"type": "null"}]}
        names = rng.sample("abcdefg", rng.randint(1, 4))
        node = object_of({name: _random(rng, depth + 1) for name in names})
        node["required"] = rng.sample(names, rng.randint(0, len(names)))
        if rng.random() < 0.2:
            node["additionalProperties"] = rng.choice([False, {"type": "integer"}])
        return node
    low = rng.randint(-30, 30)
    leaves: list[dict[str, Any]] = [
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)},
        {"type": "number", "exclusiveMinimum": low, "maximum": low + rng.randint(1, 9)},
        {"type": "integer", "multipleOf": rng.randint(1, 9), "maximum": 999, "minimum": 0},
        {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 6)},
        {"type": "string", "pattern": rng.choice(["^[a-c]{1,4}$", "^x-\\d+$", "ab"])},
        {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])},
        {"enum": rng.sample([1, "a", None, True, {"x": [1]}, "b c"], 3)},
        {"const": rng.choice([0, -5, "é", [], {"k": None}])},
        {"type": ["boolean", "null"]},
    ]
    return rng.choice(leaves)


def test_answers_fit_schemas_of_which_nothing_was_lost() -> None:
    rng, draws = random.Random(0), np.random.default_rng(0)
    num_whole = 0
    for _ in range(60):
        schema = _random(rng)
        found = enforced(schema)
        assert set(found.lost) <= {"oneOf"}
        for _ in range(2):
            text = drawn(matcher(found.schema), draws)
            if text is not None and not found.lost:
                num_whole += 1
                jsonschema.validate(json.loads(text), schema)
    assert num_whole > 60


_JUNK: list[Any] = [
    None, True, False, 0, -1, 1e308, 10**400, "", "a", [], {}, [1], [{}], ["a", None], {"a": 1},
    {"a": {}}, [[]], {"type": "string"}, {"$ref": "#"}, {"not": {}}, "#", "(", "object",
]  # fmt: skip


def _mutated(value: Any, rng: random.Random) -> Any:
    """A schema with junk, or another part of it, somewhere."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return rng.choice(_JUNK)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = rng.choice(keys)
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = _mutated(copy[key], rng)
    return copy


def test_no_schema_whatever_ends_a_request() -> None:
    rng = random.Random(1)
    seeds = [PERSON, *(_random(rng) for _ in range(10))]
    keywords = (
        "not if then else contains propertyNames items additionalItems dependencies allOf anyOf "
        "dependentSchemas dependentRequired prefixItems required properties patternProperties "
        "unevaluatedProperties type enum minProperties exclusiveMinimum $anchor $id id format"
    )
    seeds.append(dict.fromkeys(keywords.split(), TEXT))
    for _ in range(200):
        schema = rng.choice(seeds)
        for _ in range(rng.randint(1, 4)):
            schema = _mutated(schema, rng)
        for is_object in (False, True):
            matcher(enforced(schema, is_object).schema)
    matcher(enforced({"properties": {"a": {"const": 10**5000}}}, is_object=True).schema)


HOSTILE: dict[str, Any] = {
    "a chain": {"$ref": "#/$defs/0", "$defs": {str(i): {"allOf": [
        {"$ref": f"#/$defs/{i + 1}"}, {"$ref": f"#/$defs/{i + 2}"}]} for i in range(900)}},
    "patterns": object_of({f"p{i}": {
        **TEXT, "pattern": f"(a|b)*{i}(x|y){{1,99}}z", "format": "uri", "minLength": 90}
        for i in range(300)}),
    "names by pattern": {"patternProperties": {f"^a{i}$": TEXT for i in range(900)}},
    "many refused": object_of({f"p{i}": object_of({"a": TEXT, "b": TEXT}, minProperties=2)
                               for i in range(900)}),
    "refused references": {"$defs": {"a": object_of(
        {"n": {"$ref": "#/$defs/a", "minProperties": 3}, "b": TEXT}, minProperties=2)},
        "properties": {f"p{i}": {"$ref": "#/$defs/a"} for i in range(900)}},
}  # fmt: skip


def _deep() -> Any:
    node: Any = TEXT
    for depth in range(90):
        if depth > 85:
            node = {"allOf": [object_of({"a": node}), {"anyOf": [node, TEXT]}]}
        else:
            node = {"not": node, "items": node} if depth % 9 == 8 else object_of({"a": node})
    return node


HOSTILE["deep"] = _deep()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_take_bounded_time(name: str) -> None:
    started = time.thread_time()
    found = enforced(HOSTILE[name], is_object=True)
    assert time.thread_time() - started < 10  # of a processor: tenths of a second, most of them
    matcher(found.schema)
    assert found.lost
