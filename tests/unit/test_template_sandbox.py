"""Chat templates see what they see in transformers: filters, globals, tests, statements."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from hotcold.model.errors import HotcoldError
from hotcold.model.text.chat_template import ChatTemplate
from hotcold.model.text.template_sandbox import ChatEnvironment

MESSAGES = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "yes"}]
VARIABLES: dict[str, Any] = {"messages": MESSAGES, "tools": None, "documents": None}
VARIABLES |= {"add_generation_prompt": True, "bos_token": "<s>"}
# Of what is written here; all else is Jinja2's own.
EXPRESSIONS = r"""
{'é': [1, none]} | tojson
{'b': '<\u2028', 'a': 1} | tojson(indent=2, sort_keys=true)
[1] | tojson(separators=(', ', ':'))
dict(a=1, **{'b': 2})
dict.fromkeys('ab', 1)
namespace(a=1).a
strftime_now('%%')
""".strip("\n").splitlines()
OWN = {"tojson", "raise_exception", "strftime_now", "dict", "namespace"}
BLOCKS = [
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.index0 %}"
    "{% endfor %}{{ ns.n }}",
    "{% for i in range(9) if i is odd %}{% if i > 5 %}{% break %}"
    "{% elif i == 3 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
    "{% generation %}{% set x = 3 %}{{ x }}{% endgeneration %}{{ x }}",
    "  {%- raw %}{{ a }}{% endraw -%}  x\n  {% if true %}\n  y\n  {% endif %}\n{# no #}z\n",
]
FAILING = [
    "messages[0].nothing.at",
    "messages.clear()",
    "namespace(__init__=1)",
    "1 / 0",
    "tools + 1",
]


def rendered(template: str) -> str:
    own = ChatTemplate(template, "a template", {"bos_token": "<s>"})
    return own.render(MESSAGES)


def test_the_environment_has_the_same_names() -> None:
    theirs, own = _compile_jinja_template("").environment, ChatEnvironment()
    for names, ours in (
        (theirs.filters, own.filters), (theirs.globals, own.globals), (theirs.tests, own.tests)
    ):  # fmt: skip
        assert names.keys() == ours.keys()
        assert {name for name in names if names[name] is not ours[name]} <= OWN
    assert theirs.extensions.keys() - own.extensions.keys() == {
        name for name in theirs.extensions if name.endswith("AssistantTracker")
    }


def test_expressions() -> None:
    template = "\n".join(f"{{{{ {text} }}}}" for text in EXPRESSIONS)
    expected = _compile_jinja_template(template).render(VARIABLES)
    assert expected.count("\n") >= len(EXPRESSIONS) - 1
    assert rendered(template).split("\n") == expected.split("\n")


@pytest.mark.parametrize("template", BLOCKS)
def test_blocks(template: str) -> None:
    assert rendered(template) == _compile_jinja_template(template).render(VARIABLES)


@pytest.mark.parametrize("text", FAILING)
def test_what_fails_there_fails_here(text: str) -> None:
    with pytest.raises((jinja2.TemplateError, ArithmeticError, TypeError)):
        _compile_jinja_template(f"{{{{ {text} }}}}").render(VARIABLES)
    with pytest.raises(HotcoldError):
        rendered(f"{{{{ {text} }}}}")
