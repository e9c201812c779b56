"""Answers of a model that thinks, by every route: stops, logprobs, grammars, calls, budgets."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from hotcold.actors.driver.driver import Driver
from hotcold.actors.protocol.messages import GenerateRequest, Generation, SystemConfig
from hotcold.chats import Chat, chat_request, tools_of
from hotcold.model.sampling import SamplingParams
from hotcold.ui.api.backend import Backend, ServerSettings
from hotcold.ui.api.served_models import ServedModels
from hotcold.ui.app import create_app
from tests.actors.in_process import InProcessSystem
from tests.chain_model import END, write_chain
from tests.unit.ollama_routes import Client, Deliver, give_client, over

# Its prompt ends with what begins thoughts, or with `[go]` alone.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if tools %}<tool_call>"
    '{"name", "arguments"}{% endif %}[go]{% if opens %}<think>{% endif %}'
)
HELLO = [{"role": "user", "content": "Hello"}]
FUNCTION: dict[str, Any] = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOL = {"type": "function", "function": FUNCTION}
OPENS: dict[str, Any] = {"chat_template_kwargs": {"opens": True}}
THINKS = ["[go]", "<think>", "\n", "The", " us", "er", " waits", ".\n", "</think>"]
SAYS = ["</think>", "\n\n", "For", "ty", "-", "two", ".", END]


class DriverClient(Client):
    """Asks a driver of this process."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self.driver = driver
        self.requests: list[GenerateRequest] = []

    async def submit(self, request: GenerateRequest, deliver: Deliver) -> str:
        name = str(len(self.requests))
        self.requests.append(request)
        asked = replace(request, request_id=name)
        for event in await asyncio.to_thread(lambda: list(self.driver.generate(asked))):
            deliver(event)
        return name


