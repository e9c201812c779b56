"""An afternoon with a model of each family: it thinks, calls, reads results, answers, is stopped.

The model is a driver's, behind all routes, and writes what its family writes, a byte or a control
token at a time. What it writes must be allowed where a grammar holds it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from hotcold.actors.driver import active_request
from hotcold.actors.driver.driver import Driver
from hotcold.actors.driver.sampler import TokenSampler
from hotcold.actors.protocol.messages import GenerateRequest, SystemConfig, TokenEvent
from hotcold.model.sampling import SamplingParams
from tests.actors.in_process import InProcessSystem
from tests.chain_model import write_of_bytes
from tests.families import FAMILIES, Call, Family
from tests.unit.test_thinking_answers import Served, data

POSITIONS = 2048
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "by": {"type": "object", "properties": {"hour": {"type": "boolean"}}},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}
    for name, parameters in (("weather", PARAMETERS), ("now", {"type": "object", "properties": {}}))
]
CALLS: list[Call] = [
    ("weather", {"city": 'São "Paulo"\n<b>', "days": 3, "by": {"hour": True}}), ("now", {}),
]  # fmt: skip
THOUGHT, SAID = "The user waits, <so>.", "Let me look."
ASK = [{"role": "user", "content": "Hi"}]
Told = tuple[str, str, list[Any], str]


class Script:
    """What the model writes next."""

    def __init__(self) -> None:
        self.text = ""
        self.after_force = ""  # once something else was written for it


class Scripted(TokenSampler):
    """Draws what the script says, which must be allowed."""

    script = Script()
    tokenizer: Any = None

    def processed(self, logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        if not hasattr(self, "_start"):
            self._start = len(tokens)
            self._ids = self.tokenizer.encode(self.script.text, False)
            self._rest = self.tokenizer.encode(self.script.after_force, False)
            self._forced_at = -1
        self._new = list(tokens[self._start :])
        return super().processed(logits, tokens)

    def draw(self, logits: np.ndarray) -> int:
        ids, done = self._ids, len(self._new)
        if self._new != ids[:done]:
            self._forced_at = done if self._forced_at < 0 else self._forced_at
            ids, done = self._rest, done - self._forced_at
        if done >= len(ids):
            return super().draw(logits)
        if np.isneginf(logits[ids[done]]):
            written, token = map(self.tokenizer.decode, (self._new, ids[done : done + 1]))
            raise AssertionError(f"{token!r} may not follow {written!r}")
        return ids[done]


class Remembering:
    """A driver that computes once what several routes ask alike."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.answers: list[tuple[GenerateRequest, str, list[TokenEvent]]] = []

    def generate(self, request: GenerateRequest) -> list[TokenEvent]:
        asked = replace(request, request_id="")
        script = Scripted.script.text + Scripted.script.after_force
        for before, text, events in self.answers:
            if (before, text) == (asked, script):
                return events
        self.answers.append((asked, script, list(self.driver.generate(request))))
        return self.answers[-1][-1]


