"""Calls as published models write them: the syntax of each template, read however the text comes.

The texts are those of the models' own chat templates and documents, with and without blanks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from hotcold.actors.driver.grammars.grammar import Callable, Function, calls_grammar
from hotcold.actors.driver.thoughts import Thoughts
from hotcold.model.text.call_syntax import CallSyntax, syntax_of
from hotcold.model.text.chat_template import thinking_of
from hotcold.ui.api.tools.reader import AnswerReader
from tests.unit.test_enforced_schemas import takes_text
from tests.unit.test_thoughts import told as events_of

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "by": {"type": "object", "properties": {"x": {"type": "boolean"}, "y": {
            "type": "array", "items": {"type": "string"}}}},
        "opt": {"type": ["string", "null"]},
    },
    "required": ["city"],
}  # fmt: skip
FUNCTIONS = [Function("weather", PARAMETERS), Function("now")]
SCHEMAS = {"weather": PARAMETERS}
CITY = 'a "q" é\n<b> </'
GIVEN = {"city": CITY, "days": 3, "by": {"x": True, "y": ["u", "v"]}, "opt": None}
JSON, BY = json.dumps(GIVEN, ensure_ascii=False), '{"x": true, "y": ["u", "v"]}'
NOW = '{"name": "now", "arguments": {}}'
WEATHER = f'{{"name": "weather", "arguments": {JSON}}}'
OPEN, CLOSE = "<tool_call>", "</tool_call>"
XML = '"<function=" "<parameter="'

# What a template holds, an answer's first call, and its second one or what ends both.
WRITTEN: list[tuple[str, str, str]] = [
    (f'{OPEN} "arguments"', f"{OPEN}\n{WEATHER}\n{CLOSE}", f"\n{OPEN}{NOW}{CLOSE}"),
    *(
        (
            f"{begin} {XML}",
            f"{begin}{line}<function=weather>{line}<parameter=city>{line}{CITY}{line}</parameter>"
            f"{line}<parameter=days>{line}3{line}</parameter>{line}<parameter=by>{line}{BY}{line}"
            f"</parameter>{line}<parameter=opt>{line}null{line}</parameter>{line}</function>{line}"
            f"{end}",
            f"{line}{begin}{line}<function=now>{line}</function>{line}{end}",
        )
        for line in ("\n", "")
        for begin, end in ((OPEN, CLOSE), ("<seed:tool_call>", "</seed:tool_call>"))
    ),
    *(
        (
            f"{OPEN} <arg_key> <arg_value>",
            f"{OPEN}weather{line}<arg_key>city</arg_key>{line}<arg_value>{CITY}</arg_value>{line}"
            f"<arg_key>days</arg_key>{line}<arg_value>3</arg_value>{line}<arg_key>by</arg_key>"
            f"{line}<arg_value>{BY}</arg_value>{line}<arg_key>opt</arg_key>{line}<arg_value>null"
            f"</arg_value>{line}{CLOSE}",
            f"{line}{OPEN}now{line}{CLOSE}",
        )
        for line in ("\n", "")
    ),
    *(
        (
            template,
            f"<tool_calls{kind}>\n<tool_call{kind}>weather<tool_sep{kind}>\n<arg_key{kind}>city"
            f"</arg_key{kind}>\n<arg_value{kind}>{CITY}</arg_value{kind}>\n<arg_key{kind}>days"
            f"</arg_key{kind}>\n<arg_value{kind}>3</arg_value{kind}>\n<arg_key{kind}>by"
            f"</arg_key{kind}>\n<arg_value{kind}>{BY}</arg_value{kind}>\n<arg_key{kind}>opt"
            f"</arg_key{kind}>\n<arg_value{kind}>null</arg_value{kind}>\n</tool_call{kind}>\n",
            f"<tool_call{kind}>now<tool_sep{kind}>\n</tool_call{kind}>\n</tool_calls{kind}>",
        )
        for template, kind in (
            ("':opensource' <tool_sep{}>", ":opensource"), ("<tool_sep> <arg_key>", ""),
        )
    ),
    (
        "<function name= <param name=",
        f'<function name="weather"><param name="city"><![CDATA[{CITY}]]></param><param name="days">'
        f'3</param><param name="by">{BY}</param><param name="opt">null</param></function>',
        '\n<function name="now"></function>',
    ),
    (
        "<|tool_calls|> <|tool_call:begin|>",
        f"<|tool_calls|><|tool_call:begin|>abcdefghi<|tool_call:name|>weather<|tool_call:args|>{JSON}"
        "<|tool_call:end|>",
        "<|tool_call:begin|>123456789<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|>"
        "<|calls|>",
    ),
    ("<|function_call|>", f"<|function_call|>{WEATHER}", f"<|function_call|>{NOW}"),
    (
        "'function call' <|role_sep|>", f"<|message_sep|>\n\nfunction call<|role_sep|>\n{WEATHER}",
        f"<|message_sep|>\n\nfunction call<|role_sep|>\n{NOW}",
    ),
    (
        "<|tool_call>call:",
        f'<|tool_call>call:weather{{by:{{x:true,y:[<|"|>u<|"|>,<|"|>v<|"|>]}},'
        f'city:<|"|>{CITY}<|"|>,days:3,opt:null}}<tool_call|>',
        "<|tool_call>call:now{}<tool_call|>",
    ),
    (
        "<minimax:tool_call> <invoke name=",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">'
        f'{CITY}</parameter>\n<parameter name="days">3</parameter>\n<parameter name="by">{BY}'
        '</parameter>\n<parameter name="opt">null</parameter>\n</invoke>\n',
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ),
    (
        "｜DSML｜ function_calls>",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" '
        f'string="true">{CITY}</｜DSML｜parameter>\n<｜DSML｜parameter name="days" '
        'string="false">3</｜DSML｜parameter>\n<｜DSML｜parameter name="by" '
        f'string="false">{BY}</｜DSML｜parameter>\n<｜DSML｜parameter name="opt" '
        'string="false">null</｜DSML｜parameter>\n</｜DSML｜invoke>\n',
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ),
    ("[TOOL_CALLS] [ARGS]", f"[TOOL_CALLS]weather[ARGS]{JSON}", "[TOOL_CALLS]now[ARGS]{}"),
    (
        "[TOOL_CALLS] [CALL_ID] [ARGS]", f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{JSON}",
        "[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}",
    ),
    (
        "[TOOL_CALLS]", f'[TOOL_CALLS] [{WEATHER[:-1]}, "id": "abcdefghi"}}, ', f"{NOW}]",
    ),
    (
        "<｜tool▁calls▁begin｜> ```json",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{JSON}\n```<｜tool▁call▁end｜>",
        "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
    ),
    (
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|>",
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ),
    (
        "<|tool_call_start|>",
        f"<|tool_call_start|>[weather(city={json.dumps(CITY, ensure_ascii=False)}, days=3, "
        f"by={BY}, opt=None), ",
        "now()]<|tool_call_end|>",
    ),
    (
        "<function_calls>",
        f"<function_calls>\nweather(city={json.dumps(CITY, ensure_ascii=False)}, days=3, "
        f"by={BY}, opt=None)\n",
        "now()\n</function_calls>",
    ),
    ("<|tool_call|>", f"<|tool_call|>[{WEATHER}, ", f"{NOW}]"),
    ("<TOOLCALL>", f"<TOOLCALL>[{WEATHER}, ", f"{NOW}]</TOOLCALL>"),
    ("<tool_calls>[", f"<tool_calls>[{WEATHER}, ", f"{NOW}]</tool_calls>"),
    ('<tool_calls>\n"arguments"', f"<tool_calls>\n{WEATHER}\n", f"{NOW}\n</tool_calls>"),
    (
        '<|START_ACTION|> "tool_name"',
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
        f"{JSON}}},\n",
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
    ),
    (
        "<|tools_prefix|>", f'<|tools_prefix|>[{{"weather": {JSON}}}, ',
        '{"now": {}}]<|tools_suffix|>',
    ),
]  # fmt: skip
HEADERS = [
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.weather json<|message|>",
    "<|channel|>analysis to=functions.weather<|message|>",
    " to=functions.weather<|channel|>commentary <|constrain|>json<|message|>",
]
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
HARMONY = f"{ANALYSIS} <|channel|>commentary functions."
PREAMBLE, NEXT = "<|channel|>commentary<|message|>", "<|end|><|start|>assistant"


def syntax(template: str) -> CallSyntax:
    found = syntax_of(template)
    assert found is not None
    return found


def told(template: str, pieces: Sequence[str], calls: bool = True) -> tuple[str, str, list[Any]]:
    """Thoughts, text and calls of an answer that comes in these pieces."""
    way, own = thinking_of(template), syntax(template)
    opened = None if way is None else Thoughts(way, False, "" if way.are_channels else None)
    read_as = own if calls else None
    answer = AnswerReader(read_as, SCHEMAS)
    for event in events_of(pieces, opened, syntax=read_as):
        list(answer.push(event))
    return answer.thought, answer.said, [(one.name, _read(one.arguments)) for one in answer.calls]


def _read(arguments: str) -> Any:
    """The value, or the text where it was cut off."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def in_all_ways(template: str, text: str, **how: Any) -> tuple[str, str, list[Any]]:
    """What an answer tells, which is the same in whatever two pieces, or characters, it comes."""
    whole = told(template, [text], **how)
    for at in range(len(text) + 1):
        assert told(template, [text[:at], text[at:]], **how) == whole, (text[:at], text[at:])
    assert told(template, [*text, ""], **how) == whole
    return whole


