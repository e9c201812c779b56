"""llama.cpp's routes, over a system that answers as a test says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import llguidance
import pytest
import tokenizers

from hotcold.actors.protocol.messages import GenerateRequest, Generation, TokenEvent, TokenLogprob
from hotcold.model.files.locate import DEMO_DIRECTORY
from tests.unit.ollama_routes import (
    CONTEXT,
    HELLO,
    RESULT,
    Embedding,
    Recording,
    backend_of,
    post,
    send,
    server,
)

TOKENIZER = tokenizers.Tokenizer.from_file(str(DEMO_DIRECTORY / "tokenizer.json"))


def asked(path: str = "/completion", **fields: Any) -> GenerateRequest:
    client = Recording()
    answer = post(client, path, **{"prompt": "Once", **fields})
    assert answer.status_code == 200, answer.text
    return client.requests[0]


def ids_of(text: str) -> list[int]:
    return [int(one) for one in TOKENIZER.encode(text, add_special_tokens=False).ids]


def ending(text: str, ids: list[int], reason: str = "stop", **fields: Any) -> dict[str, Any]:
    """What /completion answers where the system's answer is this."""
    result = Generation(text, ids, reason, 3, prefill_s=0.5, decode_s=0.25, num_cached_tokens=1)
    client = Recording(TokenEvent(text, result, len(ids)))
    answer = post(client, "/completion", prompt="Once", **fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_its_fields_are_those_of_openais_completions() -> None:
    theirs = asked(
        n_predict=9, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, seed=5, stop=["x"], n_probs=2,
        cache_prompt=False, ignore_eos=True, logit_bias=[[12, -1.5], [13, False]],
    )  # fmt: skip
    ours = asked(
        "/v1/completions", max_tokens=9, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, seed=5,
        stop=["x"], logprobs=2, cache=False, ignore_eos=True, logit_bias={"12": -1.5, "13": -100},
    )  # fmt: skip
    assert theirs == ours
    assert asked(path="/completions", n_predict=9) == asked(n_predict=9)


def test_what_is_not_given_is_as_in_llama_cpp() -> None:
    request = asked(seed=-1, n_predict=-1, presence_penalty=1.5)
    backend = server()[0]
    assert request.sampling == replace(
        backend.defaults, max_tokens=backend.settings.max_tokens, presence_penalty=1.5
    )
    assert request.sampling.penalize_prompt and request.sampling.repeat_last_n == 64
    assert request.use_cache and request.num_logprobs is None


def test_a_whole_answer() -> None:
    found = ending("ab", [7, 8], "length", n_predict=2)
    assert set(found) == {
        "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted",
        "tokens_evaluated", "generation_settings", "prompt", "has_new_line", "truncated",
        "stop_type", "stopping_word", "tokens_cached", "timings",
    }  # fmt: skip
    assert (found["content"], found["stop"], found["tokens"]) == ("ab", True, [])
    counts = ("tokens_predicted", "tokens_evaluated", "tokens_cached")
    assert [found[name] for name in counts] == [2, 3, 4]  # the last token was not computed
    assert found["model"] == "demo" and found["prompt"].endswith("Once")
    assert found["generation_settings"]["n_predict"] == 2
    assert found["timings"] == {
        "cache_n": 1, "prompt_n": 2, "prompt_ms": 500.0, "prompt_per_token_ms": 250.0,
        "prompt_per_second": 4.0, "predicted_n": 2, "predicted_ms": 250.0,
        "predicted_per_token_ms": 250.0, "predicted_per_second": 4.0,
    }  # fmt: skip
    assert ending("ab", [7, 8], return_tokens=True)["tokens"] == [7, 8]
    nothing = ending("a", [7], "length", n_predict=0, return_tokens=True)
    assert (nothing["content"], nothing["tokens"], nothing["tokens_predicted"]) == ("", [], 0)


def test_why_it_ended() -> None:
    eos = min(server()[0].eos_ids)
    whole = ids_of("one two three")
    cases = [
        (ending("one", [*ids_of("one"), eos], stop=["x"]), "eos", ""),
        (ending("one", ids_of("one"), "length", stop=["one"]), "limit", ""),
        (ending("one ", whole, stop=["three", "two"]), "word", "two"),
        (ending("1", ids_of("1"), grammar='root ::= "1"'), "eos", ""),
    ]
    for found, stop_type, word in cases:
        assert (found["stop_type"], found["stopping_word"]) == (stop_type, word)


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]