class Afternoon(Served):
    """A family's model behind all routes."""

    def __init__(self, path: Path, driver: Driver, family: Family) -> None:
        super().__init__(path, cast(Driver, Remembering(driver)), POSITIONS)
        self.family = family
        self.script = Scripted.script = Script()
        tokenizer = driver.generator.prompts.tokenizer
        assert tokenizer is not None
        Scripted.tokenizer = tokenizer

    @property
    def opens_thoughts(self) -> bool:
        """Whether its prompts end with what begins thoughts."""
        return self.family.thought.startswith("THOUGHT")

    def writes(self, thought: str, text: str, calls: Sequence[Call] = ()) -> None:
        """What the next answers are."""
        self.script.text = self.family.answer(thought, text, calls)
        self.script.after_force = ""

    def told(
        self, messages: Any = ASK, max_tokens: Any = None, stop: Any = None, **body: Any
    ) -> list[Told]:
        """Thoughts, text, calls and how it ended, by each route, whole and streamed."""
        chat = _given(messages=messages, max_tokens=max_tokens, stop=stop, **body)
        found = list(self._chat(chat))
        if not any(one["role"] == "tool" or "tool_calls" in one for one in messages):
            tools = [{"type": "function", **one["function"]} for one in body.pop("tools", ())]
            asked = _given(input=messages, max_output_tokens=max_tokens, stop=stop, **body)
            found += self._responses(asked | ({"tools": tools} if tools else {}))
            options = _given(num_predict=max_tokens, stop=stop)
            if not body:
                found += self._ollama(
                    _given(messages=messages, options=options, tools=chat.get("tools"))
                )
        return found

    def _chat(self, body: dict[str, Any]) -> Iterator[Told]:
        (choice,) = self.post("/v1/chat/completions", **body).json()["choices"]
        message = choice["message"]
        thought, text = message.get("reasoning_content") or "", message["content"] or ""
        yield thought, text, _functions(message.get("tool_calls")), choice["finish_reason"]
        streamed = data(self.post("/v1/chat/completions", stream=True, **body))
        chunks = [one["choices"][0] for one in streamed]
        deltas = [one["delta"] for one in chunks]
        calls: list[Any] = []
        for part in itertools.chain.from_iterable(one.get("tool_calls", ()) for one in deltas):
            if "id" in part:
                calls.append({"function": dict(part["function"])})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        thought, text = _joined(deltas, "reasoning_content"), _joined(deltas, "content")
        yield thought, text, _functions(calls), chunks[-1]["finish_reason"]

    def _responses(self, body: dict[str, Any]) -> Iterator[Told]:
        whole = self.post("/v1/responses", **body).json()
        streamed = data(self.post("/v1/responses", stream=True, **body))
        for response in (whole, streamed[-1]["response"]):
            items = response["output"]
            thought, text = (
                "".join(
                    part["text"] for one in items if one["type"] == kind for part in one["content"]
                )
                for kind in ("reasoning", "message")
            )
            calls = [{"function": one} for one in items if one["type"] == "function_call"]
            ended = "tool_calls" if calls else "stop"
            is_cut = response["status"] == "incomplete"
            yield thought, text, _functions(calls), "length" if is_cut else ended
        deltas = [one["delta"] for one in streamed if one["type"].endswith("output_text.delta")]
        assert "".join(deltas) == text

    def _ollama(self, body: dict[str, Any]) -> Iterator[Told]:
        for is_streamed in (False, True):
            answer = self.post("/api/chat", stream=is_streamed, **body)
            lines = [json.loads(line) for line in answer.text.splitlines()]
            said = [one["message"] for one in lines]
            calls = [
                (one["function"]["name"], one["function"]["arguments"])
                for message in said
                for one in message.get("tool_calls", ())
            ]
            ended = lines[-1]["done_reason"]
            ended = "tool_calls" if calls and ended == "stop" else ended
            yield _joined(said, "thinking"), _joined(said, "content"), calls, ended


def _given(**values: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def _joined(parts: Sequence[Any], key: str) -> str:
    return "".join(one.get(key) or "" for one in parts)


def _functions(calls: Any) -> list[Any]:
    """Names and arguments, of those that are whole."""
    found = []
    for one in calls or ():
        try:
            arguments = json.loads(one["function"]["arguments"])
        except ValueError:
            continue
        found.append((one["function"]["name"], arguments))
    return found


@contextmanager
def serving(path: Path, family: Family) -> Iterator[Afternoon]:
    write_of_bytes(path, family.template, family.controls, family.ends)
    with InProcessSystem(path, num_positions=POSITIONS) as system:
        config = SystemConfig(str(path), context_length=POSITIONS)
        driver = Driver(config, system.exchange, system.topology)
        try:
            yield Afternoon(path, driver, family)
        finally:
            driver.close()


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Afternoon]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(active_request, "TokenSampler", Scripted)
        with serving(tmp_path_factory.mktemp("family"), FAMILIES[request.param]) as found:
            yield found


def only(told: Sequence[Any]) -> Any:
    """What is told by each route in the same way."""
    assert all(one == told[0] for one in told), told
    return told[0]


