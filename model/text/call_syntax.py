"""How models write calls of tools: one table, a line for each syntax, found by the chat template.

Grammars hold answers to a syntax (`actors/driver/grammars/grammar.py`), and `model/text/calls.py`
reads it, both from what stands here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hotcold.model.text.call_arguments import GEMMA, JSON, KEYWORDS, Form, Tagged

# OpenAI's and MCP's: more than these have their own meaning where a call is written.
NAME_CHARACTERS = r"[a-zA-Z0-9_.:/-]"
BLANKS = r"\s*"
_ID = r"[a-zA-Z0-9]"
# Of a syntax: white space, if any, and what differs from call to call.
_UNITS = re.compile(r" +|\b(?:NAME|ARGUMENTS|INDEX|ID|MAYBE_ID)\b")
_MAYBE_ID = rf'(?:,\s*"id"\s*:\s*"{_ID}{{9}}"\s*)?'
# By unit: what is read, and what a grammar lets be written.
_READ = {"INDEX": "[0-9]+", "ID": f"{_ID}+", "MAYBE_ID": _MAYBE_ID}
_WRITTEN = {"INDEX": "[0-9]{1,4}", "ID": f"{_ID}{{9}}", "MAYBE_ID": _MAYBE_ID}


@dataclass(frozen=True)
class CallSyntax:
    """How a model writes calls: begin, call, more of them with the separator between, end.

    A blank stands for white space, if any, and a tab for one blank.
    """

    begin: str  # what only calls hold; empty: a call is the whole answer
    call: str  # with NAME, ARGUMENTS and what else differs from call to call
    end: str = ""
    separator: str | None = None  # None: each call has its own begin and end
    form: Form = JSON  # of the arguments
    has_channels: bool = False  # a call is a message of its own (`model/text/channels.py`)

    @property
    def marks(self) -> str:
        """Text that holds all control tokens of the syntax."""
        return f"{self.begin} {self.call} {self.end} {self.form.marks}"

    @property
    def first(self) -> str:
        """What each call begins with, up to what differs or may be preceded by white space."""
        found = _UNITS.search(self.call)
        return self.call[: found.start()] if found else self.call

    @property
    def parts(self) -> tuple[str, str]:
        """A call up to its arguments, and what follows them."""
        before, _, after = self.call.partition("ARGUMENTS")
        return before, after

    @cached_property
    def opening(self) -> re.Pattern[str]:
        """What opens the first call, up to its arguments (`whole`), or as far as the text goes."""
        return self._opening(f"{self.begin} {self.parts[0]}".lstrip())

    @cached_property
    def trigger(self) -> re.Pattern[str]:
        """What begins a call, and nothing else."""
        return re.compile(pattern(f"{self.begin} {self.first}".strip(), re.escape, BLANKS, _READ))

    @cached_property
    def next_opening(self) -> re.Pattern[str]:
        """The same of a further call before the same end."""
        return self._opening(f" {self.separator} {self.parts[0]}")

    @cached_property
    def closing(self) -> re.Pattern[str]:
        """What follows a call's arguments: its own end alone where others may follow."""
        end = "" if self.separator is not None else f" {self.end}"
        return re.compile(pattern(self.parts[1] + end, re.escape, BLANKS, _READ))

    @cached_property
    def last_closing(self) -> re.Pattern[str]:
        """What follows the last of several calls."""
        return re.compile(pattern(f" {self.end}", re.escape, BLANKS, _READ))

    def text(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls as a model writes them: names, and arguments as objects or as JSON text.

        Text that is JSON stays as it is where the syntax has JSON.
        """
        if self.separator is None:
            one = f"{self.begin} {self.call} {self.end}".strip()
            return "\n".join(self._filled(one, [call]) for call in calls)
        joined = f" {self.separator} ".join([self.call] * len(calls))
        return self._filled(f"{self.begin} {joined} {self.end}", calls)

    def _filled(self, text: str, calls: Sequence[tuple[str, Any]]) -> str:
        """So much of the syntax with these calls."""
        number = 0

        def unit(match: re.Match[str]) -> str:
            nonlocal number
            name, arguments = calls[min(number, len(calls) - 1)]
            if match[0] == "ARGUMENTS":
                number += 1
                return self._written(arguments)
            if match[0].isspace():
                return _blank(text[: match.start()], text[match.end() :])
            return {"NAME": name, "INDEX": str(number), "ID": f"{number:09}"}.get(match[0], "")

        return _UNITS.sub(unit, text).replace("\t", " ")

    def _written(self, arguments: Any) -> str:
        """The arguments of one call."""
        found = arguments
        if isinstance(arguments, str):
            try:
                found = json.loads(arguments)
            except (ValueError, RecursionError):
                found = None
            if found is not None and self.form is JSON:
                return arguments
        is_object = isinstance(found, Mapping)
        return self.form.written(found) if is_object else json.dumps(arguments, ensure_ascii=False)

    @staticmethod
    def written(text: str, escape: Callable[[str], str], gap: str) -> str:
        """A part of the syntax as a pattern of a grammar; without NAME and ARGUMENTS."""
        return pattern(text, escape, gap, _WRITTEN)

    def _opening(self, text: str) -> re.Pattern[str]:
        return re.compile(as_far_as_it_goes(text, rf"(?=(?P<whole>{self.form.first}))"))


def _blank(before: str, after: str) -> str:
    """White space as models write it between these parts of a syntax."""
    if before.endswith((":", ",")) and not after.startswith(("{", "[")):
        return " "
    if after.startswith("NAME"):
        return "\n" if before.endswith(")") else ""
    is_tag = re.search(r"<(?:[^|｜<>]|｜DSML｜)[^<>|｜]*>$|```json$", before)
    is_tag = is_tag or re.match(r"</?(?:｜DSML｜)?[\w:]+[>=\t]|```", after)
    return "\n" if is_tag or (before.endswith("}") and after.startswith("{")) else ""


class _Harmony(CallSyntax):
    """A call's header may name its channel before or behind the function, and its format."""

    @cached_property
    def opening(self) -> re.Pattern[str]:
        """Headers come whole."""
        channel, name = r"(?:<\|channel\|>\s*\w+)?", rf"(?P<name>{NAME_CHARACTERS}+)"
        rest = rf"\s*{channel}\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>"
        start = rf"\s*to=functions\.{name}{rest}"
        return re.compile(rf"{channel}{start}\s*(?:\Z|(?=(?P<whole>{{)))")

    @cached_property
    def trigger(self) -> re.Pattern[str]:
        """The recipient."""
        return re.compile(r"(?:<\|channel\|>\s*\w+)?\s*to=functions\.")


def pattern(text: str, escape: Callable[[str], str], gap: str, units: dict[str, str]) -> str:
    """A part of a syntax as a pattern."""
    found, at = "", 0
    for match in _UNITS.finditer(text):
        found += escape(text[at : match.start()].replace("\t", " "))
        found += gap if match[0].isspace() else units[match[0]]
        at = match.end()
    return found + escape(text[at:].replace("\t", " "))


def as_far_as_it_goes(text: str, rest: str) -> str:
    """A pattern of this part of a syntax and of what `rest` matches, or of a beginning of it."""
    units, at = list[str](), 0
    known = _READ | {"NAME": f"(?P<name>{NAME_CHARACTERS}+)"}
    for match in _UNITS.finditer(text):
        units += map(re.escape, text[at : match.start()].replace("\t", " "))
        units.append(BLANKS if match[0].isspace() else known[match[0]])
        at = match.end()
    units += map(re.escape, text[at:].replace("\t", " "))
    found = rf"(?:\Z|{rest})"
    for unit in reversed(units):
        found = BLANKS + found if unit == BLANKS else rf"(?:\Z|{unit}{found})"
    return found


_OBJECT = '{ "name" : "NAME" , "arguments" : ARGUMENTS }'
_FUNCTION = "<function=NAME> ARGUMENTS </function>"
_PARAMETER = Tagged("<parameter=", ">", "</parameter>", are_lines=True)
_INVOKE = '<invoke\tname="NAME"> ARGUMENTS </invoke>'
_DSML = '<｜DSML｜invoke\tname="NAME"> ARGUMENTS </｜DSML｜invoke>'
_DSML_PARAMETER = Tagged('<｜DSML｜parameter\tname="', '"\tstring="KIND">', "</｜DSML｜parameter>")

# Hermes, Qwen 2.5 and 3, SmolLM 3, Granite 4; and what `described_in_system_prompt` asks for.
TAGGED = CallSyntax("<tool_call>", _OBJECT, "</tool_call>")
# Llama 3.
BARE = CallSyntax("", '{ "name" : "NAME" , "parameters" : ARGUMENTS }')
# gpt-oss.
HARMONY = _Harmony(
    "<|channel|>commentary to=functions.", "NAME<|message|> ARGUMENTS", "", has_channels=True
)

_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_XML = CallSyntax("<tool_call>", _FUNCTION, "</tool_call>", form=_PARAMETER)
_LFM = CallSyntax(
    "<|tool_call_start|> [", "NAME( ARGUMENTS )", "] <|tool_call_end|>", ",", KEYWORDS
)
_GLM_ARGUMENT = Tagged("<arg_key>", "</arg_key> <arg_value>", "</arg_value>")
_MINIMAX_PARAMETER = Tagged('<parameter\tname="', '">', "</parameter>")

_PARAM = Tagged('<param\tname="', '">', "</param>", around=("<![CDATA[", "]]>"))


def _hy3(kind: str) -> CallSyntax:
    """Of Hy3, whose marks end with `kind`."""
    argument = Tagged(
        f"<arg_key{kind}>", f"</arg_key{kind}> <arg_value{kind}>", f"</arg_value{kind}>"
    )
    call = f"<tool_call{kind}>NAME<tool_sep{kind}> ARGUMENTS </tool_call{kind}>"
    return CallSyntax(f"<tool_calls{kind}>", call, f"</tool_calls{kind}>", "", argument)


# Texts that a template holds -> the syntax that it teaches; the first that fits is the model's.
_TAUGHT: tuple[tuple[tuple[str, ...], CallSyntax], ...] = (
    # gpt-oss
    (("<|channel|>commentary", "functions."), HARMONY),
    # Gemma 4
    (("<|tool_call>call:",),
     CallSyntax("<|tool_call>", "call:NAME ARGUMENTS", "<tool_call|>", form=GEMMA)),
    # MiniMax M2
    (("<minimax:tool_call>", "<invoke name="),
     CallSyntax("<minimax:tool_call>", _INVOKE, "</minimax:tool_call>", "", _MINIMAX_PARAMETER)),
    # Seed-OSS
    (("<seed:tool_call>", "<function="),
     CallSyntax("<seed:tool_call>", _FUNCTION, "</seed:tool_call>", form=_PARAMETER)),
    # Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5
    (("<tool_call>", "<function=", "<parameter="), _XML),
    # Hy3, its preview
    (("<tool_sep{}>", "':opensource'"), _hy3(":opensource")),
    (("<tool_sep>", "<arg_key>"), _hy3("")),
    # GLM 4.5 to 4.7, Ling 3, Laguna
    (("<tool_call>", "<arg_key>", "<arg_value>"),
     CallSyntax("<tool_call>", "NAME ARGUMENTS", "</tool_call>", form=_GLM_ARGUMENT)),
    # MiniCPM 5
    (("<function name=", "<param name="),
     CallSyntax('<function\tname="', 'NAME"> ARGUMENTS </function>', form=_PARAM)),
    # Solar Open
    (("<|tool_calls|>", "<|tool_call:begin|>"),
     CallSyntax("<|tool_calls|>", "<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|> "
                "ARGUMENTS <|tool_call:end|>", "<|calls|>", "")),
    # GigaChat 3.1; 3
    (("<|function_call|>",), CallSyntax("<|function_call|>", _OBJECT)),
    (("'function call'", "<|role_sep|>"),
     CallSyntax("<|message_sep|> function call<|role_sep|>", _OBJECT)),
    # Mistral Small 3.2; Devstral, Ministral 3 and others since; those before
    (("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
     CallSyntax("[TOOL_CALLS]", "NAME[CALL_ID]ID[ARGS] ARGUMENTS")),
    (("[TOOL_CALLS]", "[ARGS]"), CallSyntax("[TOOL_CALLS]", "NAME[ARGS] ARGUMENTS")),
    (("[TOOL_CALLS]",),
     CallSyntax("[TOOL_CALLS] [", f"{_OBJECT[:-1]}MAYBE_ID }}", "]", ",")),
    # DeepSeek V3.2, V4
    (("DSML", "function_calls>"),
     CallSyntax("<｜DSML｜function_calls>", _DSML, "</｜DSML｜function_calls>", "",
                _DSML_PARAMETER)),
    (("DSML", "tool_calls>"),
     CallSyntax("<｜DSML｜tool_calls>", _DSML, "</｜DSML｜tool_calls>", "", _DSML_PARAMETER)),
    # DeepSeek V3 and R1, V3.1
    (("<｜tool▁calls▁begin｜>", "```json"),
     CallSyntax(_DEEPSEEK[0], "<｜tool▁call▁begin｜> function<｜tool▁sep｜>NAME ```json ARGUMENTS "
                "``` <｜tool▁call▁end｜>", _DEEPSEEK[1], "")),
    (("<｜tool▁calls▁begin｜>",),
     CallSyntax(_DEEPSEEK[0], "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜> ARGUMENTS "
                "<｜tool▁call▁end｜>", _DEEPSEEK[1], "")),
    # Kimi K2
    (("<|tool_calls_section_begin|>",),
     CallSyntax("<|tool_calls_section_begin|>", "<|tool_call_begin|> functions.NAME:INDEX "
                "<|tool_call_argument_begin|> ARGUMENTS <|tool_call_end|>",
                "<|tool_calls_section_end|>", "")),
    # LFM 2
    (("<|tool_call_start|>",), _LFM),
    (("<|tool_list_start|>",), _LFM),
    (("List of tools: [", "<|im_start|>"), _LFM),
    # OLMo 3
    (("<function_calls>",),
     CallSyntax("<function_calls>", "NAME( ARGUMENTS )", "</function_calls>", "", KEYWORDS)),
    # Granite 3
    (("<|tool_call|>",), CallSyntax("<|tool_call|> [", _OBJECT, "]", ",")),
    # Nemotron Nano 2
    (("<TOOLCALL>",), CallSyntax("<TOOLCALL> [", _OBJECT, "] </TOOLCALL>", ",")),
    # Apriel; MiniMax M1
    (("<tool_calls>[",), CallSyntax("<tool_calls> [", _OBJECT, "] </tool_calls>", ",")),
    (("<tool_calls>", '"arguments"'), CallSyntax("<tool_calls>", _OBJECT, "</tool_calls>", "")),
    # Command R7B, Command A
    (("<|START_ACTION|>", '"tool_name"'),
     CallSyntax("<|START_ACTION|> [", '{ "tool_call_id" : "INDEX" , "tool_name" : "NAME" , '
                '"parameters" : ARGUMENTS }', "] <|END_ACTION|>", ",")),
    # Apertus
    (("<|tools_prefix|>",),
     CallSyntax("<|tools_prefix|> [", '{ "NAME" : ARGUMENTS }', "] <|tools_suffix|>", ",")),
    (('{"name": function name, "parameters": dictionary',), BARE),
)  # fmt: skip

_TAGGED = ("<tool_call>", '"arguments"')
# A template that holds one of these teaches something else.
_OTHERS = ("<function=", "<|tool_call", "<tool_calls")


def syntax_of(template: str) -> CallSyntax | None:
    """Return the syntax of a template's model; None where the system prompt must teach one."""
    plain = template.replace('\\"', '"')
    taught = (syntax for texts, syntax in _TAUGHT if all(text in plain for text in texts))
    is_tagged = all(one in plain for one in _TAGGED) and not any(one in plain for one in _OTHERS)
    return next(taught, TAGGED if is_tagged else None)
