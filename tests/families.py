"""Families' ways to think and call, as their published chat templates have them, in short.

Each template renders what it must: turns, tools, calls with their results, thoughts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Call = tuple[str, dict[str, Any]]


class Family(NamedTuple):
    """How one family's models write."""

    template: str
    controls: Sequence[str]  # tokens
    ends: Sequence[str]  # those that end an answer
    thought: str  # of an answer, with THOUGHT
    calls: Callable[[Sequence[Call]], str]
    said: str = "SAID"  # the answer
    before_calls: str = "SAID"
    turns_off: str = "enable_thinking"  # a variable; empty: there is none
    most_calls: int = 2  # in one turn

    @property
    def has_bare_text(self) -> bool:
        """Whether strings stand without quotes in calls."""
        return "VALUE" in self.calls([("f", {"a": "VALUE"})]).replace('"VALUE"', "").replace(
            '<|"|>VALUE', ""
        )

    def answer(self, thought: str, text: str, calls: Sequence[Call] = ()) -> str:
        """What the model writes."""
        found = self.thought.replace("THOUGHT", thought) if thought else ""
        if text:
            found += (self.before_calls if calls else self.said).replace("SAID", text)
        return found + (self.calls(calls) if calls else "")


def _dumped(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _each(form: str, between: str = "", begin: str = "", end: str = "") -> Callable[..., str]:
    """Calls whose arguments are JSON."""

    def write(calls: Sequence[Call]) -> str:
        told = [
            form.replace("NAME", name).replace("AT", str(at)).replace("JSON", _dumped(arguments))
            for at, (name, arguments) in enumerate(calls)
        ]
        return begin + between.join(told) + end

    return write


def _tagged(call: str, argument: str, begin: str = "", end: str = "") -> Callable[..., str]:
    """Calls with each argument between marks, strings as they are."""

    def write(calls: Sequence[Call]) -> str:
        told = []
        for name, arguments in calls:
            inner = "".join(
                argument.replace("KEY", key).replace(
                    "VALUE", value if isinstance(value, str) else _dumped(value)
                )
                for key, value in arguments.items()
            )
            told.append(call.replace("NAME", name).replace("ARGUMENTS", inner))
        return begin + "".join(told) + end

    return write


def _gemma(calls: Sequence[Call]) -> str:
    def value(one: Any) -> str:
        if isinstance(one, dict):
            return f"{{{','.join(f'{key}:{value(one[key])}' for key in sorted(one))}}}"
        return f'<|"|>{one}<|"|>' if isinstance(one, str) else _dumped(one)

    return "".join(f"<|tool_call>call:{name}{value(given)}<tool_call|>" for name, given in calls)


def _python(calls: Sequence[Call]) -> str:
    told = [
        f"{name}({', '.join(f'{key}={_dumped(value)}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    return f"<|tool_call_start|>[{', '.join(told)}]<|tool_call_end|>"


_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set c = c.function %}CALL{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "OPEN{% endif %}{% endif %}"
)
_QWEN_CALL = (
    "\n<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments|items %}<parameter="
    "{{ k }}>\n{{ v if v is string else v|tojson }}\n</parameter>\n{% endfor %}</function>\n"
    "</tool_call>"
)
_GLM_CALL = (
    "\n<tool_call>{{ c.name }}\n{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v|tojson }}</arg_value>\n{% endfor %}</tool_call>"
)
_JSON_CALL = (
    '\n<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments|tojson }}}\n</tool_call>'
)


def _turns(call: str, opens: bool = False) -> str:
    tools = "{% if tools %}<|im_start|>system\n{{ tools|tojson }}<|im_end|>\n{% endif %}"
    opening = "{% else %}<think>\n" if opens else ""
    return tools + _TURNS.replace("CALL", call).replace("OPEN", opening)


_GPT_OSS = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}\n# Valid channels: "
    "analysis, commentary, final.{% if tools %}\nCalls to these tools must go to the commentary "
    "channel: 'functions'.{% endif %}<|end|>{% if tools %}<|start|>developer<|message|># Tools\n"
    "namespace functions { {{ tools|tojson }} }<|end|>{% endif %}"
    "{% set last = namespace(name=none) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if 'content' in m and '<|channel|>final' in m.content %}{{ raise_exception('tags') }}"
    "{% endif %}{% if 'tool_calls' in m %}{% if m.content and m.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking in an assistant message with tool "
    "calls! Put the analysis message in one or the other, but not both.') }}"
    "{% elif m.content or m.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.content or m.thinking }}<|end|>{% endif %}{% set c = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
    "{{ c.arguments|tojson }}<|call|>{% set last.name = c.name %}{% else %}<|start|>assistant"
    "<|channel|>final<|message|>{{ m.content }}<|end|>{% set last.name = none %}{% endif %}"
    "{% elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('Message has tool "
    "role, but there was no previous assistant message with a tool call!') }}{% endif %}<|start|>"
    "functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content|tojson }}"
    "<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_GEMMA_4 = (
    "{{ '<|turn>system\n' }}{% if enable_thinking is defined and enable_thinking %}<|think|>\n"
    "{% endif %}{% if tools %}<|tool>{{ tools|tojson }}<tool|>{% endif %}{{ '<turn|>\n' }}"
    "{% for m in messages %}{% if m.role != 'tool' %}<|turn>{{ m.role }}\n{% if "
    "m.reasoning_content and m.tool_calls %}{{ '<|channel>thought\n' + m.reasoning_content + "
    "'\n<channel|>' }}{% endif %}{% for c in m.tool_calls or [] %}{{ '<|tool_call>call:' + "
    "c.function.name }}{{ c.function.arguments|tojson }}<tool_call|>{% endfor %}"
    "{{ m.content or '' }}<turn|>\n{% else %}<|tool_response>{{ m.content }}<tool_response|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% if not enable_thinking"
    "|default(false) %}{{ '<|channel>thought\n<channel|>' }}{% endif %}{% endif %}"
)
_MISTRAL = (
    "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools|tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}"
    "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}"
    "[ARGS]{{ c.function.arguments|tojson }}{% endfor %}</s>{% endif %}{% endfor %}"
)
_KIMI_CALL = (
    "{% if loop.first %}<|tool_calls_section_begin|>{% endif %}<|tool_call_begin|>functions."
    "{{ c.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>{{ c.arguments|tojson }}"
    "<|tool_call_end|>{% if loop.last %}<|tool_calls_section_end|>{% endif %}"
)
_DEEPSEEK_CALL = (
    "{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}<｜tool▁call▁begin｜>{{ c.name }}"
    "<｜tool▁sep｜>{{ c.arguments|tojson }}<｜tool▁call▁end｜>"
    "{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}"
)
_LFM_CALL = "<|tool_call_start|>[{{ c.name }}()]<|tool_call_end|>"
_MINIMAX_CALL = (
    '\n<minimax:tool_call>\n<invoke name="{{ c.name }}">{% for k, v in c.arguments.items() %}'
    '<parameter name="{{ k }}">{{ v if v is string else v|tojson }}</parameter>\n{% endfor %}'
    "</invoke>\n</minimax:tool_call>"
)
_CHATML = ("<|im_start|>", "<|im_end|>")
_OWN = "<think>\nTHOUGHT\n</think>\n\n"  # begun by the model
_THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>")

