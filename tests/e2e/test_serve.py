"""`hotcold serve` as OpenAI's own client sees it, on the demo model."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

import httpx
import numpy as np
import pytest
from scipy.special import log_softmax

from hotcold.jobs.cli import main
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.text.tokenizer import Tokenizer
from tests.documents import page
from tests.e2e.server import LONG, WAIT_S, Server, await_that
from tests.reference import reference_logits

QUESTION = "What does textwrap.dedent do?"
DOCUMENTED_URL = "http://127.0.0.1:8000"
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_model(DEMO_DIRECTORY)
    assert found is not None
    return found


def test_answers_as_generate_does(
    local_ray: None, client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--chat", "--prompt", QUESTION, "--temperature", "0", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out.splitlines()[-1])
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0)
    choice = answer.choices[0]
    assert choice.message.content == expected["text"]
    assert choice.finish_reason == expected["finish_reason"] == "stop"
    assert answer.usage.completion_tokens == len(expected["ids"])
    assert answer.usage.prompt_tokens == expected["prompt_tokens"]


def test_the_docs_curls_are_answered(server: Server) -> None:
    said = []
    for line in page("docs/api.md").commands():
        if not line.startswith("curl"):
            continue
        _, url, option, body = shlex.split(line)
        assert option == "-d"
        answer = httpx.post(
            url.replace(DOCUMENTED_URL, server.url),
            content=body,
            headers={"Content-Type": "application/x-www-form-urlencoded"},  # as curl -d sends it
            timeout=WAIT_S,
        )
        assert answer.status_code == 200
        said.append(answer.json())
    assert said and all(one["choices"][0]["message"]["content"] for one in said)


def test_the_docs_python_runs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Two by OpenAI's client, one by Ollama's."""
    said = []
    for program in page("docs/api.md").blocks("python"):
        assert DOCUMENTED_URL in program
        exec(compile(program.replace(DOCUMENTED_URL, server.url), "docs/api.md", "exec"), {})
        said.append(capsys.readouterr().out.strip())
    assert len(said) == 3 and all(said)


def test_a_stream_is_the_same_answer(client: Any) -> None:
    whole = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=MESSAGES, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    *body, last = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in body)
    assert text == whole.choices[0].message.content
    assert body[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in body if chunk.choices[0].finish_reason] == [
        "stop"
    ]
    assert last.choices == [] and last.usage == whole.usage
    assert all(chunk.usage is None for chunk in body)


def test_seed_and_n(client: Any) -> None:
    def ask(seed: int, n: int) -> list[str]:
        answer = client.completions.create(
            model="demo", prompt="Return", max_tokens=30, temperature=1.5, seed=seed, n=n,
            extra_body={"top_k": 0, "min_p": 0},
        )  # fmt: skip
        assert [choice.index for choice in answer.choices] == list(range(n))
        return [choice.text for choice in answer.choices]

    first, second, third = ask(5, 3)
    assert len({first, second, third}) == 3
    assert ask(5, 1) == [first] and ask(6, 1) == [second]


def _reference_log_softmax(ids: list[int]) -> np.ndarray:
    """Of the demo's float64 reference, (T, V)."""
    return log_softmax(reference_logits(DEMO_DIRECTORY, ids), axis=-1)


def test_prompt_logprobs_are_the_references(client: Any, tokenizer: Tokenizer) -> None:
    max_tokens = 1
    text = (DEMO_DIRECTORY / "heldout.txt").read_text()[:600]
    ids = tokenizer.encode(text)
    answer = client.completions.create(
        model="demo", prompt=[ids], max_tokens=max_tokens, echo=True, logprobs=3, temperature=0
    )
    choice, expected = answer.choices[0], _reference_log_softmax(ids)
    found = choice.logprobs
    assert len(found.tokens) == len(found.text_offset) == len(ids) + max_tokens > 100
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    wanted = expected[np.arange(len(ids) - 1), ids[1:]]
    assert np.abs(np.array(found.token_logprobs[1 : len(ids)]) - wanted).max() < 0.02
    for row, top in zip(expected, found.top_logprobs[1:], strict=False):
        likeliest = np.sort(row)[::-1][:3]
        assert np.abs(sorted(top.values(), reverse=True)[:3] - likeliest).max() < 0.02
    assert "".join(found.tokens) == choice.text
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)
    assert found.token_logprobs[-1] == max(found.top_logprobs[-1].values())  # greedy
    assert math.isclose(found.token_logprobs[-1], expected[-1].max(), abs_tol=0.02)
    assert answer.usage.completion_tokens == max_tokens
    alone = client.completions.create(
        model="demo", prompt=[ids], max_tokens=0, echo=True, logprobs=3, temperature=0
    )
    assert alone.choices[0].logprobs.token_logprobs == found.token_logprobs[:-1]


