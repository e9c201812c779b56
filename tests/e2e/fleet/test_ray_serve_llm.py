"""A model behind Ray Serve LLM's own ingress, asked by OpenAI's client."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hotcold import LLM, SamplingParams
from hotcold.model.errors import UsageError

pytest.importorskip("ray.serve")
pytest.importorskip("pyarrow")
from ray import serve

from examples.ray_serve_llm import app
from hotcold.serve import build_openai_app
from hotcold.ui.fleet.application import NAME
from tests.e2e.fleet.doors import until

MESSAGES = [{"role": "user", "content": "What does textwrap.dedent do?"}]
MORE = {"extra_body": {"ignore_eos": True, "return_token_ids": True}, "max_tokens": 40}
OPTIONS: dict[str, Any] = {"threads": 1, "context_length": 384, "parallel": 2, "device": "cpu"}
WAYS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.2, "seed": 3}]


@pytest.fixture(scope="module")
def client(openai: Any, deployed: Callable[..., str]) -> Any:
    url = deployed(lambda: app(threads=1, context=384, parallel=2, device="cpu"))
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=600)


@pytest.fixture(scope="module")
def alone(client: Any) -> Iterator[LLM]:
    """A system of the same options, in the same Ray, by the Python API."""
    with LLM(**OPTIONS, progress=False) as made:
        yield made


@pytest.mark.parametrize("fields", WAYS)
def test_a_chat_is_as_alone(client: Any, alone: LLM, fields: dict[str, Any]) -> None:
    expected = alone.chat(MESSAGES, SamplingParams(max_tokens=40, ignore_eos=True, **fields))
    asked = {"model": "demo", "messages": MESSAGES, **MORE, **fields}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].token_ids == list(expected.token_ids)
    assert whole.choices[0].message.content == expected.text
    usage = {"stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**asked, stream=True, **usage)
    assert len(chunks) > 1 and chunks[-1].choices[0].token_ids == list(expected.token_ids)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert last.usage == whole.usage


@pytest.mark.parametrize("fields", WAYS)
def test_completions_are_as_alone(client: Any, alone: LLM, fields: dict[str, Any]) -> None:
    prompts = ["def total(values):", "class Queue:"]
    expected = alone.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True, **fields))
    asked = {"model": "demo", **MORE, **fields}
    whole = client.completions.create(**asked, prompt=prompts, logprobs=1)
    ids = [list(one.token_ids) for one in expected]
    assert [choice.token_ids for choice in whole.choices] == ids
    assert [len(choice.logprobs.tokens) for choice in whole.choices] == [40, 40]
    stream = client.completions.create(**asked, prompt=prompts[0], stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected[0].text


def test_embeddings_and_tokens(client: Any, alone: LLM) -> None:
    texts = ["one", "of two"]
    found = client.embeddings.create(model="demo", input=texts).data
    assert np.array_equal([one.embedding for one in found], alone.embed(texts))
    root = str(client.base_url).removesuffix("v1/")
    ids = client.post(root + "tokenize", body={"prompt": "a list"}, cast_to=object)["tokens"]
    back = client.post(root + "detokenize", body={"tokens": ids[1:]}, cast_to=object)
    assert back == {"prompt": "a list"}
    assert [one.id for one in client.models.list()] == ["demo"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_errors(openai: Any, client: Any, is_stream: bool) -> None:
    """As statuses, before a stream begins; our own lines are in Ray's."""

    def refused(kind: Any, told: str, **fields: Any) -> None:
        asked = {"model": "demo", "messages": MESSAGES, "stream": is_stream, **fields}
        with pytest.raises(kind, match=told):
            client.chat.completions.create(**asked)

    refused(openai.NotFoundError, "404", model="gpt-4")
    refused(openai.BadRequestError, "temperature must be at least 0", temperature=-1)
    refused(openai.BadRequestError, "max_tokens must be a whole", max_tokens="many")
    refused(openai.BadRequestError, "content", messages=[{"role": "user", "content": 5}])
    refused(openai.BadRequestError, "tokens", messages=[{**MESSAGES[0], "content": "a " * 2000}])
    refused(openai.BadRequestError, "Field required", messages=openai.NOT_GIVEN)
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings gives their vectors"):
        client.post("/score", body={"text_1": "a", "text_2": "b"}, cast_to=object)


def test_who_leaves_takes_no_place(openai: Any, client: Any) -> None:
    """In the middle of answers that would take a quarter of an hour, streamed and whole."""
    handle = serve.get_deployment_handle("HotcoldServer:demo", NAME)

    def is_idle() -> bool:
        ((load, _),) = handle.broadcast("status").results(timeout_s=30)
        return not load.num_running + load.num_waiting

    asked = {"model": "demo", "prompt": ["a"] * 16, "n": 128, **MORE, "max_tokens": 300}
    with client.completions.create(**asked, stream=True) as stream:
        next(iter(stream))
        until(lambda: not is_idle())
    until(is_idle)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=2).completions.create(**asked)
    until(is_idle)


def test_what_it_has_not_is_refused() -> None:
    model = {"model_loading_config": {"model_id": "demo"}}
    with pytest.raises(UsageError, match="'max_model_len' is no option of a system"):
        build_openai_app({"llm_configs": [{**model, "engine_kwargs": {"max_model_len": 9}}]})
    with pytest.raises(UsageError, match="lora_config is for other engines"):
        build_openai_app({"llm_configs": [{**model, "lora_config": {}}]})


def test_what_is_missing_is_named() -> None:
    program = "import sys; sys.modules['pyarrow'] = None; import hotcold.serve"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    *_, last = ended.stderr.splitlines()
    assert last.startswith("ImportError: ") and "pip install" in last and last.endswith("pyarrow`")
