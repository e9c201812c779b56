"""`LLM` over a system of this process's own: results, order, batches, ends."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from hotcold import LLM, HotcoldError, PromptError, RequestOutput, SamplingParams, UsageError
from hotcold.outputs import StreamPiece
from tests.e2e.commands import run

GREEDY = SamplingParams(temperature=0, max_tokens=12)
DRAWN = SamplingParams(seed=7, max_tokens=12, temperature=1.0)
QUESTION = [{"role": "user", "content": "What does textwrap.dedent do?"}]
ANSWER = "Remove any common leading whitespace from every line in `text`."
PROMPTS = [f"def {name}(a, b):" for name in ("add", "sub", "join", "sort", "open", "close", "read")]
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
WAIT_S = 600.0


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Without drafts, whose neurons count: how many there are depends on their time."""
    options: dict[str, Any] = {"parallel": 4, "context_length": 480, "speculate": "off"}
    with LLM(own=True, progress=False, **options) as made:
        yield made


def await_idle(llm: LLM) -> None:
    deadline = time.monotonic() + WAIT_S
    while (now := llm.telemetry())["running"] + now["waiting"]:
        assert time.monotonic() < deadline


def when_running(llm: LLM, act: Callable[[], object]) -> threading.Thread:
    """Call `act` in a thread, once a request runs."""

    def wait() -> None:
        while not llm.telemetry()["running"]:
            pass
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_result_is_that_of_the_command(llm: LLM) -> None:
    done = run(
        "generate", "--own", "--prompt", PROMPTS[0], "--json", "--seed", "7", "--max-tokens", "12",
        "--temperature", "1", "--speculate", "off",
    )  # fmt: skip
    assert done.status == 0, done.err
    result = llm.generate(PROMPTS[0], DRAWN)
    told, own = json.loads(done.out.splitlines()[-1]), result.as_json()
    assert told["ids"] == list(result.token_ids)
    names = ("text", "finish_reason", "prompt_tokens")
    for name in (*names, "neurons_computed", "ups_computed", "gates_computed"):
        assert told[name] == own[name], name
    assert 0 < own["neurons_computed"] < own["gates_computed"] == 1
    assert told.keys() - {"system"} == own.keys()


async def first_of(pieces: AsyncIterator[StreamPiece]) -> StreamPiece:
    return await anext(pieces)


def test_errors_are_in_keywords(llm: LLM) -> None:
    """What answering says of options, too, has their names here."""
    prompt = PROMPTS[0] * 400
    told = "start with a larger context_length"
    with pytest.raises(PromptError, match=told):
        llm.generate(prompt, GREEDY)
    assert told in str(llm.generate([prompt], GREEDY)[0].error)
    with pytest.raises(PromptError, match=told):
        next(llm.stream(prompt, GREEDY))
    with pytest.raises(PromptError, match=told):
        asyncio.run(first_of(llm.astream(prompt, GREEDY)))
    with pytest.raises(PromptError, match=told):
        next(llm.stream([{"role": "user", "content": prompt}], GREEDY))


def test_a_batch_keeps_order_and_each_answer_is_as_of_a_lone_request(llm: LLM) -> None:
    params = [DRAWN.changed(seed=seed) for seed in range(3 * len(PROMPTS))]
    together = llm.generate(PROMPTS * 3, params)
    assert [one.prompt for one in together] == PROMPTS * 3
    for index in (0, 8, 20):
        alone = llm.generate((PROMPTS * 3)[index], params[index])
        assert together[index].token_ids == alone.token_ids
        assert together[index].text == alone.text
    assert len({one.token_ids for one in together}) > len(PROMPTS)


def test_one_result_is_also_a_list_of_one(llm: LLM) -> None:
    """As vLLM's users take it."""
    outputs = llm.generate("a", GREEDY)
    assert outputs[0].outputs[0].text == outputs.text
    assert [each.prompt for each in outputs] == ["a"] and len(outputs) == 1
    assert outputs[-1] is outputs and outputs[:1] == [outputs]
    with pytest.raises(IndexError):
        outputs[1]


def test_one_bad_prompt_loses_no_other(llm: LLM) -> None:
    results = llm.generate(["a", [1, 1 << 30], "", "b"], GREEDY)
    assert [bool(one.error) for one in results] == [False, True, True, False]
    assert "token id 1073741824 is not in the vocabulary" in results[1].error
    assert results[3].token_ids == llm.generate("b", GREEDY).token_ids
    with pytest.raises(PromptError, match="vocabulary"):
        _ = results[1].text
    with pytest.raises(PromptError, match="the prompt is empty"):
        llm.generate("", GREEDY)
    assert llm.generate(()) == []
    with pytest.raises(UsageError, match="2 prompts and 1 sampling params"):
        llm.generate(["a", "b"], [GREEDY])


