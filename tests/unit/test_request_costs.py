"""What a request's options cost the engine's thread, each at its limits, after 30,000 tokens.

Of the thread's own time, the median of several tokens, so a busy machine changes nothing. The
bound is far above what any takes, and far below what a cost that grows too fast has there.
"""

from __future__ import annotations

import string
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import tokenizers

from hotcold.actors.driver.grammars.masks import Grammars
from hotcold.actors.driver.logprobs import AnswerLogprobs, PromptLogprobs
from hotcold.actors.driver.sampler import Breakers, Dry, Penalties, TokenSampler
from hotcold.actors.driver.stop_strings import StopStrings
from hotcold.actors.protocol.messages import Grammar
from hotcold.model.errors import UsageError
from hotcold.model.parameters import Texts
from hotcold.model.sampling import SamplingParams
from hotcold.model.text.tokenizer import Tokenizer

LENGTH, VOCAB, LARGEST_VOCAB = 30_000, 32_000, 150_000
LONGEST_MS, LONGEST_START_S = 10.0, 8.0
Cost = Callable[[list[int]], Callable[[int], object]]  # of a prompt: what each later token costs


@cache
def tokenizer() -> Tokenizer:
    """Byte-level, of tokens that end in all beginnings of a run of letters."""
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    words = [*sorted(letters), *("a" * size for size in range(2, 45))]
    words += [f"{one}{other}" for one in string.ascii_letters for other in string.ascii_letters]
    vocab = {word: place for place, word in enumerate(dict.fromkeys(words))}
    merges = [("a" * (size - 1), "a") for size in range(2, 45)]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


def texts(size: int) -> tuple[str, ...]:
    """As many as a request may have, with one beginning."""
    ends = string.ascii_letters[1:] + string.digits
    return tuple(f"{'a' * (size - 2)}{ends[i % 61]}{ends[i // 61]}" for i in range(Texts.most))


def logits(size: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(size).astype(np.float32)


def dry(**options: Any) -> Cost:
    params = SamplingParams(dry_multiplier=1.0, **options)

    def begin(tokens: list[int]) -> Callable[[int], object]:
        breakers = Breakers(tokenizer(), VOCAB, params.dry_sequence_breakers)
        one, found = Dry(params, breakers, tokens), logits()

        def step(token_id: int) -> None:
            tokens.append(token_id)
            one.lower(found.copy(), tokens)

        return step

    return begin


def penalties(**options: Any) -> Cost:
    def begin(tokens: list[int]) -> Callable[[int], object]:
        one, found = Penalties(SamplingParams(**options), 0), logits()

        def step(token_id: int) -> None:
            tokens.append(token_id)
            one.applied(found, tokens)

        return step

    return begin


def drawn(**options: Any) -> Cost:
    def begin(tokens: list[int]) -> Callable[[int], object]:
        sampler = TokenSampler(SamplingParams(**{"temperature": 1.5, **options}))
        found = logits(LARGEST_VOCAB)
        return lambda token_id: sampler.draw(found)

    return begin


def stopped(stop: tuple[str, ...], text: str) -> Cost:
    def begin(tokens: list[int]) -> Callable[[int], object]:
        machine = StopStrings(stop)
        for _ in range(len(tokens) // 10):
            machine.push(text)
        return lambda token_id: machine.push(text)

    return begin


def decoded(token_id: int) -> Cost:
    def begin(tokens: list[int]) -> Callable[[int], object]:
        stream = tokenizer().stream_decoder(tokens)
        for _ in range(3000):
            stream.push(token_id)
        return lambda _: stream.push(token_id)

    return begin


def scored(num_top: int) -> Cost:
    def begin(tokens: list[int]) -> Callable[[int], object]:
        answers, found = AnswerLogprobs(num_top), logits()
        prompt = PromptLogprobs(tokens[:100], num_top)
        places = iter(range(99))

        def step(token_id: int) -> None:
            answers.add(found, token_id, None)
            prompt.add(next(places), found)

        return step

    return begin


def held(kind: Any, text: str, written: str) -> Cost:
    def begin(tokens: list[int]) -> Callable[[int], object]:
        vocab = tokenizer().vocab_size
        constraint = Grammars(tokenizer(), vocab, [vocab - 1]).constraint(Grammar(kind, text))
        found, ids = logits()[:vocab], iter(tokenizer().encode(written * 400, False))

        def step(token_id: int) -> None:
            constraint.masked(found)
            constraint.accept(next(ids))

        return step

    return begin


PENALTIES: dict[str, Any] = {
    "repeat_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0,
    "logit_bias": dict.fromkeys(range(VOCAB), -1.0),
}  # fmt: skip
ALL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
COSTS: dict[str, list[Cost]] = {
    "dry": [
        dry(dry_base=1.0),
        dry(dry_base=100.0, dry_allowed_length=0),
        dry(dry_penalty_last_n=LENGTH - 1),
        dry(dry_sequence_breakers=texts(40)),
        dry(dry_sequence_breakers=texts(Texts.most_characters)),
        dry(dry_sequence_breakers=tuple(string.ascii_lowercase[1:])),
    ],
    "penalties": [penalties(**PENALTIES, repeat_last_n=last) for last in (-1, LENGTH // 2)],
    "stop": [
        stopped(texts(Texts.most_characters), "aaaa"),
        stopped(texts(Texts.most_characters), "aaab"),
        stopped(("a" * 500 + "c", "b" * 1000), "aabb"),
    ],
    "drawn": [
        drawn(**ALL),
        drawn(**ALL | {"top_k": LARGEST_VOCAB - 1}),
        drawn(**ALL | {"top_p": 0.9999, "min_p": 1e-6}),
        drawn(**ALL, top_n_sigma=100.0, typical_p=0.9999),
        drawn(**ALL, xtc_probability=1.0, xtc_threshold=0.0),
        drawn(mirostat=1, mirostat_eta=100.0),
        drawn(mirostat=2, mirostat_tau=100.0),
    ],
    "logprobs": [scored(20)],
    "grammar": [
        held("regex", "(.*a.{18}b)|(.*b.{17}a).*", "ab "),
    ],
    "text without end": [decoded(tokenizer().vocab_size - 1), decoded(tokenizer().vocab_size)],
}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["one token", "random"])
@pytest.mark.parametrize("name", COSTS)
def test_the_cost_of_a_token(name: str, kind: str) -> None:
    random = np.random.default_rng(0).integers(0, tokenizer().vocab_size, LENGTH).tolist()
    for cost in COSTS[name]:
        tokens = random if kind == "random" else [tokenizer().token_id("a") or 0] * LENGTH
        cost(tokens[:9])(tokens[9])  # compiles
        began_s = time.thread_time()
        step = cost(list(tokens))
        start_s, took_ms = time.thread_time() - began_s, []
        for token_id in tokens[:12]:
            began_s = time.thread_time()
            step(token_id)
            took_ms.append((time.thread_time() - began_s) * 1e3)
        assert sorted(took_ms)[len(took_ms) // 2] < LONGEST_MS and start_s < LONGEST_START_S


def test_an_ambiguous_grammar_ends() -> None:
    """Each of its tokens takes longer than the one before."""
    step = held("lark", 'start: e\ne: e e | "a" | e e e | ""\n', "a")([])
    began_s = time.thread_time()
    with pytest.raises(UsageError, match="takes too long"):
        for _ in range(200):
            step(0)
    assert time.thread_time() - began_s < LONGEST_START_S
