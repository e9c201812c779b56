"""Structured output: the fields that constrain an answer, and their grammars."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator
from pydantic_core import from_json, to_json

from hotcold.actors.driver.grammars.grammar import choice_grammar
from hotcold.actors.protocol.messages import Grammar
from hotcold.ui.api.errors import ApiError
from hotcold.ui.api.fields import AnyJson, Request, StrictModel

_MAX_CHARS = 1 << 18
_Text = Annotated[str, Field(min_length=1, max_length=_MAX_CHARS)]
_Choices = Annotated[list[_Text], Field(min_length=1, max_length=1000, fail_fast=True)]
_Schema = dict[str, Any] | bool | _Text
_ANY_OBJECT = {"type": "object"}


class JsonSchema(StrictModel):
    """The schema in a `response_format`."""

    content: dict[str, AnyJson] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """The form of an answer: any text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema must be given with type json_schema")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | bool | None:
        """None for any text."""
        if self.type == "text":
            return None
        return self.json_schema.content if self.json_schema else _ANY_OBJECT


class StructuredOutputs(StrictModel):
    """vLLM's newer field: one of these."""

    json_: _Schema | None = Field(default=None, alias="json")
    regex: _Text | None = None
    choice: _Choices | None = None
    grammar: _Text | None = None
    json_object: bool | None = None
    structural_tag: None = None


class Constraint(NamedTuple):
    """A constraint: its field, the field's value, and the function that makes a grammar of it."""

    name: str
    value: Any
    make: Callable[[Any], Grammar]

    @property
    def is_json(self) -> bool:
        """Whether the answer is JSON."""
        return self.make is _of_schema


class ConstrainedRequest(Request):
    """A request whose answer may be constrained, by one of these fields."""

    response_format: ResponseFormat | None = None
    grammar: _Text | None = None
    guided_json: _Schema | None = None
    guided_regex: _Text | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Text | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: _Schema | None = None  # llama.cpp's

    @model_validator(mode="after")
    def _has_one(self) -> "ConstrainedRequest":
        names = [wanted.name for wanted in self._constraints()]
        if len(names) > 1:
            raise ValueError(f"{names[0]} and {names[1]} were both given; leave one out")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """What constrains the answer."""
        return next(iter(self._constraints()), None)

    @property
    def is_schema_strict(self) -> bool | None:
        """Whether the answer must match all of its schema; None: not given."""
        wanted = self.response_format
        return wanted.json_schema.strict if wanted and wanted.json_schema else None

    def _constraints(self) -> list[Constraint]:
        other, shape = self.structured_outputs or StructuredOutputs(), self.response_format
        any_object = _ANY_OBJECT if other.json_object else None
        given: list[tuple[str, Any, Callable[[Any], Grammar]]] = [
            ("response_format", shape and shape.schema_of_answer, _of_schema),
            ("grammar", self.grammar, _lark),
            ("guided_json", self.guided_json, _of_schema),
            ("guided_regex", self.guided_regex, _regex),
            ("guided_choice", self.guided_choice, choice_grammar),
            ("guided_grammar", self.guided_grammar, _lark),
            ("json_schema", self.json_schema, _of_schema),
            ("structured_outputs.json", other.json_, _of_schema),
            ("structured_outputs.regex", other.regex, _regex),
            ("structured_outputs.choice", other.choice, choice_grammar),
            ("structured_outputs.grammar", other.grammar, _lark),
            ("structured_outputs.json_object", any_object, _of_schema),
        ]
        return [Constraint(*one) for one in given if one[1] is not None]


def _of_schema(schema: dict[str, Any] | bool | str) -> Grammar:
    """The grammar of a JSON schema, given as a value or as text. Errors: ApiError 400."""
    if isinstance(schema, str):
        try:
            schema = from_json(schema)
        except ValueError:
            raise ApiError(400, "the JSON schema is no JSON") from None
    # Ten times as fast as json.dumps.
    return Grammar("json_schema", to_json(schema).decode())


_lark, _regex = partial(Grammar, "lark"), partial(Grammar, "regex")
