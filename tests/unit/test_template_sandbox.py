"""Chat templates see what they see in transformers: filters, globals, tests, statements."""

from __future__ import annotations

import re
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
# Each filter, global and test of transformers' environment, and operators.
EXPRESSIONS = r"""
3.567 | round(1)
2.5 | round
42.55 | round(1, 'floor')
-3 | abs
7 | float
[1, 2, 3, 4, 5] | batch(2, 0) | list
'ab cd' | capitalize
'a' | center(9)
'x' | d(1)
nothing | default('d')
{'b': 1, 'a': 2} | dictsort
'<&>' | e
'<' | escape | e
1234567 | filesizeformat
[1, 2] | first
'<' | forceescape
'%s-%05.1f' | format('a', 2)
messages | groupby('role') | list
'a\nb' | indent(2, true)
'12' | int
[1, 'b'] | join('-')
{'a': 1} | items | list
[1, 2] | last
'abc' | length
(1, 2) | list
'AB' | lower
messages | map(attribute='role') | list
['a'] | map('upper') | join
[3, 1] | max
[3, 1] | min
{'a': [1, {'b': 2}]} | pprint
[0, 1, 2] | reject('odd') | list
[3, 1] | sort(reverse=true)
messages | rejectattr('role', 'equalto', 'user') | list | length
'aXbX' | replace('X', 'Y', 1)
[1, 2] | reverse | list
'abc' | reverse
'<' | safe
[0, 1, 2] | select('even') | list
messages | selectattr('content') | list | length
range(7) | slice(3) | list
1 | string
'<b>a</b> c' | striptags
[1, 2.5] | sum
'the ab' | title
{'é': [1, none]} | tojson
{'b': '<\u2028', 'a': 1} | tojson(indent=2, sort_keys=true)
[1] | tojson(separators=(', ', ':'))
'  a ' | trim
'xax' | trim('x')
'one two three' | truncate(7, true, '…', 0)
['b', 'a', 'B'] | unique | list
'ab' | upper
'é a/b' | urlencode
{'a': 'b c'} | urlencode
'see http://a.b' | urlize
'a b c' | wordcount
'aaa bbb' | wordwrap(3)
{'a': 1} | xmlattr
dict(a=1, **{'b': 2})
dict.fromkeys('ab', 1)
namespace(a=1).a
range(1, 9, 3) | list
cycler('a', 'b').next()
joiner(',')() ~ 'x'
strftime_now('%%')
lipsum(1, false, 5, 6) | wordcount > 0
1 is odd and 2 is even and 4 is divisibleby 2
nothing is undefined and messages is defined
'a' is string and 1 is number and 1 is integer and 1.5 is float
true is boolean and true is true
false is false and none is none
messages is sequence and {} is mapping and 'a' is iterable
'ab' is lower and 'AB' is upper
'a' is in 'ab' and 1 is eq 1 and 1 is ne 2 and 1 is lt 2
2 is ge 2 and 3 is gt 2 and 1 is le 1
1 is sameas 1 and range is callable
'<' is escaped
'abs' is filter and 'odd' is test
2 ** 10
7 // 2
-7 % 3
'ab' * 2
'a' ~ 1 ~ none
'%05d|%s' % (3, 'x')
'{:>4}|{}'.format('a', [1])
'a,b'.split(',')
' a '.strip()
'abc'[1:]
'abc'[::-1]
[1, 2, 3][-1]
{'a': 1}.get('b', 2)
{'a': 1}.items() | list
'a' if nothing else 'b'
loop is undefined
none
true
1e3
(1,)
'ab'.title()
""".strip("\n").splitlines()
BLOCKS = [
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.index0 %}"
    "{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}"
    "{{ loop.cycle('a', 'b') }}{{ loop.previtem is defined }}{{ (loop.nextitem or m).role }}"
    "{{ loop.changed(m.role) }}{% else %}-{% endfor %}",
    "{% for i in range(9) if i is odd %}{% if i > 5 %}{% break %}"
    "{% elif i == 3 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
    "{% generation %}{% set x = 3 %}{{ x }}{% endgeneration %}{{ x }}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}"
    "{{ caller() if caller }}{% endmacro %}{{ m(1, 2, 3, c=4) }}{% call m(1) %}in{% endcall %}",
    "{% filter upper %}ab{% endfilter %}{% set x %}a{{ 1 }}{% endset %}{{ x }}"
    "{% with y = 2 %}{{ y }}{% endwith %}",
    "  {%- raw %}{{ a }}{% endraw -%}  x\n  {% if true %}\n  y\n  {% endif %}\n{# no #}z\n",
    "{% for k, v in {'a': [1]}.items() recursive %}{{ k }}{{ v }}{% endfor %}"
    "{% block b %}in{% endblock %}",
]
FAILING = [
    "messages[0].nothing.at",
    "messages.append(1)",
    "namespace(__init__=1)",
    "1 / 0",
    "tools + 1",
]


def rendered(template: str) -> str:
    own = ChatTemplate(template, "a template", {"bos_token": "<s>"})
    return own.render(MESSAGES)


def test_the_environment_has_the_same_names() -> None:
    theirs, own = _compile_jinja_template("").environment, ChatEnvironment()
    used = " ".join(EXPRESSIONS)
    for names, ours in ((theirs.filters, own.filters), (theirs.globals, own.globals)):
        assert names.keys() == ours.keys()
        # What is drawn at random, what another name stands for, what `BLOCKS` and other tests use.
        rest = {"attr", "count", "random", "raise_exception"}
        assert {name for name in names if not re.search(rf"\b{name}\b", used)} <= rest
    assert theirs.tests.keys() == own.tests.keys()
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
