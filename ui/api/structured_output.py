"""Structured output: the fields besides OpenAI's that constrain an answer, and their grammars."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from pydantic_core import from_json, to_json

from hotcold.actors.protocol.messages import Grammar
from hotcold.ui.api.errors import ApiError
from hotcold.ui.api.fields import Request, StrictModel
from hotcold.ui.api.tools.grammar import choice_grammar

_MAX_CHARS = 1 << 18
_Text = Annotated[str, Field(min_length=1, max_length=_MAX_CHARS)]
_Choices = Annotated[list[_Text], Field(min_length=1, max_length=1000, fail_fast=True)]
_Schema = dict[str, Any] | bool | _Text


_lark, _regex = partial(Grammar, "lark"), partial(Grammar, "regex")


class StructuredOutputs(StrictModel):
    """vLLM's newer field: one of these."""

    json_: _Schema | None = Field(default=None, alias="json")
    regex: _Text | None = None
    choice: _Choices | None = None
    grammar: _Text | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class Constraint(NamedTuple):
    """A constraint: its field, the field's value, and the function that makes a grammar of it."""

    name: str
    value: Any
    make: Callable[[Any], Grammar]

    @property
    def is_json(self) -> bool:
        """Whether the answer is JSON."""
        return self.make in (json_grammar, any_object)


class ConstrainedRequest(Request):
    """A request whose answer may be constrained."""

    grammar: _Text | None = None
    guided_json: _Schema | None = None
    guided_regex: _Text | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Text | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: _Schema | None = None  # llama.cpp's

    def constraints(self) -> list[Constraint]:
        """Each given constraint. Errors: ValueError."""
        other = self.structured_outputs or StructuredOutputs()
        if other.structural_tag is not None:
            raise ValueError("structured_outputs.structural_tag is not supported; leave it out")
        given: list[tuple[str, Any, Any]] = [
            ("grammar", self.grammar, _lark),
            ("guided_json", self.guided_json, json_grammar),
            ("guided_regex", self.guided_regex, _regex),
            ("guided_choice", self.guided_choice, choice_grammar),
            ("guided_grammar", self.guided_grammar, _lark),
            ("json_schema", self.json_schema, json_grammar),
            ("structured_outputs.json", other.json_, json_grammar),
            ("structured_outputs.regex", other.regex, _regex),
            ("structured_outputs.choice", other.choice, choice_grammar),
            ("structured_outputs.grammar", other.grammar, _lark),
            ("structured_outputs.json_object", other.json_object or None, any_object),
        ]
        return [Constraint(*one) for one in given if one[1] is not None]


def json_grammar(schema: dict[str, Any] | bool | str) -> Grammar:
    """The grammar of a JSON schema, given as a value or as text. Errors: ApiError 400."""
    if isinstance(schema, str):
        try:
            schema = from_json(schema)
        except ValueError:
            raise ApiError(400, "the JSON schema is no JSON") from None
    # Ten times as fast as json.dumps.
    return Grammar("json_schema", to_json(schema).decode())


def any_object(_: Any = None) -> Grammar:
    """The grammar of any JSON object."""
    return Grammar("json_schema", '{"type": "object"}')