FAMILIES = {
    "gpt-oss": Family(
        _GPT_OSS, ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>"),
        ("<|call|>", "<|endoftext|>", "<|return|>"),
        "<|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant",
        _each("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>JSON"),
        said="<|channel|>final<|message|>SAID",
        before_calls="<|channel|>commentary<|message|>SAID<|end|><|start|>assistant",
        turns_off="", most_calls=1,
    ),
    "hermes": Family(
        _turns(_JSON_CALL), (*_CHATML, *_THINK), ("<|im_end|>",), _OWN,
        _each('\n<tool_call>\n{"name": "NAME", "arguments": JSON}\n</tool_call>'),
    ),
    "qwen3.5": Family(
        _turns(_QWEN_CALL, opens=True), (*_CHATML, *_THINK), ("<|im_end|>",),
        "THOUGHT\n</think>\n\n",
        _tagged("\n<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
                "<parameter=KEY>\nVALUE\n</parameter>\n"),
    ),
    "glm": Family(
        _turns(_GLM_CALL), (*_CHATML, *_THINK, "<arg_key>", "</arg_key>"), ("<|im_end|>",),
        "\n<think>THOUGHT</think>\n",
        _tagged("\n<tool_call>NAME\nARGUMENTS</tool_call>",
                "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"),
    ),
    "gemma-4": Family(
        _GEMMA_4, ("<|turn>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
        ("<turn|>", "<|tool_response>"), "<|channel>thought\nTHOUGHT\n<channel|>", _gemma,
    ),
    "mistral": Family(
        _MISTRAL, ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
        ("</s>",), "[THINK]THOUGHT[/THINK]", _each("[TOOL_CALLS]NAME[ARGS]JSON"),
    ),
    "kimi": Family(
        _turns(_KIMI_CALL),
        (*_CHATML, *_THINK[:2], "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
         "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
        ("<|im_end|>",), _OWN,
        _each("<|tool_call_begin|>functions.NAME:AT<|tool_call_argument_begin|>JSON"
              "<|tool_call_end|>", "", "<|tool_calls_section_begin|>",
              "<|tool_calls_section_end|>"),
    ),
    "deepseek-v3.1": Family(
        _turns(_DEEPSEEK_CALL),
        (*_CHATML, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
         "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        ("<|im_end|>",), _OWN,
        _each("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>", "",
              "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "lfm2": Family(
        _turns(_LFM_CALL), (*_CHATML, "<|tool_call_start|>", "<|tool_call_end|>"),
        ("<|im_end|>",), _OWN, _python,
    ),
    "minimax-m2": Family(
        _turns(_MINIMAX_CALL), _CHATML, ("<|im_end|>",), _OWN,
        _tagged('<invoke name="NAME">\nARGUMENTS</invoke>\n',
                '<parameter name="KEY">VALUE</parameter>\n', "\n<minimax:tool_call>\n",
                "</minimax:tool_call>"),
    ),
}  # fmt: skip
