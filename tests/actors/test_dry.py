"""DRY: the penalties by a plain search, and breakers of real tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import tokenizers

from hotcold.actors.driver.sampler import Breakers, Dry
from hotcold.model.errors import UsageError
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.sampling import SamplingParams
from hotcold.model.text.tokenizer import Tokenizer

Starts = list[tuple[int, tuple[int, ...]]]  # a token, and those that must follow it

OPTIONS: list[dict[str, Any]] = [
    {"dry_multiplier": 0.8},
    {"dry_multiplier": 2.0, "dry_base": 1.1, "dry_allowed_length": 1},
    {"dry_multiplier": 1.0, "dry_base": 1.0, "dry_allowed_length": 3},
    {"dry_multiplier": 0.5, "dry_base": 4.0, "dry_penalty_last_n": 9},
    {"dry_multiplier": 0.5, "dry_allowed_length": 0, "dry_penalty_last_n": 30},
]
WORDS = ["a", "ab", "b", "bc", "c", "abc", "cab", "?"]
# Within tokens, over two or three of them, one in another, and of a token that holds it, too.
BREAKERS = [(), ("c",), ("ba",), ("bca", "ab"), ("aba", "cb"), ("caab", "bb", "bca")]


class Letters:
    """A tokenizer of words of letters, the longest first."""

    def token_bytes(self, token_id: int) -> bytes:
        return WORDS[token_id].encode()

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        assert not add_special_tokens
        longest = "|".join(sorted(WORDS[:-1], key=len, reverse=True))
        return [list(map(WORDS.index, re.findall(longest, text))) for text in texts]


def starts_of(tokenizer: Any, vocab_size: int, texts: Sequence[str]) -> Starts:
    """All tokens that hold a text, or end with its beginning, by looking at each."""
    found: Starts = []
    for text in (text.encode()[:40] for text in texts):
        for token_id in range(vocab_size):
            written = tokenizer.token_bytes(token_id)
            if text in written:
                found.append((token_id, ()))
                continue
            for size in range(1, min(len(text), len(written) + 1)):
                if written.endswith(text[:size]):
                    (ids,) = tokenizer.encode_all([text[size:].decode()], False)
                    found.append((token_id, tuple(ids[:20])))
    return found


def dry_logits(
    logits: np.ndarray, tokens: Sequence[int], params: SamplingParams, starts: Starts
) -> np.ndarray:
    """For each token and each earlier place of it, the longest context that both have."""
    most, allowed = params.dry_penalty_last_n, params.dry_allowed_length
    last = list(tokens if most < 0 else tokens[-most:])
    limit = len(last)
    for place in reversed(range(len(last))):
        ends = [
            place + len(tail)
            for head, tail in starts
            if head == last[place] and tuple(last[place + 1 : place + 1 + len(tail)]) == tail
        ]
        if ends:
            limit = len(last) - 1 - max(ends)
            break
    found = logits.astype(np.float64)
    if limit < allowed or len(last) <= allowed:
        return found
    for token in set(last):
        longest = -1
        for place in (place for place in range(1, len(last)) if last[place] == token):
            n = 0
            while n < min(place, limit) and last[place - 1 - n] == last[-1 - n]:
                n += 1
            longest = max(longest, n)
        if longest >= allowed and (token, ()) not in starts:
            found[token] -= params.dry_multiplier * params.dry_base ** (longest - allowed)
    return found


@pytest.mark.parametrize(
    ("options", "texts"), list(zip([*OPTIONS, OPTIONS[0]], BREAKERS, strict=True)), ids=str
)
def test_the_formula(options: dict[str, Any], texts: tuple[str, ...]) -> None:
    random, params = np.random.default_rng(1), SamplingParams(**options)
    logits = random.standard_normal(8).astype(np.float32)
    breakers = Breakers(cast(Tokenizer, Letters()), 8, texts)
    starts = starts_of(Letters(), 8, texts)
    num_lowered = 0
    for num_ids in (1, 2, 5, 7):
        tokens = random.integers(0, num_ids, 80).tolist()
        growing = Dry(params, breakers, tokens[:3])
        for length in range(3, 81):
            found = logits.copy()
            growing.lower(found, tokens[:length])
            wanted = dry_logits(logits, tokens[:length], params, starts)
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
            num_lowered += int((found < logits).sum())
            afresh = logits.copy()
            Dry(params, breakers, tokens[:length]).lower(afresh, tokens[:length])
            np.testing.assert_array_equal(found, afresh)
    assert num_lowered > 20


def test_a_long_repetition_stays_finite() -> None:
    logits = np.zeros(4, np.float32)
    params, breakers = SamplingParams(dry_multiplier=100.0, dry_base=100.0), Breakers(None, 4)
    Dry(params, breakers, []).lower(logits, [1] * 3000)
    assert np.isfinite(logits).all() and logits[1] < -1e30 and not logits[[0, 2, 3]].any()


def ends(breakers: Breakers, tokens: list[int]) -> list[tuple[int, int]]:
    """Of the breakers in `tokens`, where each begins and ends."""
    found = [(breakers.begin(tokens, end, 0), end) for end in range(1, len(tokens) + 1)]
    return [(first, end) for first, end in found if first is not None]


def test_breakers_of_a_model() -> None:
    """Every way in which tokens write a breaker ends a sequence: tried by decoding texts."""
    tokenizer = Tokenizer.from_model(DEMO_DIRECTORY)
    assert tokenizer is not None
    size = tokenizer.vocab_size
    held = [one for one in range(size) if b":" in tokenizer.token_bytes(one)]
    colon = Breakers(tokenizer, size, (":",))
    assert held and [one for one in range(size) if ends(colon, [one])] == held
    assert colon.leave_out(np.arange(size)).tolist() == sorted({*range(size)} - {*held})
    text = "the value"
    breakers, starts = Breakers(tokenizer, size, (text,)), starts_of(tokenizer, size, (text,))
    for before in ("of ", "x", "", "(", "a. "):
        ids = tokenizer.encode(f"{before}{text}", False)
        expected = [
            (place, place + 1 + len(tail))
            for place, one in enumerate(ids)
            for head, tail in starts
            if head == one and tuple(ids[place + 1 : place + 1 + len(tail)]) == tail
        ]
        assert expected and ends(breakers, ids) == sorted(expected, key=lambda one: one[1])
    assert not ends(Breakers(tokenizer, size, ()), tokenizer.encode(text))


def test_a_breaker_that_begins_within_a_token() -> None:
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"xab": 0, "cd": 1, "abcd": 2, "zabcdz": 3, "?": 4}, "?")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    breakers = Breakers(Tokenizer(backend), 5, ("abcd",))
    assert ends(breakers, [0, 1, 4, 2, 0, 0, 4, 1, 3, 0]) == [(0, 2), (3, 4), (8, 9)]


def test_a_model_without_a_tokenizer() -> None:
    assert not ends(Breakers(None, 5, SamplingParams().dry_sequence_breakers), [1, 2])
    with pytest.raises(UsageError, match=r"has no tokenizer.*leave out dry_sequence_breakers"):
        Breakers(None, 5, ("a",))