@pytest.mark.parametrize(("template", "first", "second"), WRITTEN)
def test_calls_are_read_and_held(template: str, first: str, second: str) -> None:
    text = f"Hi.\n{first}{second}"
    calls = [("weather", GIVEN), ("now", {})]
    assert in_all_ways(template, text) == ("", "Hi.", calls)
    own = syntax(template)
    for wanted, written in ((False, text), (True, f"{first}{second}")):
        held = calls_grammar(Callable(FUNCTIONS, wanted, True), own, None).text
        assert takes_text(held, written)
        assert not takes_text(held, written.replace("weather", "whether"))
        assert not takes_text(held, written.replace("days", "day"))
    assert told(template, [own.text(calls)]) == ("", "", calls)
    assert takes_text(
        calls_grammar(Callable(FUNCTIONS, True, True), own, None).text, own.text(calls)
    )


# As models write a call: its blanks, and those around it.
FORMS = [
    f"{OPEN}{before}{call}{after}{CLOSE}"
    for before, after in (
        ("", ""), ("\n", ""), ("", "\n"), (" ", " "), ("\r\n", "\r\n"), ("\n\n", "\n\n"),
    )
    for call in (NOW, NOW.replace(" ", ""), NOW.replace(" ", "\n  "))
]  # fmt: skip
TAGS, BRACES = f'{OPEN} "arguments"', '{"name": function name, "parameters": dictionary'
PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
BARE = '{"name": "weather", "parameters": {"city": "Paris", "days": 3}}'
ODD = {"city": 'a}"{ </tool_call>', "days": 1}
SPLIT: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (TAGS, "hello  ", "hello  ", []),
    (TAGS, "", "", []),
    (TAGS, f"I look.\n\n{OPEN}{PARIS}{CLOSE}\n{FORMS[0]}\n", "I look.",
     [("weather", {"city": "Paris"}), ("now", {})]),
    (TAGS, f'{OPEN}{{"name": "weather", "arguments": {json.dumps(ODD)}}}{CLOSE}', "",
     [("weather", ODD)]),
    (TAGS, f"{FORMS[0]} done ", "done", [("now", {})]),
    (TAGS, f"a {OPEN} b", f"a {OPEN} b", []),
    (TAGS, f"a {OPEN}\n b", f"a {OPEN}\n b", []),
    (TAGS, f"{OPEN}{PARIS[:38]}", "", [("weather", '{"cit')]),
    (TAGS, f"a {OPEN}{PARIS[:9]}", "a", []),
    *((TAGS, f"I look. {call}", "I look.", [("now", {})]) for call in FORMS),
    (TAGS, "".join(FORMS[:5]), "", [("now", {})] * 5),
    (BRACES, BARE, "", [("weather", {"city": "Paris", "days": 3})]),
    (BRACES, f"hello {BARE}", f"hello {BARE}", []),
    (BRACES, '{"na', "", []),
    (BRACES, '{"name": "x", "age": 3}', '{"name": "x", "age": 3}', []),
]  # fmt: skip