def test_it_thinks_and_answers(served: Afternoon) -> None:
    served.writes(THOUGHT, SAID)
    assert only(served.told()) == (THOUGHT, SAID, [], "stop")
    served.writes("", SAID)
    if served.family.turns_off:
        off = {"chat_template_kwargs": {served.family.turns_off: False}}
        assert only(served.told(**off)) == ("", SAID, [], "stop")


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("thought", [THOUGHT, ""])
def test_it_calls(served: Afternoon, choice: str, thought: str) -> None:
    if not thought and served.opens_thoughts:
        pytest.skip("its prompt opens thoughts")
    calls = CALLS[: served.family.most_calls]
    text = SAID if choice == "auto" and thought else ""
    served.writes(thought, text, calls)
    body = {"tools": TOOLS} | ({} if choice == "auto" else {"tool_choice": choice})
    assert only(served.told(**body)) == (thought, text, calls, "tool_calls")


@pytest.mark.sweep(keep=3)
def test_it_may_call_nothing(served: Afternoon) -> None:
    served.writes(THOUGHT, SAID)
    assert only(served.told(tools=TOOLS)) == (THOUGHT, SAID, [], "stop")


def test_it_reads_a_result_and_answers(served: Afternoon) -> None:
    """The history goes back to the template with its thoughts."""
    calls = [
        {"id": f"call{at}", "type": "function",
         "function": {"name": name, "arguments": json.dumps(arguments)}}
        for at, (name, arguments) in enumerate(CALLS[: served.family.most_calls])
    ]  # fmt: skip
    for said in ("", SAID):
        talk = [
            *ASK,
            {"role": "assistant", "content": said, "reasoning_content": THOUGHT,
             "tool_calls": calls},
            *({"role": "tool", "tool_call_id": one["id"], "content": "18 C"} for one in calls),
        ]  # fmt: skip
        served.writes("", "It is warm.") if not served.opens_thoughts else served.writes(
            THOUGHT, "It is warm."
        )
        told = only(served.told(messages=talk, tools=TOOLS))
        assert told[1:] == ("It is warm.", [], "stop")
        asked = served.client.requests[-1].prompt_ids or []
        prompt = Scripted.tokenizer.decode(asked, skip_special_tokens=False)
        assert "weather" in prompt and "18 C" in prompt and THOUGHT in prompt


@pytest.mark.sweep(keep=3)
def test_stops_sleep_in_thoughts(served: Afternoon) -> None:
    served.writes(THOUGHT, SAID)
    assert only(served.told(stop=["waits", "look"])) == (THOUGHT, "Let me ", [], "stop")
    served.writes(THOUGHT, "", CALLS[:1])
    told = only(served.told(stop=["waits", "Paulo"], tools=TOOLS))
    assert told == (THOUGHT, "", CALLS[:1], "tool_calls")