def test_several_answers_have_seeds_that_follow(llm: LLM) -> None:
    found = llm.generate(PROMPTS[0], DRAWN.changed(n=3))
    lone = [llm.generate(PROMPTS[0], DRAWN.changed(seed=7 + i)).token_ids for i in range(3)]
    assert [one.token_ids for one in found.outputs] == lone
    assert [one.index for one in found.outputs] == [0, 1, 2]


def test_a_prompt_that_was_there_is_not_computed_again(llm: LLM) -> None:
    """The same answer; with a salt, or without the cache, nothing is found of it."""
    ids = (llm.tokenize(PROMPTS[0]) * 100)[:150]
    params = GREEDY.changed(cache_salt="one", logprobs=1)
    first, again = llm.generate(ids, params), llm.generate(ids, params)
    apart = llm.generate(ids, params.changed(cache_salt="another"))
    anew = llm.generate(ids, params.changed(cache=False))
    found = [first, again, apart, anew]
    assert [one.num_cached_tokens for one in found] == [0, 128, 0, 0]
    assert [one.as_json()["cached_tokens"] for one in found] == [0, 128, 0, 0]
    assert len({(one.token_ids, one.logprobs) for one in found}) == 1
    several = llm.generate([*ids, 5], params.changed(n=2))
    assert several.num_cached_tokens == 128


def test_logprobs_are_those_of_a_score(llm: LLM) -> None:
    ids = llm.tokenize(PROMPTS[0])
    asked = llm.generate(ids, GREEDY.changed(logprobs=2, prompt_logprobs=1))
    assert asked.logprobs is not None and asked.prompt_logprobs is not None
    assert [one.token_id for one in asked.logprobs] == list(asked.token_ids)
    assert all(one.top[0][0] == one.token_id and len(one.top) == 2 for one in asked.logprobs)
    score = llm.score([*ids, *asked.token_ids])
    told = [one.logprob for one in (*asked.prompt_logprobs, *asked.logprobs)]
    assert score.logprobs[0] is told[0] is None
    np.testing.assert_allclose(_numbers(score.logprobs), _numbers(told), atol=1e-4)
    assert score.token_ids == (*ids, *asked.token_ids)
    assert score.logprob == pytest.approx(_numbers(told).sum(), abs=1e-3)
    assert score.perplexity == pytest.approx(np.exp(-_numbers(told).mean()), rel=1e-3)
    likely, unlikely = llm.score(["the path of a file", "file a of path the"])
    assert likely.logprob > unlikely.logprob


def _numbers(logprobs: Sequence[float | None]) -> np.ndarray:
    """All but the first token's, which nothing precedes."""
    return np.array(logprobs[1:], np.float64)


def test_a_conversation(llm: LLM) -> None:
    result = llm.chat(QUESTION, GREEDY.changed(max_tokens=60))
    assert (result.text, result.finish_reason) == (ANSWER, "stop")
    assert result.message == {"role": "assistant", "content": ANSWER}
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    both = llm.chat([QUESTION, parts, []], GREEDY.changed(max_tokens=60))
    assert [one.text for one in both[:2]] == [ANSWER, ANSWER] and both[2].error
    with pytest.raises(UsageError, match="chat has no option 'tols'"):
        llm.chat(QUESTION, tols=[])  # type: ignore[call-overload]


def test_tools_and_shapes(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"x": {"enum": [3, 4]}}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "take", "parameters": schema}}
    params = SamplingParams(max_tokens=60, temperature=0)
    called = llm.chat(QUESTION, params, tools=[tool], tool_choice="take")
    assert called.finish_reason == "tool_calls" and called.text == ""
    assert called.tool_calls[0].name == "take"
    assert called.tool_calls[0].parsed_arguments["x"] in (3, 4)
    again = llm.chat([*QUESTION, called.message, {"role": "tool", "content": "3"}], GREEDY)
    assert again.text
    assert json.loads(llm.generate("a", params.changed(json_schema=schema)).text)["x"] in (3, 4)
    assert llm.generate("a", params.changed(choice=["yes", "no"])).text in ("yes", "no")
    assert llm.generate("a", params.changed(regex=r"[ab]{3}x")).text[3] == "x"
    assert llm.generate("a", params.changed(grammar='start: "yes"')).text == "yes"
    with pytest.raises(UsageError, match="cannot be used"):
        llm.generate("a", params.changed(grammar="start: ("))
    for choice in ("required", "take"):
        with pytest.raises(UsageError, match="tool_choice is for chats with tools"):
            llm.chat(QUESTION, params, tool_choice=choice)
    wrong: dict[str, Any] = {"chat_template_kwargs": {}}
    with pytest.raises(UsageError, match=r"did you mean template_variables\?"):
        llm.chat(QUESTION, params, **wrong)