def test_a_stream_is_the_same_answer_in_pieces() -> None:
    first, second = TokenLogprob(7, -0.5, ((7, -0.5),)), TokenLogprob(8, -float("inf"))
    client = Recording(
        TokenEvent("a", None, 1, logprobs=(first,), token_ids=(7,)),
        TokenEvent("b", RESULT, 1, logprobs=(second,), token_ids=(8,)),
    )
    fields = {"prompt": "Once", "n_predict": 2, "n_probs": 1}
    *pieces, last = events_of(post(client, "/completion", stream=True, **fields).text)
    whole = post(client, "/completion", **fields).json()
    assert [piece["stop"] for piece in pieces] == [False, False]
    assert "".join(piece["content"] for piece in pieces) == whole["content"] == "ab"
    assert [one for piece in pieces for one in piece["tokens"]] == [7, 8]
    told = [one for piece in pieces for one in piece["completion_probabilities"]]
    assert told == whole.pop("completion_probabilities")
    assert [(one["id"], one["logprob"]) for one in told] == [(7, -0.5), (8, -9999.0)]
    text = TOKENIZER.decode([7])
    top = {"id": 7, "token": text, "bytes": list(text.encode()), "logprob": -0.5}
    assert told[0] == top | {"top_logprobs": [top]}
    assert last == whole | {"content": ""}


def test_several_prompts_are_a_list() -> None:
    found = post(Recording(), "/completion", prompt=["Once", "Twice"]).json()
    assert [one["index"] for one in found] == [0, 1]
    assert found[1]["prompt"].endswith("Twice")


def takes(grammar: str, text: str) -> bool:
    """Whether a grammar of a request takes a text, by llguidance."""
    found = asked(grammar=grammar).grammar
    assert found is not None and found.kind == "lark"
    table = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(table, llguidance.LLMatcher.grammar_from_lark(found.text))
    ids = table.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("gbnf", "taken", "others"),
    [
        (r'root ::= "\u00e9ab"', ["éab"], ["\ue9ab", "ab"]),
        (r"root ::= [\u00c0-\u017f]", ["é", "ſ"], ["a", "ɀ"]),
        (r'root ::= [\u0020] "\U0001F600"', [" 😀"], ["😀"]),
        (r'root ::= "\\u00e9"', [r"\u00e9"], ["é"]),
        (r"root ::= [^\u005d\x22]", ["a", "["], ["]", '"']),
        ('start ::= "x"\nroot ::= start "start" # start', ["xstart"], ["x", "xx"]),
    ],
)
def test_grammars_that_llguidance_would_read_otherwise(
    gbnf: str, taken: list[str], others: list[str]
) -> None:
    assert all(takes(gbnf, text) for text in taken)
    assert not any(takes(gbnf, text) for text in others)


def test_what_its_clients_send_changes_nothing() -> None:
    """An empty grammar, all names of one limit, and a penalty of 1."""
    names = dict.fromkeys(("n_predict", "max_tokens", "max_new_tokens", "num_predict"), 9)
    penalties = {"repeat_penalty": 1.1, "repetition_penalty": 1}
    request = asked("/completion", grammar="", **names, **penalties)
    plain = asked(n_predict=9, repeat_penalty=1.1)
    assert replace(request, request_id="") == replace(plain, request_id="")


def test_its_grammars_are_gbnf() -> None:
    """The converted one takes the texts that GBNF's own rules take, and no others."""
    gbnf = 'root ::= "a" [0-9]+ (" " word)?\nword ::= "yes" | "no"'
    for text, is_taken in (
        ("a1", True),
        ("a12 yes", True),
        ("a", False),
        ("b", False),
        ("a1 x", False),
    ):
        assert takes(gbnf, text) == is_taken, text
    assert asked(grammar='start: "a"').grammar.text == 'start: "a"'  # type: ignore[union-attr]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    shape = {"type": "json_schema", "json_schema": {"schema": schema}}
    ours = asked("/v1/completions", response_format=shape).grammar
    assert asked(json_schema=schema).grammar == ours
    refused = post(Recording(), "/completion", prompt="a", grammar="root ::= (")
    assert refused.status_code == 400 and "neither GBNF nor Lark" in refused.text


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"samplers": ["top_k"]}, "samplers is not supported here"),
        ({"n_cmpl": 2}, "n_cmpl is not known here; give n"),
        ({"n_predict": -3}, "n_predict must be at least -2"),
        ({"logit_bias": [[1]]}, "logit_bias must be an object, or a list of pairs"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"grammar": "root ::= (" + "a" * 20_000}, "GBNF may have 8192"),
        ({"n_predict": 1000}, "this server allows 100"),
        ({"n_predict": 9, "max_tokens": 8}, "n_predict and max_tokens differ"),
        ({"n_predict": 9, "max_new_tokens": 8}, "max_new_tokens is not known here"),
        ({"echo": True}, "echo is not supported here"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], told: str) -> None:
    answer = post(Recording(), "/completion", **{"prompt": "a", **fields})
    assert answer.status_code == 400 and told in answer.json()["error"]["message"]