@pytest.mark.sweep(keep=3)
def test_it_may_be_cut_short_anywhere(served: Afternoon) -> None:
    """Nothing of a mark or a call is text then, nor is what may begin one."""
    served.writes(THOUGHT, SAID, CALLS[:1])
    ids = Scripted.tokenizer.encode(served.script.text, False)
    for most in range(1, len(ids), len(ids) // 9):
        thought, said, calls, ended = only(served.told(tools=TOOLS, max_tokens=most))
        assert THOUGHT.startswith(thought) and SAID.startswith(said)
        assert (not calls or calls == CALLS[:1]) and ended == "length"


@pytest.mark.sweep(keep=3)
def test_shapes_hold_the_answer_alone(served: Afternoon) -> None:
    served.writes(THOUGHT, '{"a": 7}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    body = {"messages": ASK, "max_tokens": 300, "response_format": shape}
    (choice,) = served.post("/v1/chat/completions", **body).json()["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, '{"a": 7}')


@pytest.mark.sweep(keep=4)
@pytest.mark.parametrize("budget", [0, 5])
def test_budgets_end_thoughts(served: Afternoon, budget: int) -> None:
    served.writes(THOUGHT, SAID)
    served.script.after_force = SAID
    for more in ({}, {"tools": TOOLS}):
        body = {"messages": ASK, "max_tokens": 300, "thinking_token_budget": budget, **more}
        (choice,) = served.post("/v1/chat/completions", **body).json()["choices"]
        message = choice["message"]
        assert message["content"] == SAID and choice["finish_reason"] == "stop"
        assert THOUGHT.startswith(message.get("reasoning_content", ""))


@pytest.mark.sweep(keep=3)
def test_an_end_in_thoughts_ends_them_alone(served: Afternoon) -> None:
    served.writes(THOUGHT, "")
    text = served.script.text
    served.script.text = text[: text.index(THOUGHT) + 8] + served.family.ends[-1]
    served.script.after_force = SAID
    assert only(served.told()) == (THOUGHT[:8], SAID, [], "stop")


@pytest.mark.sweep(keep=3)
def test_logprobs_are_those_of_the_text(served: Afternoon) -> None:
    served.writes(THOUGHT, SAID)
    for is_streamed in (False, True):
        body = {"messages": ASK, "logprobs": True, "max_tokens": 300, "stream": is_streamed}
        answer = served.post("/v1/chat/completions", **body)
        found = data(answer) if is_streamed else [answer.json()]
        scored = [one["choices"][0]["logprobs"] or {"content": []} for one in found]
        joined = b"".join(bytes(one["bytes"]) for each in scored for one in each["content"])
        assert joined.decode() == SAID


@pytest.mark.sweep(keep=3)
def test_who_shows_all_of_it_may_go_on(served: Afternoon) -> None:
    """As the page and commands do: thoughts are in the text, and go back with it."""
    served.writes(THOUGHT, SAID)
    drawn = SamplingParams(temperature=0.0, max_tokens=300)
    *_, last = served.driver.generate(GenerateRequest(drawn, messages=ASK))
    assert last.result is not None
    text = last.result.text
    assert text.endswith(SAID) and THOUGHT in text and "<|message|>" not in text
    served.writes(THOUGHT if served.opens_thoughts else "", "Yes.")
    told = served.told(messages=[*ASK, {"role": "assistant", "content": text}, *ASK])
    assert only(told)[1:] == ("Yes.", [], "stop")


@pytest.mark.sweep(keep=3)
def test_an_answer_goes_on(served: Afternoon) -> None:
    """Where it was stopped; what it thought stands before it."""
    served.script.text = " It is warm."
    told = [*ASK, {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"}]
    drawn = SamplingParams(temperature=0.0, max_tokens=300)
    variables = {"continue_final_message": True, "add_generation_prompt": False}
    *_, last = served.driver.generate(
        GenerateRequest(drawn, messages=told, template_variables=variables)
    )
    assert last.result is not None and last.result.text == " It is warm."


def test_a_schema_gives_values_their_types(served: Afternoon) -> None:
    """Text that looks like a number stays text, and so does a number that may be text alone."""
    parameters = {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "either": {"type": ["integer", "string"]},
            "of": {"enum": ["a", "b/c"]},
            "list": {"type": "array", "items": {"type": "number"}},
            "none": {"type": "null"},
        },
        "required": ["text", "of"],
    }
    function = {"name": "f", "description": "d", "parameters": parameters}
    given = {"text": "18", "either": 7, "of": "b/c", "list": [1.5, 2], "none": None}
    thought = THOUGHT if served.opens_thoughts else ""
    for strict in (False, True):
        body: dict[str, Any] = {
            "tools": [{"type": "function", "function": function | {"strict": strict}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        }
        for arguments in (given, {"text": "", "of": "a"}):
            served.writes(thought, "", [("f", arguments)])
            told = served.post("/v1/chat/completions", messages=ASK, max_tokens=600, **body)
            (call,) = told.json()["choices"][0]["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == arguments


@pytest.mark.sweep(keep=6)
@pytest.mark.parametrize("wrong", [{"of": "c"}, {"text": 3, "of": "a"}, {"of": "a", "none": 1}])
def test_calls_are_held_to_their_schema(served: Afternoon, wrong: Any) -> None:
    if isinstance(wrong.get("text"), int) and served.family.has_bare_text:
        pytest.skip("text has no quotes")
    parameters = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "of": {"enum": ["a"]}, "none": {"type": "null"}},
    }
    function = {"name": "f", "description": "d", "parameters": parameters}
    served.writes(THOUGHT if served.opens_thoughts else "", "", [("f", wrong)])
    body = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    with pytest.raises(AssertionError, match="may not follow"):
        served.post("/v1/chat/completions", messages=ASK, max_tokens=600, **body)