def test_logprobs_of_an_answer_are_the_references(client: Any, tokenizer: Tokenizer) -> None:
    """Of the model's own distribution, whatever is drawn from it."""
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0.7, seed=1, logprobs=True, top_logprobs=2,
        max_tokens=40, extra_body={"return_token_ids": True},
    )  # fmt: skip
    choice = answer.choices[0]
    prompt = tokenizer.encode(tokenizer.render_chat(MESSAGES), add_special_tokens=False)
    ids = choice.token_ids
    expected = _reference_log_softmax(prompt + ids)[len(prompt) - 1 :]
    content = choice.logprobs.content
    assert "".join(item.token for item in content) == choice.message.content
    assert b"".join(bytes(item.bytes) for item in content).decode() == choice.message.content
    for item, row, token_id in zip(content, expected, ids, strict=False):
        assert math.isclose(item.logprob, row[token_id], abs_tol=0.02)
        assert math.isclose(item.top_logprobs[0].logprob, row.max(), abs_tol=0.02)
    assert len(content) in (len(ids), len(ids) - 1)  # the end token is no content


def test_penalties_are_openais(client: Any, tokenizer: Tokenizer) -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence; c counts what was sampled before."""
    presence, frequency = -0.5, 2.0
    prompt = tokenizer.encode("Return the value of the value of the value of")
    answer = client.completions.create(
        model="demo", prompt=[prompt], max_tokens=12, temperature=0, presence_penalty=presence,
        frequency_penalty=frequency, extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    ids = answer.choices[0].token_ids
    assert len(ids) == 12
    for place, token_id in enumerate(ids):
        logits = reference_logits(DEMO_DIRECTORY, prompt + ids[:place])[-1]
        for seen in set(ids[:place]):
            logits[seen] -= ids[:place].count(seen) * frequency + presence
        assert logits[token_id] >= logits.max() - 0.05


def test_several_prompts(client: Any, tokenizer: Tokenizer) -> None:
    texts = ["Return the", "A list of"]
    ids = [tokenizer.encode(text) for text in texts]
    kept: dict[str, Any] = {"model": "demo", "max_tokens": 8, "temperature": 0}
    alone = [client.completions.create(prompt=text, **kept).choices[0].text for text in texts]
    for prompt in (texts, ids):
        answer = client.completions.create(prompt=prompt, **kept)
        assert [choice.text for choice in answer.choices] == alone
        assert answer.usage.prompt_tokens == sum(map(len, ids))


def test_models_and_tokens(server: Server, client: Any, tokenizer: Tokenizer) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "hotcold"
    ids = tokenizer.encode("naïve text")
    found = server.post("/tokenize", {"prompt": "naïve text"}).json()
    assert found == {"count": len(ids), "max_model_len": 512, "tokens": ids}
    back = server.post("/detokenize", {"tokens": ids[1:]}).json()
    assert back == {"prompt": "naïve text"}
    chat = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert chat == tokenizer.encode(tokenizer.render_chat(MESSAGES), add_special_tokens=False)


def test_errors_in_openais_form(openai: Any, server: Server, client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="demo", prompt="word " * 2000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="450"):
        client.completions.create(model="demo", prompt="a", max_tokens=451)
    with pytest.raises(openai.BadRequestError, match="send at most 2048 at once"):
        client.completions.create(model="demo", prompt=["a"] * 17, n=128)
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="demo", messages=MESSAGES, temperature=-1)
    assert wrong.value.param == "temperature"
    large = httpx.post(f"{server.url}/v1/completions", content=b"x" * (5 << 20), timeout=600)
    assert large.status_code == 413 and large.json()["error"]["message"]
    strange = httpx.get(f"{server.url}/v1/models", headers={"Host": "example.org"})
    assert strange.status_code == 403 and strange.json()["error"]["code"] == "host_refused"


def test_beyond_the_queue_are_told_to_come_later(openai: Any, server: Server, client: Any) -> None:
    held = client.completions.create(model="demo", **LONG, n=12, stream=True)
    try:
        next(iter(held))
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model="demo", prompt="a", n=12)
        assert refused.value.status_code == 503 and refused.value.code == "queue_full"
        assert int(refused.value.response.headers["retry-after"]) > 0
    finally:
        held.response.close()
    await_that(lambda: server.metric("vllm:num_requests_running") == 0)