@pytest.mark.parametrize(("template", "text", "said", "calls"), SPLIT)
def test_text_and_calls_are_told_apart(
    template: str, text: str, said: str, calls: list[tuple[str, Any]]
) -> None:
    assert in_all_ways(template, text) == ("", said, calls)


@pytest.mark.parametrize("is_required", [False, True])
def test_the_grammar_takes_calls_as_models_write_them(is_required: bool) -> None:
    held = calls_grammar(Callable(FUNCTIONS, is_required, True), syntax(TAGS), None).text
    for call in FORMS:
        assert takes_text(held, call), call
        assert not takes_text(held, call.replace("now", "not")), call


@pytest.mark.parametrize("template", [one[0] for one in WRITTEN])
def test_prose_is_no_call(template: str) -> None:
    for text in ("a < b [1] {x: 1}", "see [TOOL", "<tool", "<|tool", "f(x=1)"):
        assert in_all_ways(template, text) == ("", text, [])


@pytest.mark.parametrize("header", HEADERS)
def test_channels_are_told_apart(header: str) -> None:
    call = f"{header}{JSON}<|call|>"
    for before, thought, said in (
        ("", "", ""),
        (f"{ANALYSIS} Think\n{NEXT}", "Think", ""),
        (f"{ANALYSIS}A{NEXT}{PREAMBLE}I look.{NEXT}{ANALYSIS}B{NEXT}", "A\n\nB", "I look."),
    ):
        expected = (thought, said, [("weather", GIVEN)])
        assert in_all_ways(HARMONY, before + call) == expected
        assert in_all_ways(HARMONY, before + call.removesuffix("<|call|>")) == expected
        held = calls_grammar(Callable(FUNCTIONS, True, True), syntax(HARMONY), None).text
        assert takes_text(held, before + call.removesuffix("<|call|>"))
        assert not takes_text(held, f"{before}{FINAL}Hi.")
    answer = f"{ANALYSIS}A{NEXT}{PREAMBLE}I look.{NEXT}{FINAL}Hi <b>."
    for calls in (True, False):
        assert in_all_ways(HARMONY, answer, calls=calls) == ("A", "I look.\n\nHi <b>.", [])
    # Without tools what goes to one is no answer.
    assert in_all_ways(HARMONY, call, calls=False) == (JSON, "", [])
    assert in_all_ways(HARMONY, "No header.") == ("", "No header.", [])


def test_a_call_within_thoughts_ends_them() -> None:
    for template, first, second in WRITTEN:
        text = f"<think>Let me {first}{second}"
        for pieces in ([text], [*text, ""]):
            thought, said, calls = told(f"{template} <think>", pieces)
            assert (thought, said) == ("Let me", "") and len(calls) == 2