def test_the_queue_holds_for_it() -> None:
    answer, _ = send(Recording(), "POST", "/completion", {"prompt": "a"}, num_active=3)
    assert answer.status_code == 503


def test_texts_to_tokens_and_back() -> None:
    ids = ids_of("naïve 🙂")
    found = post(Recording(), "/tokenize", content="naïve 🙂").json()
    assert found["tokens"] == ids
    with_bos = post(Recording(), "/tokenize", content="naïve 🙂", add_special=True).json()
    assert with_bos == post(Recording(), "/tokenize", prompt="naïve 🙂").json()
    assert with_bos["tokens"] == TOKENIZER.encode("naïve 🙂").ids
    pieces = post(Recording(), "/tokenize", content="naïve 🙂", with_pieces=True).json()["tokens"]
    assert [one["id"] for one in pieces] == ids
    said = [one["piece"] for one in pieces]
    whole = b"".join(bytes(one) if isinstance(one, list) else one.encode() for one in said)
    assert whole.decode() == "naïve 🙂"
    assert any(isinstance(one, list) for one in said)
    back = post(Recording(), "/detokenize", tokens=ids).json()
    assert back["content"] == back["prompt"] == "naïve 🙂"
    for name in ("add_special", "add_special_tokens"):
        for text in ("content", "prompt"):
            for has_bos, wanted in ((True, with_bos["tokens"]), (False, ids)):
                body = {text: "naïve 🙂", name: has_bos}
                assert post(Recording(), "/tokenize", **body).json()["tokens"] == wanted
    both = post(Recording(), "/tokenize", content="a", prompt="a")
    assert both.status_code == 400


def test_a_conversations_prompt_has_the_conversations_tokens() -> None:
    chat = Recording()
    assert post(chat, "/v1/chat/completions", messages=HELLO).status_code == 200
    prompt = post(Recording(), "/apply-template", messages=HELLO).json()["prompt"]
    assert "Hello" in prompt
    assert asked(prompt=prompt).prompt_ids == chat.requests[0].prompt_ids


def test_what_the_server_is() -> None:
    found = send(Recording(), "GET", "/props?model=demo")[0].json()
    assert found["total_slots"] == 2 and found["model_alias"] == "demo"
    generation = found["default_generation_settings"]
    assert generation["n_ctx"] == CONTEXT and generation["params"]["n_predict"] == -1
    config = json.loads((DEMO_DIRECTORY / "config.json").read_text())
    assert found["eos_token"] == TOKENIZER.id_to_token(config["eos_token_id"])
    assert str(DEMO_DIRECTORY.parent) not in json.dumps(found)
    busy = send(Recording(), "GET", "/slots", num_active=1)[0].json()
    assert [(one["id"], one["is_processing"]) for one in busy] == [(0, True), (1, False)]
    full = send(Recording(), "GET", "/slots?fail_on_no_slot=1", num_active=2)[0]
    assert full.status_code == 503
    assert send(Recording(), "GET", "/props?model=other")[0].status_code == 404
    for path in ("/models", "/health"):
        assert send(Recording(), "GET", path)[0].json() == (
            send(Recording(), "GET", f"/v1{path}")[0].json()
        )


def test_vectors() -> None:
    plain = post(Embedding(), "/v1/embeddings", input="ab").json()["data"][0]["embedding"]
    raw = post(Embedding(), "/embedding", content="ab", embd_normalize=-1).json()
    assert raw == [{"index": 0, "embedding": [plain]}]
    found = post(Embedding(), "/embeddings", input=["ab", "c"]).json()
    assert [one["index"] for one in found] == [0, 1]
    assert sum(one**2 for one in found[0]["embedding"][0]) == pytest.approx(1)
    assert found[0]["embedding"][0][1] / found[0]["embedding"][0][0] == pytest.approx(
        plain[1] / plain[0]
    )


def test_chats_without_v1() -> None:
    backend_of(Recording())
    found = post(Recording(), "/chat/completions", messages=HELLO).json()
    assert found["choices"][0]["message"]["content"] == "ab"