class Served:
    """A chain's model behind all routes."""

    def __init__(self, path: Path, driver: Driver, context: int = 256) -> None:
        config = SystemConfig(str(path), context_length=context, max_batch=2)
        backend = Backend(config, ServerSettings("demo", 1, context // 2, 60.0))
        self.client = DriverClient(driver)
        give_client(backend, self.client)
        self.driver = driver
        self._app = create_app(ServedModels([backend]))

    def post(self, path: str, **body: Any) -> httpx.Response:
        if path.startswith("/api"):
            body["options"] = {"temperature": 0} | body.get("options", {})
        else:
            body["temperature"] = 0

        asked = {"model": "demo", **body}
        answer: httpx.Response = over(self._app, lambda http: http.post(path, json=asked))
        assert answer.status_code == 200, answer.text
        return answer

    def chat(self, **body: Any) -> dict[str, Any]:
        """The choice of a whole answer; the streamed one says the same."""
        path = "/v1/chat/completions"
        answer = self.post(path, messages=HELLO, **body).json()
        (choice,) = answer["choices"]
        streamed = self.post(path, messages=HELLO, stream=True, **body)
        chunks = [one["choices"][0] for one in data(streamed)]
        for key in ("content", "reasoning_content"):
            joined = "".join(one["delta"].get(key) or "" for one in chunks)
            assert joined == (choice["message"].get(key) or "")
        assert chunks[-1]["finish_reason"] == choice["finish_reason"]
        if body.get("logprobs"):
            scored = [one for one in chunks if one["logprobs"] is not None]
            for one in scored:
                assert tokens(one["logprobs"]).startswith(one["delta"]["content"])
            content = [token for one in scored for token in one["logprobs"]["content"]]
            assert content == choice["logprobs"]["content"]
        choice["usage"] = answer["usage"]
        return choice

    def generate(self, messages: list[dict[str, Any]] = HELLO, **options: Any) -> Generation:
        """A conversation as commands, jobs and the page send it."""
        drawn = SamplingParams(temperature=0.0, **options)
        request = GenerateRequest(drawn, messages=messages, template_variables={"opens": True})
        *_, last = self.driver.generate(request)
        assert last.result is not None
        return last.result


def data(answer: httpx.Response) -> list[Any]:
    return [json.loads(one) for one in re.findall(r"^data: (\{.*)$", answer.text, re.MULTILINE)]


def tokens(logprobs: dict[str, Any]) -> str:
    return "".join(one["token"] for one in logprobs["content"])


@contextmanager
def serving(path: Path, *chains: Sequence[str], speculate: str = "off") -> Iterator[Served]:
    write_chain(path, TEMPLATE, *chains)
    with InProcessSystem(path, num_positions=256) as system:
        config = SystemConfig(str(path), context_length=256, speculate=speculate)
        driver = Driver(config, system.exchange, system.topology)
        try:
            yield Served(path, driver)
        finally:
            driver.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Thinks, and answers."""
    with serving(tmp_path_factory.mktemp("thinks"), THINKS, SAYS) as found:
        yield found


THOUGHT, SAID = "The user waits.", "Forty-two."
OPENED = [OPENS, {}]  # by the prompt, by the model


@pytest.mark.parametrize("opened", OPENED)
def test_stops_sleep_until_thoughts_end(served: Served, opened: dict[str, Any]) -> None:
    whole = served.chat(**opened)
    message = whole["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, SAID)
    same = served.chat(**opened, stop=["e", "</th", "w"])
    assert same["message"] | {"content": "Forty-t"} == same["message"]
    assert same["message"]["reasoning_content"] == THOUGHT
    assert (same["finish_reason"], whole["finish_reason"]) == ("stop", "stop")
    tokenizer = served.driver.generator.prompts.tokenizer
    assert tokenizer is not None
    ids = [tokenizer.token_id(text) for text in ("er", "-")]
    cut = served.chat(**opened, stop_token_ids=ids)["message"]
    assert (cut["reasoning_content"], cut["content"]) == (THOUGHT, "Forty")
    short = served.chat(**opened, max_tokens=5)
    assert short["finish_reason"] == "length" and short["message"]["content"] is None
    assert THOUGHT.startswith(short["message"]["reasoning_content"])


def test_stops_sleep_by_every_route(served: Served) -> None:
    told = served.post("/api/chat", messages=HELLO, stream=False, options={"stop": ["e", "w"]})
    message = told.json()["message"]
    assert (message["thinking"], message["content"]) == (THOUGHT, "Forty-t")
    # /v1/responses has no stop of OpenAI's, and takes the one of other routes
    thought, said = served.post("/v1/responses", input="Hello", stop=["e", "w"]).json()["output"]
    assert thought["content"][0]["text"] == THOUGHT and said["content"][0]["text"] == "Forty-t"
    assert served.generate(stop=["e", "w"]).text == "\nThe user waits.\n</think>\n\nForty-t"
    # What is no chat is all text.
    raw = served.post("/v1/completions", prompt="[go]<think>", stop=["e"], max_tokens=99).json()
    assert raw["choices"][0]["text"] == "\nTh"


CALL = ["<tool_call>", "\n", '{"name": "f"', ', "arguments": ', '{"a": 1}', "}\n", "</tool_call>"]


CALLS = ["[go]", "Let", " me. ", "<to", "ol_call>", *CALL[1:], END]
ASKED = {"tools": [TOOL], "messages": HELLO}


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Says a word, and calls."""
    with serving(tmp_path_factory.mktemp("calls"), CALLS) as found:
        yield found


def with_python(served: Served, **options: Any) -> tuple[str, list[str]]:
    """What a conversation of the Python API says, and the arguments of its calls."""
    tools, tokenizer = tools_of({"tools": [TOOL]}), served.driver.generator.prompts.tokenizer
    assert tokenizer is not None
    chat = Chat.of(tokenizer, tools.wanted, None)
    asked = chat_request(SamplingParams(temperature=0.0, **options), HELLO, tools, {})
    reader = chat.reader()
    for event in served.driver.generate(replace(asked, grammar=chat.grammar, is_chat=True)):
        reader.texts(event)
    return reader.said, [call.arguments for call in reader.calls]


@pytest.mark.parametrize("stop", ["1", "ol_call>", ". <"])
def test_stops_sleep_within_calls(calling: Served, stop: str) -> None:
    told = calling.chat(tools=[TOOL], stop=[stop])
    (call,) = told["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"a": 1}'
    assert (told["message"]["content"], told["finish_reason"]) == ("Let me.", "tool_calls")
    said, call = calling.post("/v1/responses", input="a", stop=[stop], tools=[
        {"type": "function", **FUNCTION}]).json()["output"]  # fmt: skip
    assert (said["content"][0]["text"], call["arguments"]) == ("Let me.", '{"a": 1}')
    message = calling.post("/api/chat", **ASKED, stream=False, options={"stop": [stop]}).json()
    assert message["message"]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert with_python(calling, stop=[stop]) == ("Let me.", ['{"a": 1}'])


def test_stops_end_the_text_before_calls(calling: Served) -> None:
    for stop, said in (("me", "Let "), ("t m", "Le")):
        told = calling.chat(tools=[TOOL], stop=[stop])
        assert (told["message"]["content"], told["finish_reason"]) == (said, "stop")
        assert "tool_calls" not in told["message"]
    tokenizer = calling.driver.generator.prompts.tokenizer
    assert tokenizer is not None
    ids = [tokenizer.token_id(text) for text in CALLS]
    told = calling.chat(tools=[TOOL], stop_token_ids=ids[CALLS.index(CALL[3]) : -2])
    assert told["finish_reason"] == "tool_calls" and told["message"]["content"] == "Let me."
    assert calling.chat(tools=[TOOL], stop_token_ids=[ids[2]])["message"]["content"] == "Let"


@pytest.mark.parametrize(
    "prose", [["a ", "<tool_call>", " is how"], ["`", "<tool_call>", '{"name": "g"', "'"]]
)
def test_names_of_calls_in_thoughts_are_no_calls(tmp_path: Path, prose: list[str]) -> None:
    """Thoughts are as free as without tools, whoever began them; what follows is held."""
    with serving(tmp_path, ["[go]", "<think>", *prose, "</think>", "Yes", END]) as served:
        for opened in OPENED:
            told = served.chat(**opened, tools=[TOOL])
            assert told["message"]["reasoning_content"] == "".join(prose)
            assert told["message"]["content"] == "Yes" and told["finish_reason"] == "stop"


def test_marks_of_several_tokens_are_seen(tmp_path: Path) -> None:
    """A token that ends them and goes on is taken where the answer may begin so."""
    marks = ["[go]", "<thi", "nk>", "Hm</t", "hink>7", END]
    with serving(tmp_path, marks) as served:
        for stop in ([], ["<"], ["nk>H", "t"]):
            message = served.chat(stop=stop)["message"]
            assert (message["reasoning_content"], message["content"]) == ("Hm", "7")
        message = served.chat(guided_choice=["7"])["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm", "7")
        held = served.chat(guided_choice=["8"], max_tokens=40)["message"]
        assert held["content"] in (None, "8")


def test_drafts_change_nothing_of_thoughts(tmp_path: Path) -> None:
    """Their end within a draft, forced or not: the question proposes the answer's text."""
    question = [{"role": "user", "content": "".join([*THINKS, *SAYS[1:-1]]) * 2}]
    told = []
    for speculate in ("off", "4"):
        with serving(tmp_path, THINKS, SAYS, speculate=speculate) as served:
            found = [
                served.generate(question, thinking_token_budget=budget, stop=["w"])
                for budget in (-1, 0, 2, 5)
            ]
            assert (speculate == "off") == (sum(one.drafts.num_accepted for one in found) == 0)
            told.append([(one.ids, one.text, one.num_thought_tokens) for one in found])
    assert told[0] == told[1]