def test_pieces_make_the_answer(llm: LLM) -> None:
    pieces: list[StreamPiece] = []
    deadline = time.monotonic() + WAIT_S
    while len(pieces) < 2:  # all at once, where this process was kept from asking meanwhile
        assert time.monotonic() < deadline
        pieces = list(llm.stream(PROMPTS[0], LONG.changed(max_tokens=60)))
    whole = llm.generate(PROMPTS[0], LONG.changed(max_tokens=60))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert sum((piece.token_ids for piece in pieces), ()) == whole.token_ids
    assert [piece.finish_reason for piece in pieces[-2:]] == [None, "length"]
    assert pieces[-1].output is not None and pieces[-1].output.token_ids == whole.token_ids
    spoken = list(llm.stream(QUESTION, GREEDY.changed(max_tokens=60)))
    assert "".join(piece.text for piece in spoken) == ANSWER


def test_a_stream_that_is_left_ends_its_request(llm: LLM) -> None:
    for _ in llm.stream(PROMPTS[0], LONG):
        break
    await_idle(llm)


@pytest.fixture
def no_collections() -> Iterator[None]:
    """An interrupt in a callback of the collector is lost, and Hypothesis has such a callback."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
def test_an_interrupt_ends_a_batch(llm: LLM) -> None:
    interrupt = when_running(llm, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS * 20, LONG)
    interrupt.join()
    await_idle(llm)
    assert llm.generate("a", GREEDY).token_ids


def test_event_loops(llm: LLM) -> None:
    """Tasks side by side, one that is cancelled, and a call that blocks, as in a notebook."""
    expected = [one.token_ids for one in llm.generate(PROMPTS, GREEDY)]

    async def stream(prompt: str) -> tuple[int, ...]:
        return sum([piece.token_ids async for piece in llm.astream(prompt, GREEDY)], ())

    async def main() -> None:
        cancelled = asyncio.create_task(llm.agenerate(PROMPTS[:2], LONG))
        assert await asyncio.gather(*map(stream, PROMPTS)) == expected
        cancelled.cancel()
        results = await llm.agenerate([*PROMPTS, [1 << 30]], GREEDY)
        assert [one.token_ids for one in results[:-1]] == expected and results[-1].error
        assert (await llm.achat(QUESTION, GREEDY.changed(max_tokens=60))).text == ANSWER
        with pytest.raises(PromptError):
            await llm.agenerate([1 << 30])
        assert llm.generate(PROMPTS[0], GREEDY).token_ids == expected[0]

    asyncio.run(main())
    await_idle(llm)


def test_ids_may_be_arrays_and_prompts_as_vllm_has_them(llm: LLM) -> None:
    ids = llm.tokenize(PROMPTS[0])
    expected = llm.generate(ids, GREEDY).token_ids
    alike: list[Any] = [{"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}, np.array(ids)]
    for prompt in alike:
        assert llm.generate(prompt, sampling_params=GREEDY).token_ids == expected
    two: Any = np.array([ids, ids])
    assert len(llm.generate(two, GREEDY)) == 2
    results = llm.generate(alike, GREEDY)
    assert [one.token_ids for one in results] == [expected] * len(alike)
    unlike: list[Any] = [{"text": "a"}, {"prompt": "a", "multi_modal_data": {}}, np.array([0.5])]
    for wrong in unlike:
        with pytest.raises(PromptError, match="is no prompt"):
            _ = llm.generate([wrong], GREEDY)[0].text


def test_embeddings(llm: LLM) -> None:
    texts: list[str | list[int]] = [*PROMPTS, llm.tokenize(PROMPTS[0])]
    vectors = llm.embed(texts)
    assert vectors.shape == (len(PROMPTS) + 1, 384) and vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors[0], vectors[-1])
    unit = llm.embed(PROMPTS[0], normalize=True)
    np.testing.assert_allclose(unit, vectors[0] / np.linalg.norm(vectors[0]), rtol=1e-5)
    with pytest.raises(PromptError):
        llm.embed(["a", ""])
    assert llm.embed([]).shape == (0, 384)


def test_a_second_one_of_this_process_and_one_that_is_closed(llm: LLM) -> None:
    own: Any = llm._in_flight.connection
    if own.system.owns_ray:
        with pytest.raises(UsageError, match="this process runs a model already"):
            LLM(threads=1)
    own.num_users += 1
    handle = LLM.over(own)
    assert isinstance(handle.generate("a", GREEDY), RequestOutput)
    handle.close()
    with pytest.raises(UsageError, match="this LLM is closed"):
        handle.generate("a")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mode": "fast"}, "mode is 'fast'; give one of dense, exact"),
        ({"dtype": "q3"}, "dtype is 'q3'; give one of f16"),
        ({"cpu_memory": "much"}, "cpu_memory: 'much' is no size; write it like 8GiB"),
        ({"cpu_memory": 1000}, "allowed by cpu_memory;.* context_length"),
        ({"keep": "soon"}, "'soon' is no time"),
        ({"parallel": True}, "parallel is True; give a whole number"),
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_what_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(HotcoldError, match=told) as refused:
        LLM(**options)
    assert "\n" not in str(refused.value)
